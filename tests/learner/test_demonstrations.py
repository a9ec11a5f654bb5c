"""Demonstrations of a run: what is refused by name, and the same ones after a resume and in a replay."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from examples.addition.make_model import make_tokenizer
from learner.config import LearnerConfig
from learner.data.fingerprints import fingerprint_data
from learner.data.sources import RecordError
from learner.journal.run_folder import changed_settings
from learner.replay import Differs, _trained_again, beginning_of
from learner.run_demonstrations import check_same_demonstrations, demonstrations_of
from learner.run_settings import settings_of_run
from learner.training.ranks import CommandChannel
from services.config import made_with
from services.process import WrongSettings
from tests.learner.training.tiny_model import write_tiny_llama
from tests.learner.what_if_run import STEPS, TrainedRun, trained_run


def config_of(algo: str = "grpo", **more: Any) -> LearnerConfig:
    return LearnerConfig.model_validate(
        {"model": "/nowhere", "run": {"name": "one"}, "algo": {"type": algo, **more.pop("knobs", {})}, **more}
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"demonstrations": {"weight": 0.2}}, "weight set and path is not, so that there are no demonstrations"),
        ({"demonstrations": {"path": "d.jsonl", "weight": 0}}, "greater than 0"),
        (
            {"demonstrations": {"path": "d.jsonl", "sequences_per_step": 3}, "training": {"updates_per_step": 4}},
            "sequences_per_step is 3 and training.updates_per_step 4: each update of a step takes its part",
        ),
        (
            {"demonstrations": {"path": "d.jsonl"}, "training": {"partial_batches": True}},
            "training.partial_batches is true: demonstrations are trained with a whole step",
        ),
        (
            {"algo": "grpo", "knobs": {"observation_weight": 0.1}, "training": {"partial_batches": True}},
            "partial_batches is true: algo.observation_weight weighs a mean over what environments said in a step",
        ),
        (
            {"algo": "custom", "knobs": {"path": "mine:it"}, "data": {"path": "e.jsonl"},
             "demonstrations": {"path": "d.jsonl"}},
            "demonstrations.path is set, and algo custom learns from the file data.path",
        ),
    ],
)  # fmt: skip
def test_what_has_no_demonstrations_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        config_of(**settings)


@pytest.mark.parametrize("algo", ["sft", "rm", "dpo", "distill"])
def test_an_algorithm_that_learns_from_files_has_nothing_to_show_them_beside(algo: str) -> None:
    with pytest.raises(ValidationError, match="demonstrations"):
        config_of(algo, data={"path": "e.jsonl"}, demonstrations={"path": "d.jsonl"})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_llama(tmp_path_factory.mktemp("llama"), tied=True)
    make_tokenizer("0123456789+=").save_pretrained(folder)
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "shown.jsonl"
    pairs = [{"prompt": f"{number}+{number}=", "completion": f"{2 * number}"} for number in range(10, 17)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


@pytest.fixture
def run(model: Path, file: Path, tmp_path: Path, commands: CommandChannel) -> TrainedRun:
    shown = {"path": file, "sequences_per_step": 3, "weight": 0.5}
    return trained_run(tmp_path / "runs", model, commands, checkpoint_at=2, demonstrations=shown)


def test_a_replay_draws_the_demonstrations_of_the_run(run: TrainedRun) -> None:
    config = settings_of_run(run.folder)
    base, steps = beginning_of(config, 2)
    check_same_demonstrations(config, run.folder)
    replayed = _trained_again(run.open_trainer(config), config, demonstrations_of(config), base=base, steps=steps)
    assert replayed.compared_steps == STEPS - 2
    losses = [line["demonstration_loss"] for line in run.lines()]
    assert len(set(losses)) == STEPS
    assert losses[-1] < losses[0]
    # Without them the first step is another one already.
    with pytest.raises(Differs, match="step 3 is the first that differs"):
        _trained_again(run.open_trainer(config), config, None, base=base, steps=steps)


def test_a_what_if_can_change_their_weight(run: TrainedRun) -> None:
    shown = run.what_if("demonstrations.weight=2.0")
    assert shown.now[1]["demonstration_loss"] == run.lines()[0]["demonstration_loss"]
    assert shown.now[1]["grad_norm"] > 2 * run.lines()[0]["grad_norm"]
    assert "digit for digit" in str(shown)


def test_another_file_under_the_name_of_theirs_is_refused_and_the_same_one_elsewhere_is_not(
    run: TrainedRun, file: Path, tmp_path: Path
) -> None:
    config = settings_of_run(run.folder)
    elsewhere = file.rename(tmp_path / "moved.jsonl")
    moved = config.model_copy(update={"demonstrations": config.demonstrations.model_copy(update={"path": elsewhere})})
    assert [each.key for each in changed_settings(run.folder, moved.made_with(), resume=True, accepted=False)] == []
    check_same_demonstrations(moved, run.folder)
    with pytest.raises(WrongSettings, match="is missing, and the run in"):
        check_same_demonstrations(config, run.folder)
    elsewhere.write_text(elsewhere.read_text().replace("20", "21"))
    with pytest.raises(WrongSettings, match=r"is another file, and the run in .* expected the file as it was"):
        check_same_demonstrations(moved, run.folder)
    with pytest.raises(WrongSettings, match="demonstrations_fingerprint"):
        changed_settings(run.folder, moved.made_with(), resume=True, accepted=False)
    assert made_with.read(run.folder)["settings"]["demonstrations.sequences_per_step"] == 3


def test_a_file_that_is_no_examples_names_its_line(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "shown.jsonl"
    path.write_text('{"prompt": "1+1=", "completion": "2"}\n{"question": "1+1="}\n')
    config = config_of(demonstrations={"path": path}).model_copy(update={"model": model})
    with pytest.raises(RecordError, match=r"shown.jsonl, line 2: expected an object with texts `prompt`"):
        demonstrations_of(config)
    assert demonstrations_of(config_of()) is None


def test_an_example_that_is_longer_than_the_models_positions_is_refused_before_a_step_draws_it(
    model: Path, tmp_path: Path
) -> None:
    """The model has 128 positions; the last token of an example is predicted, and never read."""
    path = tmp_path / "shown.jsonl"
    config = config_of(demonstrations={"path": path}).model_copy(update={"model": model})
    path.write_text(json.dumps({"prompt": "1+1=", "completion": "2" * 124}) + "\n")
    assert demonstrations_of(config) is not None
    path.write_text(json.dumps({"prompt": "1+1=", "completion": "2" * 125}) + "\n")
    with pytest.raises(RecordError, match=r"shown.jsonl has an example of 130 tokens, .* takes 128 by its config"):
        demonstrations_of(config)


def test_a_fingerprint_is_of_what_files_hold(tmp_path: Path) -> None:
    one, other = tmp_path / "one.jsonl", tmp_path / "set"
    one.write_text("a")
    other.mkdir()
    (other / "part").write_text("a")
    assert fingerprint_data(one) == fingerprint_data(other) == fingerprint_data(other.with_name("set#train"))
    one.write_text("b")
    assert fingerprint_data(one) != fingerprint_data(other)
    assert fingerprint_data(tmp_path / "none") is None
