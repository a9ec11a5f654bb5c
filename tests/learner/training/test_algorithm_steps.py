"""Algorithms that need more than one pass or one model, in the real trainer, on a tiny model."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from pydantic import TypeAdapter
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from learner.algorithms.presets.registry import ALGORITHMS, AlgorithmConfig
from learner.algorithms.ratios import forward_kl
from learner.training.batch import TrainSequence
from learner.training.config import TrainingConfig
from learner.training.ranks import CommandChannel, Ranks
from learner.training.trainer import Trainer
from tests.learner.training.algorithm_cases import ALGORITHM_CASES, OPTIMIZER, scored, told
from tests.learner.training.tiny_model import VOCABULARY, branched, random_sequences
from tests.learner.training.two_ranks_of_algorithms import (
    AVERAGE,
    CONFIG,
    DEMONSTRATION_WEIGHT,
    demonstrated,
    grouped,
    half_mismatched,
    numbers_of,
    said_by_average,
    two_players,
)
from tests.learner.training.two_ranks_of_algorithms import CASES as WHOLE_STEPS

ROOT = Path(__file__).parents[3]
RANKS = Path(__file__).parent / "two_ranks_of_algorithms.py"

ADAPTER: TypeAdapter[AlgorithmConfig] = TypeAdapter(AlgorithmConfig)


@contextmanager
def trainer(
    path: Path,
    commands: CommandChannel,
    algo: dict[str, object],
    *,
    teachers: Sequence[Path] = (),
    training: Mapping[str, object] = MappingProxyType({}),
    demonstration_weight: float = 0.0,
    average: float | None = None,
) -> Iterator[Trainer]:
    made = Trainer(
        path,
        algorithm=ADAPTER.validate_python(algo),
        config=TrainingConfig.model_validate({"optimizer": OPTIMIZER, **training}),
        ranks=Ranks(),
        commands=commands,
        teachers=teachers,
        demonstration_weight=demonstration_weight,
        average=average,
    )
    yield made
    made.close()


@pytest.fixture
def teacher(tied_llama: Path, tmp_path: Path) -> Path:
    """A model that differs from each of the others."""
    model = AutoModelForCausalLM.from_pretrained(tied_llama)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "teacher")
    return tmp_path / "teacher"


def test_the_cases_are_of_every_algorithm() -> None:
    assert {algo["type"] for algo, _, _ in ALGORITHM_CASES} == set(ALGORITHMS) - {"custom"}


@pytest.mark.parametrize(
    ("algo", "sequences", "training"),
    ALGORITHM_CASES,
    ids=[f"{case[0]['type']}-{i}" for i, case in enumerate(ALGORITHM_CASES)],
)
def test_the_split_into_microbatches_changes_neither_loss_nor_weights(
    tiny_llama: Path,
    teacher: Path,
    commands: CommandChannel,
    algo: dict[str, object],
    sequences: Callable[[int], list[TrainSequence]],
    training: dict[str, object],
) -> None:
    """With rows of a sequence each nothing is shared; in one row all is that they begin with alike."""
    teachers = [teacher] if ADAPTER.validate_python(algo).uses_teacher else []
    results = []
    for budget in (1, 60, 10_000):
        with trainer(
            tiny_llama, commands, algo, teachers=teachers, training={"microbatch_tokens": budget, **training}
        ) as made:
            steps = [made.train_step(branched(sequences(16)), version=version) for version in range(2)]
            results.append((steps, {tensor.name: tensor.value for tensor in made.host_copy().tensors}))
    counts = [steps[0].microbatches for steps, _ in results]
    assert counts[0] > counts[1] > counts[2]
    for steps, weights in results[1:]:
        for step, first in zip(steps, results[0][0], strict=True):
            assert step.loss == pytest.approx(first.loss, rel=1e-5, abs=2e-5)
            assert step.grad_norm == pytest.approx(first.grad_norm, rel=1e-3)
            assert step.means == pytest.approx(first.means, abs=1e-4)
        for name, value in weights.items():
            torch.testing.assert_close(value, results[0][1][name], rtol=0, atol=5e-5)


@pytest.mark.timeout(300)
def test_the_split_over_ranks_changes_nothing_of_what_looks_at_a_whole_step(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path
) -> None:
    argv = [sys.executable, str(RANKS), str(tied_llama), str(tmp_path)]
    subprocess.run(argv, check=True, timeout=250, env={**os.environ, "PYTHONPATH": str(ROOT)})
    for number, (algo, sequences) in enumerate(WHOLE_STEPS):
        config = {**CONFIG.model_dump(), "microbatch_tokens": 10_000}
        given = demonstrated(ADAPTER.validate_python(algo))
        with trainer(
            tied_llama, commands, algo, training=config, demonstration_weight=DEMONSTRATION_WEIGHT, average=AVERAGE
        ) as made:
            steps = [made.train_step(sequences(16), version=v, demonstrations=given) for v in range(2)]
            expected = [*map(numbers_of, steps), said_by_average(made)]
        seen = json.loads((tmp_path / f"{number}.json").read_text())
        for found, numbers in zip(seen, expected, strict=True):
            assert found.pop("grad_norm") == pytest.approx(numbers.pop("grad_norm"), rel=2e-3), algo
            assert found == pytest.approx(numbers, abs=2e-4), algo


def test_the_critic_learns_alone_while_it_warms_up_and_comes_back_from_a_checkpoint(
    tiny_llama: Path, commands: CommandChannel, tmp_path: Path
) -> None:
    training = {"critic": {"warmup_steps": 2, "optimizer": OPTIMIZER}}
    batch = grouped(16)
    with trainer(tiny_llama, commands, {"type": "ppo"}, training=training) as made:
        before = {tensor.name: tensor.value for tensor in made.host_copy().tensors}
        losses = [made.train_step(batch, version=version).means["value_loss"] for version in range(2)]
        assert losses[1] < losses[0]
        assert all(torch.equal(tensor.value, before[tensor.name]) for tensor in made.host_copy().tensors)
        made.save(tmp_path)
        third = made.train_step(batch, version=2)
        assert any(not torch.equal(tensor.value, before[tensor.name]) for tensor in made.host_copy().tensors)
    with trainer(tiny_llama, commands, {"type": "ppo"}, training=training) as again:
        again.load(tmp_path)
        repeated = again.train_step(batch, version=2)
    assert repeated.loss == pytest.approx(third.loss, abs=1e-6)
    assert repeated.means == pytest.approx(third.means, abs=1e-6)


@pytest.mark.parametrize(("rule", "power"), [("sqrt", 0.5), ("linear", 1.0)])
def test_a_step_of_vcpo_is_as_large_as_its_trajectories_count(
    tied_llama: Path, commands: CommandChannel, rule: str, power: float
) -> None:
    """The learning rate is scaled, not the gradient, of which Adam would notice nothing."""
    with trainer(tied_llama, commands, {"type": "vcpo", "step_scale": rule}) as made:
        step = made.train_step(grouped(16), version=0)
    share = step.means["effective_trajectory_share"]
    assert 0 < share < 0.99
    assert step.learning_rate == pytest.approx(CONFIG.optimizer.learning_rate * share**power)


CARRIED = {
    "kl_coefficient": 0.1,
    "kl_control": "adaptive",
    "kl_horizon": 40,
    "reward_normalisation": "standardise",
    "entropy_target": 100.0,
    "entropy_step": 1e-3,
}


def test_what_an_algorithm_carries_comes_back_from_a_checkpoint_to_the_last_digit(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path
) -> None:
    batch, algo = grouped(16), {"type": "rloo", **CARRIED}
    with trainer(tied_llama, commands, algo) as made:
        started = [made.train_step(batch, version=version) for version in range(2)]
        made.save(tmp_path)
        third = made.train_step(batch, version=2)
    coefficients = [step.means["kl_coefficient"] for step in (*started, third)]
    assert coefficients[0] == 0.1
    assert len(set(coefficients)) == 3
    with trainer(tied_llama, commands, algo) as again:
        again.load(tmp_path)
        repeated = again.train_step(batch, version=2)
    assert repeated.means["kl_coefficient"] == third.means["kl_coefficient"]
    weights = [step.means["entropy_coefficient"] for step in (*started, third, repeated)]
    assert weights == pytest.approx([0.0, 1e-3, 2e-3, 2e-3])
    assert repeated.loss == pytest.approx(third.loss, abs=1e-7)


def test_running_baselines_come_back_from_a_checkpoint_to_the_last_digit(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path
) -> None:
    batch = two_players(16)
    algo: dict[str, object] = {"type": "rae"}
    with trainer(tied_llama, commands, algo) as made:
        steps = [made.train_step(batch, version=version) for version in range(2)]
        made.save(tmp_path)
        third = made.train_step(batch, version=2)
    gaps = [step.means["role_baseline_gap"] for step in (*steps, third)]
    assert len(set(gaps)) == 3
    with trainer(tied_llama, commands, algo) as again:
        again.load(tmp_path)
        repeated = again.train_step(batch, version=2)
    assert repeated.means["role_baseline_gap"] == third.means["role_baseline_gap"]
    assert repeated.loss == pytest.approx(third.loss, abs=1e-7)


def test_a_reward_model_learns_its_pairs_and_is_written_as_transformers_reads_it(
    tiny_llama: Path, commands: CommandChannel, tmp_path: Path
) -> None:
    batch = scored(8)
    with trainer(tiny_llama, commands, {"type": "rm"}) as made:
        losses = [made.train_step(batch, version=version).loss for version in range(15)]
        scores = [float(values[0]) for values in made.outputs(batch)]
        made.export(tmp_path / "rm")
    assert losses[-1] < 0.5 * losses[0]
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")
    for sequence, score in zip(batch, scores, strict=True):
        ids = torch.from_numpy(sequence.token_ids[:-1]).long()[None]
        assert float(plain(input_ids=ids).logits[0, 0].detach()) == pytest.approx(score, abs=1e-4)


def test_with_good_examples_alone_kto_settles_and_leaves_what_is_only_measured(
    tiny_llama: Path, commands: CommandChannel
) -> None:
    """Its own examples as reference point would rise with them, and each loss stay at a half for ever."""
    batch = [replace(sequence, label=True) for sequence in half_mismatched(8)]
    with trainer(tiny_llama, commands, {"type": "dpo", "loss": "kto", "beta": 0.5}) as made:
        steps = [made.train_step(batch, version=version) for version in range(40)]
    assert steps[0].loss == pytest.approx(0.5, abs=1e-3)
    assert steps[-1].loss < 0.1
    assert steps[-1].means["good_reward"] > 2
    assert steps[-1].means["reference_kl"] * 0.5 < steps[-1].means["good_reward"] - 2
    assert (steps[0].sequences, steps[0].tokens) == (4, sum(len(sequence.token_ids) for sequence in batch))


def test_a_student_comes_to_agree_with_its_teacher(tiny_llama: Path, teacher: Path, commands: CommandChannel) -> None:
    batch = random_sequences(8)
    with trainer(tiny_llama, commands, {"type": "distill", "teacher_tokens": 40}, teachers=[teacher]) as made:
        divergences = [made.train_step(batch, version=v).means["teacher_divergence"] for v in range(30)]
    assert divergences[-1] < 0.3 * divergences[0]
    assert divergences[-1] >= 0


DIRECTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "forward_kl": lambda student, teacher: kl_div(student, teacher, reduction="none", log_target=True).sum(-1),
    "reverse_kl": lambda student, teacher: kl_div(teacher, student, reduction="none", log_target=True).sum(-1),
    "jsd": lambda student, teacher: (
        0.5 * DIRECTIONS["forward_kl"](torch.logaddexp(student, teacher) - math.log(2), teacher)
        + 0.5 * DIRECTIONS["forward_kl"](torch.logaddexp(student, teacher) - math.log(2), student)
    ),
}


def in_plain_torch(model: Path, sequence: TrainSequence) -> torch.Tensor:
    """Log softmax over the vocabulary in the place of each trained token."""
    token_ids = torch.from_numpy(sequence.token_ids).long()
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(token_ids[None]).logits[0, :-1]
    return torch.log_softmax(logits, -1)[torch.from_numpy(sequence.loss_mask)[1:]]


@pytest.mark.parametrize("divergence", DIRECTIONS)
def test_a_divergence_over_a_teachers_whole_vocabulary_is_that_of_plain_torch(
    tied_llama: Path, teacher: Path, commands: CommandChannel, divergence: str
) -> None:
    batch = grouped(4)
    gaps = [DIRECTIONS[divergence](in_plain_torch(tied_llama, each), in_plain_torch(teacher, each)) for each in batch]
    algo: dict[str, object] = {"type": "opd", "divergence": divergence, "teacher_tokens": 1000}
    with trainer(tied_llama, commands, algo, teachers=[teacher]) as made:
        step = made.train_step(batch, version=0)
    assert step.loss == pytest.approx(float(torch.cat(gaps).mean()), abs=1e-5)
    assert step.means["teacher_divergence"] == pytest.approx(step.loss, abs=1e-6)
    assert step.loss > 0.01


def with_more_rows(teacher: Path, folder: Path) -> Path:
    """The same teacher with eight more tokens that it finds likely, which are none of the tokenizer's."""
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    model.resize_token_embeddings(VOCABULARY + 8)
    with torch.no_grad():
        model.get_output_embeddings().weight[VOCABULARY:] = model.get_output_embeddings().weight[:8]
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("candidates", [5, 1000])
def test_what_a_teacher_finds_likely_beyond_the_policys_vocabulary_is_of_the_tail(
    tied_llama: Path, teacher: Path, commands: CommandChannel, tmp_path: Path, candidates: int
) -> None:
    batch, wide = grouped(4), with_more_rows(teacher, tmp_path / "wide")
    gaps = []
    for each in batch:
        student = torch.nn.functional.pad(in_plain_torch(tied_llama, each), (0, 8), value=-torch.inf)
        likely, top = in_plain_torch(wide, each).topk(min(candidates, VOCABULARY + 8))
        likely = likely.masked_fill(top >= VOCABULARY, -torch.inf)
        gaps.append(forward_kl(student_logprobs=student.gather(1, top), teacher_logprobs=likely, tail=True))
    algo: dict[str, object] = {"type": "opd", "divergence": "forward_kl", "teacher_tokens": candidates}
    with trainer(tied_llama, commands, algo, teachers=[wide]) as made:
        step = made.train_step(batch, version=0)
    assert step.loss == pytest.approx(float(torch.cat(gaps).mean()), abs=1e-5)
    assert step.skipped_updates == 0


