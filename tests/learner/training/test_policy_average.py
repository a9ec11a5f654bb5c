"""The moving average of the policy's versions: its weights by hand, what it says, and a resume."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from learner.algorithms.presets.grpo import GrpoConfig
from learner.algorithms.presets.opd import OpdConfig
from learner.average_teacher import taught_by_average
from learner.leases.intake import TakenBatch
from learner.taught_batches import is_taught_by_policy, taught
from learner.teachers.config import TeacherConfig
from learner.teachers.teachers import TeacherFailed, TextRefused
from learner.training.batch import TrainSequence, sequences_of
from learner.training.config import TrainingConfig
from learner.training.policy_average import AVERAGE_FILE
from learner.training.ranks import CommandChannel, Ranks
from learner.training.trainer import Trainer
from tests.learner.training.test_demonstrations import OPTIMIZER, weights_of
from tests.learner.training.tiny_model import VOCABULARY, random_group, random_sequences

DECAY = 0.75
TEXTS = [TrainSequence.supervised(token_ids=each.token_ids, loss_mask=each.loss_mask) for each in random_sequences(5)]


@contextmanager
def trainer(
    path: Path,
    commands: CommandChannel,
    *,
    average: float | None = DECAY,
    algorithm: GrpoConfig | OpdConfig | None = None,
    training: Mapping[str, object] = MappingProxyType({}),
) -> Iterator[Trainer]:
    torch.manual_seed(0)  # of adapters
    made = Trainer(
        path,
        algorithm=algorithm or GrpoConfig(),
        config=TrainingConfig.model_validate({"optimizer": OPTIMIZER, "microbatch_tokens": 64, **training}),
        ranks=Ranks(),
        commands=commands,
        average=average,
    )
    yield made
    made.close()


def logprobs_of(model: torch.nn.Module, tokens: np.ndarray, mask: np.ndarray) -> torch.Tensor:
    """Log softmax over the vocabulary in the place of each masked token, in plain torch."""
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(tokens).long()[None]).logits[0, :-1].float()
    return torch.log_softmax(logits, -1)[torch.from_numpy(mask)[1:]]


@pytest.mark.parametrize("stage", [0, 2])
def test_after_two_steps_it_has_nine_sixteenths_of_the_beginning_three_of_the_first_and_a_quarter_of_the_second(
    tied_llama: Path, commands: CommandChannel, stage: int
) -> None:
    with trainer(tied_llama, commands, training={"zero_stage": stage}) as made:
        versions = [weights_of(made)]
        for version in range(2):
            made.train_step(random_sequences(8, seed=version), version=version)
            versions.append(weights_of(made))
        found = made.average_scores(TEXTS, top=3)
        after = weights_of(made)
    assert all(torch.equal(after[name], value) for name, value in versions[2].items()), "the policy is itself again"
    by_hand = {
        name: 9 / 16 * w + 3 / 16 * versions[1][name] + 1 / 4 * versions[2][name] for name, w in versions[0].items()
    }
    model = AutoModelForCausalLM.from_pretrained(tied_llama, dtype=torch.float32)
    model.load_state_dict(by_hand, strict=False)
    for text, scores in zip(TEXTS, found, strict=True):
        expected, trained = logprobs_of(model, text.token_ids, text.loss_mask), text.loss_mask[1:]
        sampled = expected.gather(1, torch.from_numpy(text.token_ids[text.loss_mask]).long()[:, None])[:, 0]
        assert scores.logprobs[trained] == pytest.approx(sampled.numpy(), abs=1e-5)
        assert not scores.logprobs[~trained].any()
        assert scores.top is not None
        assert scores.top.logprobs[trained] == pytest.approx(expected.topk(3).values.numpy(), abs=1e-5)


def test_with_adapters_it_is_of_their_factors_alone_and_a_checkpoint_holds_nothing_else(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path
) -> None:
    lora = {"lora": {"rank": 4}}
    with trainer(tied_llama, commands, training=lora) as made:
        factors = [made.host_copy(part="adapter").tensors]
        for version in range(2):
            made.train_step(random_sequences(8, seed=version), version=version)
            factors.append(made.host_copy(part="adapter").tensors)
        made.save(tmp_path)
        said = made.average_scores(TEXTS, top=0)
        made.train_step(random_sequences(8, seed=2), version=2)
        moved = made.average_scores(TEXTS, top=0)
    held = load_file(tmp_path / AVERAGE_FILE)
    by_hand = [9 / 16 * a.value + 3 / 16 * b.value + 1 / 4 * c.value for a, b, c in zip(*factors, strict=True)]
    assert sorted(float(each.double().square().sum()) for each in held.values()) == pytest.approx(
        sorted(float(each.double().square().sum()) for each in by_hand), rel=1e-5
    )
    assert sum(each.numel() for each in held.values()) == sum(each.numel() for each in by_hand)
    with trainer(tied_llama, commands, training=lora) as resumed:
        resumed.load(tmp_path)
        again = resumed.average_scores(TEXTS, top=0)
        resumed.train_step(random_sequences(8, seed=2), version=2)
        assert [each.logprobs.tolist() for each in again] == [each.logprobs.tolist() for each in said]
        found = [each.logprobs.tolist() for each in resumed.average_scores(TEXTS, top=0)]
        assert found == [each.logprobs.tolist() for each in moved]
    assert said[0].top is None


def test_a_checkpoint_without_it_is_refused(tied_llama: Path, commands: CommandChannel, tmp_path: Path) -> None:
    with trainer(tied_llama, commands, average=None) as made:
        made.save(tmp_path)
    with trainer(tied_llama, commands) as made, pytest.raises(FileNotFoundError, match="a teacher has an average"):
        made.load(tmp_path)


def test_a_group_is_taught_behind_the_prompt_of_its_teacher(tied_llama: Path, commands: CommandChannel) -> None:
    """Before the first step the average is the policy, which here reads a hint of three tokens in place of two."""
    teachers = [TeacherConfig(name="self", policy=True, average=0.9)]
    hint = (7, 8, 9)
    groups = [
        random_group(0, version=0).model_copy(update={"teacher_prompt": hint}),
        random_group(1, version=0).model_copy(update={"teacher_prompt": hint[:1]}),
    ]
    preset = OpdConfig(divergence="reverse_kl", teacher_tokens=5).preset()
    with trainer(tied_llama, commands, algorithm=OpdConfig(divergence="reverse_kl", teacher_tokens=5)) as made:
        found = taught_by_average(made, groups, teachers, top=preset.candidates)
        sequences = sequences_of(groups, version=0, max_lag=0, preset=preset, teaching=[found[0], found[1]])
        step = made.train_step(sequences, version=0)
    model = AutoModelForCausalLM.from_pretrained(tied_llama, dtype=torch.float32)
    gaps = []
    for number, group in enumerate(groups):
        prompt = np.array(group.teacher_prompt, np.int32)
        for place, one in enumerate(group.trajectories):
            mask = one.loss_mask.astype(np.bool_)
            shown = np.concatenate([prompt, one.token_ids[2:]])
            teacher = logprobs_of(model, shown, np.concatenate([np.zeros(len(prompt), np.bool_), mask[2:]]))
            logprobs, candidates = found[number].logprobs, found[number].candidates
            assert logprobs is not None
            assert candidates is not None
            sampled = teacher.gather(1, torch.from_numpy(one.token_ids[mask]).long()[:, None])[:, 0]
            assert logprobs[place][mask] == pytest.approx(sampled.numpy(), abs=1e-5)
            assert candidates[place].logprobs[mask] == pytest.approx(teacher.topk(5).values.numpy(), abs=1e-5)
            gaps.append(_reverse_kl(logprobs_of(model, one.token_ids, mask), teacher))
    assert step.means["teacher_divergence"] == pytest.approx(float(torch.cat(gaps).mean()), abs=1e-5)


def _reverse_kl(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Over the teacher's five likeliest tokens, and one for all others."""
    top = teacher.topk(5)
    inside = student.gather(1, top.indices)
    rest, others = (1 - each.exp().sum(1) for each in (inside, top.values))
    return (inside.exp() * (inside - top.values)).sum(1) + rest * (rest.log() - others.log())


