"""Scores of a reward model's process: for each input of a batch the same as for that input alone."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import AutoTokenizer

from protocol.rewards import Tokenize
from reward_service.models.config import RewardModelConfig
from reward_service.models.folder import fingerprint, open_reward_model
from reward_service.models.process import ModelJob, ModelMessage, RewardModelToLoad
from reward_service.models.worker import LoadedRewardModel, input_ids, load_reward_model
from reward_service.verifier.submission import UserError
from reward_service.verifier.worker_pool import WorkerReply
from tests.reward_service.models.tiny_reward_model import (
    CHARACTERS,
    END,
    PAD,
    alone,
    edit_settings,
    write_reward_model,
)

TEXTS = ("a", "is it?", "no.", "the quick brown fox jumps", "", "<pad>", "why not<pad>", "yes! yes!")

KINDS: tuple[Tokenize, ...] = ("apart", "whole")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def tokens_of(folder: Path, jobs: Sequence[ModelJob]) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [input_ids(each, tokenizer) for each in jobs]


def loaded(
    folder: Path, *, device: str = "cpu", batch_tokens: int = 16384, chat_template: str = ""
) -> LoadedRewardModel:
    return load_reward_model(
        RewardModelToLoad(
            path=str(folder),
            device=device,
            dtype="float32",
            threads=1,
            batch_tokens=batch_tokens,
            fingerprint=fingerprint(folder),
            chat_template=chat_template,
        )
    )


def job(completion: str, *, tokenize: Tokenize = "whole", max_tokens: int | None = None) -> ModelJob:
    return ModelJob(
        format="chat",
        tokenize=tokenize,
        max_tokens=max_tokens,
        messages=(ModelMessage(role="user", content="hi"),),
        prompt="",
        completion=completion,
    )


def rewards(replies: tuple[WorkerReply, ...]) -> list[float]:
    assert all(reply.error is None for reply in replies), replies
    return [reply.reward for reply in replies if reply.reward is not None]


@pytest.mark.parametrize("pad", [None, PAD, END])
@pytest.mark.parametrize("batch_tokens", [1, 40, 16384])
def test_a_batch_gives_what_hugging_face_gives_for_each_input_alone(
    tmp_path: Path, pad: int | None, batch_tokens: int
) -> None:
    folder = write_reward_model(tmp_path, pad=pad)
    model = loaded(folder, batch_tokens=batch_tokens)
    jobs = [job(text) for text in TEXTS]
    expected = [alone(folder, tokens) for tokens in tokens_of(folder, jobs)]
    assert len({round(value, 4) for value in expected}) == len(TEXTS), "the model tells the texts apart"
    assert rewards(model.score(jobs)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("pad", [None, PAD, END])
def test_the_score_of_what_is_tokenized_apart_is_at_its_end_token_even_if_that_is_named_as_padding(
    tmp_path: Path, pad: int | None
) -> None:
    folder = write_reward_model(tmp_path / "served", pad=pad)
    without = tmp_path / "without"  # the same weights; where no padding is named the score is at the last token
    shutil.copytree(folder, without)
    edit_settings(without, pad_token_id=None)
    jobs = [job(text, tokenize="apart") for text in TEXTS]
    tokens = tokens_of(folder, jobs)
    assert {row[-1] for row in tokens} == {END}
    expected = [alone(without, row) for row in tokens]
    assert rewards(loaded(folder).score(jobs)) == pytest.approx(expected, abs=1e-5)


def test_a_batch_of_both_kinds_answers_in_order(tmp_path: Path) -> None:
    model = loaded(write_reward_model(tmp_path, pad=END))
    jobs = [job(text, tokenize=kind) for text in TEXTS for kind in KINDS]
    expected = [reward for each in jobs for reward in rewards(model.score([each]))]
    assert rewards(model.score(jobs)) == pytest.approx(expected, abs=1e-5)


def test_a_batch_that_uses_all_of_the_vocabulary_is_scored_all_the_same(tmp_path: Path) -> None:
    folder = write_reward_model(tmp_path)
    model = loaded(folder)
    every = "<user><pad>" + CHARACTERS
    jobs = [job(every), job("a")]
    expected = [alone(folder, tokens) for tokens in tokens_of(folder, jobs)]
    assert rewards(model.score(jobs)) == pytest.approx(expected, abs=1e-5)


def test_an_input_that_is_too_long_is_an_error_of_its_own_and_leaves_the_others_alone(tmp_path: Path) -> None:
    model = loaded(write_reward_model(tmp_path))
    first, long, last = model.score([job("a"), job("b" * 100, max_tokens=64), job("c")])
    assert long.reward is None
    assert long.error is not None
    assert (long.error.kind, "takes at most 64" in long.error.message) == ("data", True)
    assert rewards((first, last)) == pytest.approx(rewards(model.score([job("a"), job("c")])), abs=1e-5)


def test_a_reward_that_is_not_finite_is_an_error_of_the_data(tmp_path: Path) -> None:
    folder = write_reward_model(tmp_path)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights["score.weight"] = torch.full_like(weights["score.weight"], float("inf"))
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (reply,) = loaded(folder).score([job("a")])
    assert reply.reward is None
    assert reply.error is not None
    assert (reply.error.kind, "not finite" in reply.error.message) == ("data", True)


def test_weights_that_leave_the_score_to_chance_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lack score\.weight: is it a reward model\?"):
        loaded(write_reward_model(tmp_path, causal=True))


def test_a_chat_template_that_it_was_given_goes_before_its_own(tmp_path: Path) -> None:
    folder = write_reward_model(tmp_path / "one")
    model = loaded(folder, chat_template="{% for message in messages %}{{ message['content'] }}!{% endfor %}")
    text = AutoTokenizer.from_pretrained(folder).encode("hi!is it?!", add_special_tokens=False)
    assert rewards(model.score([job("is it?")])) == pytest.approx([alone(folder, text)], abs=1e-5)


def test_a_chat_template_that_cannot_be_used_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"chat template that .* was given cannot be used: only tools"):
        loaded(write_reward_model(tmp_path), chat_template="{{ raise_exception('only tools') }}")


def test_files_that_changed_since_the_service_started_are_refused(tmp_path: Path) -> None:
    folder = write_reward_model(tmp_path)
    known = open_reward_model(RewardModelConfig(path=folder)).fingerprint
    write_reward_model(tmp_path, seed=1)
    with pytest.raises(UserError, match="have changed since the service was started"):
        load_reward_model(
            RewardModelToLoad(
                path=str(folder), device="cpu", dtype="auto", threads=1, batch_tokens=64, fingerprint=known
            )
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_what_a_cpu_gives(tmp_path: Path) -> None:
    folder = write_reward_model(tmp_path)
    jobs = [job(text) for text in TEXTS]
    assert rewards(loaded(folder, device="cuda").score(jobs)) == pytest.approx(
        rewards(loaded(folder).score(jobs)), abs=1e-3
    )