def test_the_weight_of_a_teacher_adds_its_divergence_to_the_algorithms_own_loss(
    tied_llama: Path, teacher: Path, commands: CommandChannel
) -> None:
    batch = grouped(8)
    taught = {"teacher_weight": 0.5, "teacher_tokens": 5, "teacher_divergence": "forward_kl"}
    with trainer(tied_llama, commands, {"type": "grpo", **taught}, teachers=[teacher]) as made:
        both = made.train_step(batch, version=0)
    with trainer(tied_llama, commands, {"type": "grpo"}) as made:
        alone = made.train_step(batch, version=0)
    divergence = both.means["teacher_divergence"]
    assert divergence > 0.01
    assert both.loss == pytest.approx(alone.loss + 0.5 * divergence, abs=1e-5)
    assert both.grad_norm != pytest.approx(alone.grad_norm, rel=1e-3)


TAUGHT_ALGORITHMS: list[dict[str, object]] = [
    {"type": "opd"},
    {"type": "opd", "divergence": "jsd", "teacher_tokens": 5},
    {"type": "grpo", "teacher_weight": 0.5, "teacher_tokens": 5},
]


@pytest.mark.parametrize("algo", TAUGHT_ALGORITHMS, ids=["sampled", "divergence", "beside rewards"])
def test_the_loss_of_those_that_are_taught_adds_up_and_others_add_nothing(
    tied_llama: Path, commands: CommandChannel, algo: dict[str, object]
) -> None:
    shown = [told(each) for each in grouped(8)]

    def loss(*taught: int) -> float:
        with trainer(tied_llama, commands, algo) as made:
            step = made.train_step(
                [replace(each, taught=number % 2 in taught) for number, each in enumerate(shown)], version=0
            )
        tokens = [int(each.loss_mask.sum()) for each in shown]
        counted = sum(count for number, count in enumerate(tokens) if number % 2 in taught)
        assert step.means.get("taught_share", 1.0) == pytest.approx(counted / sum(tokens))
        return step.loss

    all_of_them, even, odd, none = loss(0, 1), loss(0), loss(1), loss()
    assert all_of_them - even == pytest.approx(odd - none, abs=1e-5)
    assert abs(odd - none) > 1e-3
    if algo["type"] == "opd":
        assert none == 0
    else:
        with trainer(tied_llama, commands, {"type": "grpo"}) as made:
            assert none == pytest.approx(made.train_step(grouped(8), version=0).loss, abs=1e-6)