def test_more_of_the_likeliest_tokens_than_there_are_is_all_of_them(tied_llama: Path, commands: CommandChannel) -> None:
    with trainer(tied_llama, commands) as made:
        (scores,) = made.average_scores(TEXTS[:1], top=1000)
    assert scores.top is not None
    assert scores.top.logprobs.shape == (len(TEXTS[0].token_ids) - 1, VOCABULARY)


def test_a_group_without_a_prompt_for_it_is_refused_and_one_of_another_teacher_is_not_asked(
    tied_llama: Path, commands: CommandChannel
) -> None:
    teachers = [
        TeacherConfig(name="self", policy=True, average=0.9, environments=("addition",)),
        TeacherConfig(name="other", path=Path("elsewhere")),
    ]
    with trainer(tied_llama, commands) as made:
        elsewhere = random_group(0, version=0).model_copy(update={"environment": "maze"})
        assert taught_by_average(made, [elsewhere], teachers, top=0) == {}
        with pytest.raises(TeacherFailed, match="came without any: set teacher_hint"):
            taught_by_average(made, [random_group(0, version=0)], teachers, top=0)


def test_a_batch_is_taught_by_the_average_without_a_word_of_the_journal(
    tied_llama: Path, commands: CommandChannel
) -> None:
    teachers = [
        TeacherConfig(name="self", policy=True, average=0.9, environments=("addition",)),
        TeacherConfig(name="other", urls=("http://127.0.0.1:1",)),
    ]
    averaged = random_group(0, version=0).model_copy(update={"teacher_prompt": (7, 8, 9)})
    refused = random_group(1, version=0).model_copy(update={"environment": "maze"})
    batch = TakenBatch(version=0, groups=(averaged, refused), lags=(0, 0))
    assert not is_taught_by_policy(teachers, "addition")
    with trainer(tied_llama, commands, algorithm=OpdConfig(divergence="reverse_kl", teacher_tokens=5)) as made:
        found = taught_by_average(made, batch.groups, teachers, top=5)[0].logprobs
        as_taught = taught(made, batch, [None, TextRefused("too long")], teachers=teachers)
        sequences = sequences_of(
            as_taught.batch.groups, version=0, max_lag=0, preset=made.preset, teaching=as_taught.teaching
        )
    members = len(averaged.trajectories)
    assert found is not None
    assert [each.teacher_logprobs.tolist() for each in sequences[:members]] == [each.tolist() for each in found]
    assert [each.taught for each in sequences] == [True] * members + [False] * len(refused.trajectories)
    assert not any(each.loss_mask.any() for each in sequences[members:])
    assert list(as_taught.lags) == []


