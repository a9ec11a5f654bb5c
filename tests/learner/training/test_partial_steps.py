"""Steps that begin before their batch is complete: the same gradient, and the same bits however early they begin."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from learner.algorithms.presets.registry import ALGORITHMS, AlgorithmConfig
from learner.training.batch import TrainSequence, TrainTurn
from learner.training.config import TrainingConfig
from learner.training.ranks import CommandChannel, Ranks
from learner.training.step import StepMetrics, TrainingStopped
from learner.training.step_parts import parts_of
from learner.training.trainer import Trainer
from tests.learner.training.engine_parts import assert_close
from tests.learner.training.tiny_model import branched, random_sequences
from tests.learner.training.two_ranks_of_partial_steps import config, steps

ROOT = Path(__file__).parents[3]
RANKS = Path(__file__).parent / "two_ranks_of_partial_steps.py"
ADAPTER: TypeAdapter[AlgorithmConfig] = TypeAdapter(AlgorithmConfig)
# Far below epsilon a step of AdamW is the gradient itself: weights that agree mean gradients that do.
PLAIN = {"learning_rate": 1e3, "epsilon": 1e3, "beta1": 0.0, "beta2": 0.0, "max_grad_norm": 0.0}
USUAL = {"learning_rate": 1e-2, "epsilon": 1e-4, "weight_decay": 0.1, "max_grad_norm": 0.5}
GROUPS, SIZE = 6, 4
OF_GROUPS = [name for name, each in ALGORITHMS.items() if each.of_groups]


def groups(*, seed: int = 0) -> list[TrainSequence]:
    """Groups whose members begin alike and turn twice, one of them without spread, with greedy answers beside."""
    made = branched(random_sequences(GROUPS * SIZE, seed=seed))
    return [
        replace(
            each,
            group=number // SIZE,
            reward=0.5 if number // SIZE == 2 else float(number % 3 == 0),
            greedy_reward=0.25 * (number // SIZE),
            turns=(TrainTurn(start=0, state=7), TrainTurn(start=len(each.token_ids) // 2, state=number % 2)),
        )
        for number, each in enumerate(made)
    ]


@contextmanager
def trainer(
    path: Path,
    commands: CommandChannel,
    *,
    algo: dict[str, object] | None = None,
    partial: bool = True,
    keeps: bool = False,
    should_stop: Iterator[bool] | None = None,
    training: Mapping[str, object] = MappingProxyType({}),
) -> Iterator[Trainer]:
    given = {"optimizer": PLAIN, "microbatch_tokens": 64, **training, "partial_batches": partial}
    torch.manual_seed(3)
    made = Trainer(
        path,
        algorithm=ADAPTER.validate_python(algo or {"type": "grpo"}),
        config=TrainingConfig.model_validate(given),
        ranks=Ranks(),
        commands=commands,
        keeps_tokens=keeps,
        keeps_pulls=keeps,
        should_stop=(lambda: False) if should_stop is None else lambda: next(should_stop),
    )
    yield made
    made.close()


def weights(made: Trainer) -> dict[str, torch.Tensor]:
    return {each.name: each.value.clone() for each in made.host_copy().tensors}


def numbers(metrics: StepMetrics) -> dict[str, object]:
    timed = ("forward_backward_s", "optimizer_s", "pass_costs")
    return {name: value for name, value in asdict(metrics).items() if name not in timed}


def begun_with(made: Trainer, step: Sequence[TrainSequence], *, version: int = 0) -> StepMetrics:
    """As its groups come, one by one."""
    for count in range(1, GROUPS):
        made.begin_step(step[: count * SIZE], version=version)
    return made.train_step(step, version=version)


ROUNDING = 5e-6
"""Weights of about 1 after a step, whose sums in float32 have another order on other processors."""

KNOBS: dict[str, dict[str, object]] = {
    "grpo": {"token_window": [0.5, 5.0], "kl_coefficient": 0.1, "entropy_coefficient": 0.01, "truncated": "mask"},
    "dr_grpo": {"aggregation": "constant", "constant_length": 10},
    "dapo": {"overlong_length": 12, "overlong_buffer": 4},
    "rloo": {"kl_coefficient": 0.1},
    "remax": {"kl_coefficient": 0.1},
    "gspo": {"sequence_window": [0.2, 5.0]},
}


@pytest.mark.parametrize("algo", OF_GROUPS)
def test_a_step_in_parts_has_the_gradient_of_the_whole_batch(
    tied_llama: Path, commands: CommandChannel, algo: str
) -> None:
    step, settings = groups(), {"type": algo, **KNOBS.get(algo, {})}
    with trainer(tied_llama, commands, algo=settings, partial=False, keeps=True) as whole:
        expected, before = whole.train_step(step, version=0), weights(whole)
        tokens, pulls = whole.tokens, whole.pulls
    with trainer(tied_llama, commands, algo=settings, keeps=True) as made:
        start = weights(made)
        found = begun_with(made, step)
        assert_close(weights(made), before, atol=ROUNDING)
        assert any((start[name] != value).any() for name, value in before.items()), "nothing was learned"
        assert made.tokens is not None
        assert made.pulls is not None
        assert pulls is not None
        for name, values in vars(made.tokens).items():
            np.testing.assert_allclose(values, vars(tokens)[name], atol=1e-5, err_msg=name)
        np.testing.assert_allclose(made.pulls.pulls, pulls.pulls, atol=1e-6)
    assert found.microbatches > 1
    ours, theirs = numbers(found), numbers(expected)
    for name in ("loss", "grad_norm", "entropy", "behavior_kl", "importance_ratio_mean", "effective_sample_share"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
    for name in ("tokens", "trained_tokens", "sequences", "updates", "learning_rate"):
        assert ours[name] == theirs[name], name
    assert found.means == pytest.approx(expected.means, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("training", "atol"),
    [
        ({"optimizer": USUAL}, ROUNDING),
        ({"optimizer": USUAL, "zero_stage": 1}, ROUNDING),
        ({"optimizer": USUAL, "zero_stage": 2}, ROUNDING),
        ({"optimizer": USUAL, "zero_stage": 3}, ROUNDING),
        ({"optimizer": {**PLAIN, "learning_rate": 10.0}, "zero_stage": 1, "dtype": "bfloat16"}, 5e-4),
        ({"optimizer": USUAL, "gradient_checkpointing": True}, ROUNDING),
        ({"lora": {"rank": 4, "alpha": 8.0}}, ROUNDING),
    ],
    ids=str,
)
def test_with_each_way_of_training_it_is_the_whole_batch_step_and_the_same_bits_early_and_late(
    tied_llama: Path, commands: CommandChannel, training: dict[str, object], atol: float
) -> None:
    both = [groups(seed=1), groups(seed=2)]
    with trainer(tied_llama, commands, partial=False, training=training) as whole:
        expected = [whole.train_step(step, version=version) for version, step in enumerate(both)]
        theirs = weights(whole)
    with trainer(tied_llama, commands, training=training) as made:
        late = [numbers(made.train_step(step, version=version)) for version, step in enumerate(both)]
        of_late = weights(made)
    with trainer(tied_llama, commands, training=training) as made:
        early = [numbers(begun_with(made, step, version=version)) for version, step in enumerate(both)]
        assert_close(weights(made), of_late, atol=0)
    assert early == late
    assert_close(of_late, theirs, atol=atol)
    for ours, other in zip(late, expected, strict=True):
        assert ours["grad_norm"] == pytest.approx(other.grad_norm, rel=0.01 if "dtype" in training else 1e-4)


DROPPING = {"lora": {"rank": 4, "alpha": 8.0, "dropout": 0.5}}


@pytest.mark.parametrize(
    "training",
    [DROPPING, *({"zero_stage": stage} for stage in range(4)), {"zero_stage": 1, "dtype": "bfloat16"}],
    ids=str,
)
def test_a_group_that_is_withdrawn_leaves_nothing_of_its_gradient(
    tied_llama: Path, commands: CommandChannel, caplog: pytest.LogCaptureFixture, training: dict[str, object]
) -> None:
    """Nor of the random numbers that were drawn for it: dropout masks are those of the step without it."""
    step, other = groups(), groups(seed=9)
    with trainer(tied_llama, commands, training=training) as made:
        expected = numbers(made.train_step(step, version=0))
        unspoilt = weights(made)
    with trainer(tied_llama, commands, training=training) as made, caplog.at_level("INFO"):
        caplog.clear()
        made.begin_step([*other[:SIZE], *step[SIZE : 4 * SIZE]], version=0)
        assert not caplog.messages
        assert numbers(made.train_step(step, version=0)) == expected
        assert_close(weights(made), unspoilt, atol=0)
    assert caplog.messages == ["what was begun of step 1 is computed again: one of its groups was withdrawn"]


def test_a_withdrawn_group_is_noticed_while_others_still_come(tied_llama: Path, commands: CommandChannel) -> None:
    step, other = groups(), groups(seed=9)
    with trainer(tied_llama, commands) as made:
        expected = numbers(made.train_step(step, version=0))
    with trainer(tied_llama, commands) as made:
        made.begin_step(other[: 4 * SIZE], version=0)
        made.begin_step(step[:SIZE], version=0)
        made.begin_step(step[: 4 * SIZE], version=0)
        assert numbers(made.train_step(step, version=0)) == expected


def test_what_was_begun_and_discarded_was_never_there(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path
) -> None:
    """As where a run ends before the batch is complete: the checkpoint is that of the step before."""
    step = groups()
    with trainer(tied_llama, commands, training=DROPPING) as made:
        made.save(tmp_path / "before")
        made.begin_step(step[: 4 * SIZE], version=0)
        made.discard_step()
        made.save(tmp_path / "after")
        assert _files(tmp_path / "after")
        assert _files(tmp_path / "after") == _files(tmp_path / "before")
        found = numbers(made.train_step(step, version=0))
    with trainer(tied_llama, commands, training=DROPPING) as made:
        assert numbers(made.train_step(step, version=0)) == found


def _files(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*.safetensors")}


def test_a_stop_in_the_middle_of_a_part_leaves_no_gradient(tied_llama: Path, commands: CommandChannel) -> None:
    step, answers = groups(), iter([False, False, True, *[False] * 100])
    with trainer(tied_llama, commands) as made:
        expected = numbers(made.train_step(step, version=0))
    with trainer(tied_llama, commands, should_stop=answers) as made:
        with pytest.raises(TrainingStopped):
            made.begin_step(step, version=0)
        assert numbers(made.train_step(step, version=0)) == expected


def test_a_part_is_a_row_of_whole_groups_and_ends_where_the_groups_before_it_say() -> None:
    def sized(group: int, length: int, *, prompt: int = 1) -> TrainSequence:
        return replace(
            TrainSequence.supervised(token_ids=np.zeros(length, dtype=np.int32), loss_mask=np.arange(length) >= prompt),
            group=group,
        )

    step = [
        sized(0, 9, prompt=5), sized(0, 9, prompt=5),  # the prompt counts once: 13
        sized(1, 7), sized(2, 30), sized(3, 10), sized(3, 12), sized(4, 1 + 1),
    ]  # fmt: skip
    cut = [[each.group for each in part] for part in parts_of(step, tokens=20)]
    assert cut == [[0, 0, 1], [2], [3, 3], [4]]
    for count in range(1, len(step) + 1):
        head = parts_of(step[:count], tokens=20)
        assert [[each.group for each in part] for part in head[:-1]] == cut[: len(head) - 1]


@pytest.mark.parametrize("stage", [0, 2])
def test_the_ranks_begin_a_step_together_and_begin_it_again_together(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path, stage: int
) -> None:
    argv = [sys.executable, str(RANKS), str(tied_llama), str(tmp_path / "out.json"), str(stage)]
    subprocess.run(argv, check=True, timeout=250, env={**os.environ, "PYTHONPATH": str(ROOT)})
    whole = config(stage=0, partial=False).model_dump()
    with trainer(tied_llama, commands, partial=False, training=whole) as made:
        expected = [made.train_step(step, version=version) for version, step in enumerate(steps())]
    for found, step in zip(json.loads((tmp_path / "out.json").read_text()), expected, strict=True):
        assert found["loss"] == pytest.approx(step.loss, abs=1e-5)
        assert found["grad_norm"] == pytest.approx(step.grad_norm, rel=1e-4)