@pytest.mark.parametrize(
    ("algo", "updates", "said"),
    [
        ({"type": "grpo"}, 1, ""),
        ({"type": "grpo", "clip_low": 0.1, "dual_clip": 3.0}, 1, "algo.clip_low, algo.dual_clip: without effect"),
        ({"type": "gspo", "clip_high": 0.1}, 1, "algo.clip_high: without effect"),
        ({"type": "grpo", "reward_clip": 5.0}, 1, ""),
        ({"type": "grpo", "clip_low": 0.1}, 2, ""),
        ({"type": "grpo", "clip_low": 0.1, "proximal": "behavior"}, 1, ""),
        ({"type": "grpo", "clip_low": 0.1, "proximal": "interpolate"}, 1, ""),
        ({"type": "cispo"}, 1, ""),
        ({"type": "online_dpo"}, 1, ""),
        ({"type": "sft"}, 1, ""),
    ],
)
def test_that_a_bound_has_no_effect_is_said_of_one_that_was_given(
    tied_llama: Path,
    commands: CommandChannel,
    caplog: pytest.LogCaptureFixture,
    algo: dict[str, object],
    updates: int,
    said: str,
) -> None:
    caplog.set_level("INFO")
    with trainer(tied_llama, commands, algo, training={"updates_per_step": updates}):
        assert ("without effect" in caplog.text) is bool(said)
        assert said in caplog.text


@pytest.mark.parametrize("proximal", ["behavior", "interpolate"])
def test_a_ratio_that_moves_at_once_reports_what_was_clipped_with_one_update(
    tied_llama: Path, commands: CommandChannel, proximal: str
) -> None:
    """Random behavior logprobs are far from the policy's: half of the tokens and more are beyond 0.2."""
    with trainer(tied_llama, commands, {"type": "grpo", "proximal": proximal}) as made:
        found = made.train_step(grouped(16), version=0).clip_fraction
    assert found is not None
    assert found > 0.1
    with trainer(tied_llama, commands, {"type": "grpo"}) as plain:
        assert plain.train_step(grouped(16), version=0).clip_fraction is None
