"""A directory that is no reward model is named when the service starts."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import JsonValue

from protocol.rewards import RewardInput, ScoreItem, ScoreMessage, read_reward_input
from reward_service.config import RewardServiceConfig
from reward_service.included import build_registry
from reward_service.models.config import RewardModelConfig
from reward_service.models.folder import RewardModel, open_reward_model
from reward_service.models.process import ModelMessage
from reward_service.models.reward_model import job_of
from reward_service.verifier.submission import UserError
from tests.reward_service.models.tiny_reward_model import CHAT, LONGEST, edit_settings, write_reward_model


def opened(folder: Path) -> RewardModel:
    return open_reward_model(RewardModelConfig(path=folder))


def test_what_the_directory_says_is_read(tmp_path: Path) -> None:
    model = opened(write_reward_model(tmp_path))
    assert (model.input, model.longest) == (CHAT, LONGEST)


def test_the_version_of_the_verifier_tells_models_apart(tmp_path: Path) -> None:
    versions = set()
    for seed in (0, 1):
        folder = write_reward_model(tmp_path / str(seed), seed=seed)
        models = (RewardModelConfig(path=folder),)
        versions.add(build_registry(RewardServiceConfig(reward_models=models)).get("reward_model").version)
    assert len(versions) == 2


def test_the_chat_template_of_the_entry_stands_in_the_version_and_for_one_that_is_missing(tmp_path: Path) -> None:
    folder = write_reward_model(tmp_path / "model")
    versions = set()
    for text in ("", "{{ messages }}", "{{ messages | length }}"):
        (tmp_path / "mine.jinja").write_text(text)
        given = RewardModelConfig(path=folder, chat_template=tmp_path / "mine.jinja" if text else None)
        assert open_reward_model(given).template == text
        versions.add(build_registry(RewardServiceConfig(reward_models=(given,))).get("reward_model").version)
        (folder / "chat_template.jinja").unlink(missing_ok=True)  # after the first, which has no other
    assert len(versions) == 3
    with pytest.raises(UserError, match=r"absent\.jinja is not a file: expected the Jinja text of a chat template"):
        open_reward_model(RewardModelConfig(path=folder, chat_template=tmp_path / "absent.jinja"))


def test_two_reward_models_need_two_names(tmp_path: Path) -> None:
    models = (RewardModelConfig(path=write_reward_model(tmp_path)),) * 2
    with pytest.raises(UserError, match="two verifiers are named 'reward_model'"):
        build_registry(RewardServiceConfig(reward_models=models))


def remove(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def write_input(text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "headway_reward.json").write_text(text)

    return change


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (remove("config.json"), r"config\.json cannot be read: expected a Hugging Face model directory"),
        (lambda folder: (folder / "config.json").write_text("{"), r"config\.json is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), r"config\.json holds list"),
        (lambda folder: edit_settings(folder, architectures=["LlamaForCausalLM"]), "a model of the kind .*CausalLM"),
        (lambda folder: edit_settings(folder, architectures=None), "a model of the kind"),
        (lambda folder: edit_settings(folder, id2label=None), "has 2 labels: a reward model has one"),
        (lambda folder: edit_settings(folder, id2label={"0": "a", "1": "b", "2": "c"}), "has 3 labels"),
        (remove("tokenizer.json"), "has no tokenizer"),
        (remove("model.safetensors"), "has no weights"),
        (remove("chat_template.jinja"), "takes messages .* and has no chat template: give it the one that it was"),
        (write_input("{}"), r"headway_reward\.json: format: Field required"),
        (write_input('{"format": "html"}'), r"headway_reward\.json: format: Input should be 'chat' or 'plain'"),
        (write_input('{"format": "chat", "max_token": 4}'), r"headway_reward\.json: max_token: Extra inputs"),
    ],
)
def test_a_directory_that_is_no_reward_model_is_named_with_what_is_wrong(
    tmp_path: Path, change: Callable[[Path], object], complaint: str
) -> None:
    change(write_reward_model(tmp_path / "model"))
    with pytest.raises(UserError, match=complaint) as caught:
        opened(tmp_path / "model")
    assert str(tmp_path / "model") in str(caught.value)


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent.config\.json cannot be read"):
        opened(tmp_path / "absent")


def test_an_input_file_is_written_as_it_is_read(tmp_path: Path) -> None:
    given = RewardInput(format="plain", tokenize="apart", special_tokens=True, max_tokens=7)
    assert read_reward_input(write_reward_model(tmp_path, given=given)) == given
    item = ScoreItem(id="a", verifier="reward_model", completion="c", prompt="p")
    assert job_of(item, opened(tmp_path)).special_tokens


def test_arguments_of_a_task_go_before_the_directory_and_never_beyond_the_model(tmp_path: Path) -> None:
    model = opened(write_reward_model(tmp_path))

    def made(**arguments: object) -> tuple[str, str, int | None]:
        item = ScoreItem.model_validate(
            {"id": "a", "verifier": "reward_model", "completion": "c", "prompt": "p", "arguments": arguments}
        )
        job = job_of(item, model)
        return job.format, job.tokenize, job.max_tokens

    assert made() == ("chat", "apart", LONGEST)
    assert made(format="plain", tokenize="whole", max_tokens=5) == ("plain", "whole", 5)
    assert made(max_tokens=10 * LONGEST) == ("chat", "apart", LONGEST)


def test_the_prompt_is_a_users_message_unless_messages_are_given(tmp_path: Path) -> None:
    model = opened(write_reward_model(tmp_path))
    turn: JsonValue = {"role": "system", "content": "s"}
    plain = ScoreItem(id="a", verifier="reward_model", completion="c", prompt="p")
    sent = plain.model_copy(update={"messages": (ScoreMessage(role="assistant", content="before"),)})
    told = sent.model_copy(update={"arguments": {"messages": [turn]}})
    assert job_of(plain, model).messages == (ModelMessage(role="user", content="p"),)
    assert job_of(sent, model).messages == (ModelMessage(role="assistant", content="before"),)
    assert job_of(told, model).messages == (ModelMessage(role="system", content="s"),)


@pytest.mark.parametrize(
    ("given", "prompt", "arguments", "complaint"),
    [
        (CHAT, "", {}, "neither a prompt nor messages"),
        (CHAT, "p", {"messages": []}, "messages: Tuple should have at least 1 item"),
        (CHAT, "p", {"formats": "chat"}, "formats: Extra inputs are not permitted"),
        (None, "p", {}, r"has no headway_reward\.json that says what input the model takes"),
        (RewardInput(format="plain"), "p", {"messages": [{"role": "user", "content": "x"}]}, "for the format chat"),
    ],
)
def test_arguments_that_do_not_fit_are_the_users_fault(
    tmp_path: Path, given: RewardInput | None, prompt: str, arguments: dict[str, object], complaint: str
) -> None:
    model = opened(write_reward_model(tmp_path, given=given))
    item = ScoreItem.model_validate(
        {"id": "a", "verifier": "reward_model", "completion": "c", "prompt": prompt, "arguments": arguments}
    )
    with pytest.raises(UserError, match=complaint):
        job_of(item, model)