def test_of_a_group_that_somebody_solved_the_others_are_taught_and_of_one_that_nobody_solved_none(
    tied_llama: Path, commands: CommandChannel
) -> None:
    teachers = [TeacherConfig(name="self", policy=True, average=0.9)]
    groups = [
        random_group(0, version=0).model_copy(update={"teacher_prompt": (7, 8, 9), "solved_reward": 1.0}),
        random_group(1, version=0).model_copy(update={"solved_reward": 2.0}),
    ]
    algorithm = OpdConfig(divergence="reverse_kl", teacher_tokens=1000)
    with trainer(tied_llama, commands, algorithm=algorithm) as made:
        found = taught_by_average(made, groups, teachers, top=1000)
        both = sequences_of(groups, version=0, max_lag=0, preset=made.preset, teaching=[found[0], found[1]])
        silent = sequences_of(groups[1:], version=0, max_lag=0, preset=made.preset, teaching=[found[1]])
        step = made.train_step(both, version=0)
        before = weights_of(made)
        nothing = made.train_step(silent, version=1)
    assert [each.taught for each in both] == [False, True, True, False, False, False]
    tokens = [int(each.loss_mask.sum()) for each in both]
    share = (tokens[1] + tokens[2]) / sum(tokens)
    assert step.means["taught_share"] == pytest.approx(share)
    assert step.loss == pytest.approx(share * step.means["teacher_divergence"], rel=1e-5)
    assert (nothing.loss, nothing.grad_norm, nothing.means["taught_share"]) == (0.0, 0.0, 0.0)
    assert all(torch.isfinite(value).all() for value in before.values())


def test_a_step_that_averages_trains_as_one_without(tied_llama: Path, commands: CommandChannel) -> None:
    found = []
    for average in (None, DECAY):
        with trainer(tied_llama, commands, average=average) as made:
            for version in range(2):
                batch = [replace(each, group=i // 4) for i, each in enumerate(random_sequences(8, seed=version))]
                made.train_step(batch, version=version)
                if average:
                    made.average_scores(TEXTS, top=0)
            found.append(weights_of(made))
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())
