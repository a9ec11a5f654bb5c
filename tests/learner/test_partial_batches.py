"""Batches that are begun before they are complete: from the settings and the intake to the trainer's thread."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import TypeAdapter, ValidationError

from learner.algorithms.presets.registry import AlgorithmConfig
from learner.config import LearnerConfig
from learner.leases.intake import BegunBatch, EndedEarly, TakenBatch
from learner.online import StepSequences
from learner.training.batch import TrainSequence, sequences_of
from learner.weights.provenance import LoadedWeights
from protocol.messages import LeaseGrant
from protocol.model import PolicyVersion
from protocol.trajectories import TrajectoryGroup
from tests.learner.envs import RunningIntake, learner
from tests.learner.samples import INCARNATION, LEDGER, group, trajectory
from tests.learner.training.tiny_model import random_group
from tests.learner.trainings import NothingToTrain, settings_of, training_of

PRESET = TypeAdapter(AlgorithmConfig).validate_python({"type": "grpo"}).preset()
FOUR = replace(LEDGER, groups_per_step=4)
OTHER = "h-1"


def config_of(algo: dict[str, Any] | None = None, *, training: dict[str, Any] | None = None, **more: Any) -> Any:
    return LearnerConfig.model_validate(
        {
            "model": "/nowhere",
            "run": {"name": "one"},
            "algo": algo or {"type": "grpo"},
            "training": {"partial_batches": True, **(training or {})},
            **more,
        }
    )


@pytest.mark.parametrize(
    ("algo", "said"),
    [
        ({"type": "reinforce_pp"}, "algo reinforce_pp looks at all groups of a step together"),
        ({"type": "ppo"}, "algo ppo looks at all groups of a step together"),
        ({"type": "gdpo", "components": {"right": 1.0}}, "algo gdpo looks at all groups of a step together"),
        ({"type": "rae"}, "algo rae looks at all groups of a step together"),
        ({"type": "clip_cov"}, "algo clip_cov looks at all groups of a step together"),
        ({"type": "kl_cov"}, "algo kl_cov looks at all groups of a step together"),
        ({"type": "vcpo"}, "algo vcpo looks at all groups of a step together"),
        ({"type": "grpo", "advantage_scale": "batch"}, "algo.advantage_scale is batch, the deviation of all rewards"),
        ({"type": "grpo", "reward_normalisation": "scale"}, "algo.reward_normalisation goes by the moments"),
        ({"type": "rloo", "kl_coefficient": 0.1, "kl_control": "adaptive"}, "algo.kl_control is adaptive"),
        ({"type": "dapo", "positive_nll": 0.1}, "algo.positive_nll counts the good trajectories of a step"),
        ({"type": "grpo", "self_normalise": True}, "algo.self_normalise divides by the mean weight of a step"),
        ({"type": "grpo", "second_moment_limit": 0.04}, "algo.second_moment_limit bounds a mean over a step"),
        ({"type": "cispo", "entropy_target": 0.2}, "algo.entropy_target goes by the entropy of a step"),
    ],
)
def test_an_algorithm_that_sees_the_whole_step_is_refused_by_name(algo: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=f"training.partial_batches is true: {said}"):
        config_of(algo)


@pytest.mark.parametrize(
    ("training", "said"),
    [
        ({"updates_per_step": 2}, "partial_batches is true and updates_per_step is 2"),
        ({"epochs_per_step": 3}, "partial_batches is true and epochs_per_step is 3"),
        ({"router": {"aux_loss_coef": 0.1}}, "partial_batches is true and router.aux_loss_coef is above 0"),
        ({"offload": "optimizer", "zero_stage": 1}, "partial_batches is true and offload is optimizer"),
    ],
)
def test_training_that_needs_the_whole_batch_is_refused_by_name(training: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        config_of(training=training)


def test_teachers_are_refused_and_what_looks_at_groups_alone_is_not() -> None:
    teachers = [{"name": "wise", "path": "/nowhere"}]
    with pytest.raises(ValidationError, match="the teachers of algo grpo are asked about a whole step"):
        config_of({"type": "grpo", "teacher_weight": 0.1}, teachers=teachers)
    for name in ("grpo", "dapo", "gspo", "cispo", "rloo", "reinforce", "gigpo"):
        assert config_of({"type": name}).training.partial_batches
    kept = {"kl_coefficient": 0.1, "token_window": (0.5, 5.0), "entropy_coefficient": 0.01}
    assert config_of({"type": "grpo", **kept}, reuse={"share": 0.25}).training.partial_batches


def test_learning_from_files_has_no_batches_to_begin() -> None:
    said = LearnerConfig.without_effect({"algo.type": "sft", "training.partial_batches": True})
    assert said["training.partial_batches"].startswith("algo sft learns from the file")


def test_the_sequences_of_groups_that_come_one_by_one_are_those_of_the_whole_batch() -> None:
    groups = [random_group(number, version=0) for number in range(4)]
    made = StepSequences(version=0, max_lag=1, preset=PRESET)
    first = made.sequences(groups[:2])
    found, expected = made.sequences(groups), sequences_of(groups, version=0, max_lag=1, preset=PRESET)
    assert all(one is other for one, other in zip(first, found, strict=False))
    assert [(each.group, each.origin, each.reward) for each in found] == [
        (each.group, each.origin, each.reward) for each in expected
    ]
    without = made.sequences([groups[0], *groups[2:]])
    assert without[0] is found[0]
    assert [each.group for each in without] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert without[3].token_ids.tolist() == found[6].token_ids.tolist()


async def begun(ours: RunningIntake, known: BegunBatch) -> BegunBatch:
    found = await asyncio.wait_for(ours.intake.take_or_begin(known), 30)
    assert isinstance(found, BegunBatch), found
    return found


def leases(begun: BegunBatch | TakenBatch) -> list[int]:
    return [each.lease_id for each in begun.groups]


async def test_the_intake_says_how_a_batch_begins_and_the_batch_begins_with_it(tmp_path: Path) -> None:
    async with learner(tmp_path, ledger_config=FOUR) as ours, ours.env("e") as env:
        await env.enter()
        await env.leases(8)
        known = BegunBatch()
        for lease_id, expected in ((3, [3]), (1, [3, 1]), (0, [3, 1, 0])):
            await env.finish(group(lease_id))
            known = await begun(ours, known)
            assert leases(known) == expected
        await env.finish(group(2))
        batch = await asyncio.wait_for(ours.intake.take_or_begin(known), 30)
        assert isinstance(batch, TakenBatch)
        assert leases(batch) == [3, 1, 0, 2]
        assert all(map(lambda one, other: one is other, batch.groups, known.groups))


async def test_a_group_that_is_withdrawn_is_not_in_what_the_batch_begins_with_any_more(tmp_path: Path) -> None:
    """Its generator turned out to have served old weights."""
    async with learner(tmp_path, ledger_config=FOUR) as ours, ours.env("e") as env:
        await env.enter()
        await env.leases(8)
        ours.fleet.provenance.prove(OTHER, LoadedWeights(PolicyVersion(INCARNATION, 0), "", ""))
        await env.finish(group(0, trajectory(0, instance=OTHER), trajectory(0, reward=0.0)))
        known = await begun(ours, BegunBatch())
        assert leases(known) == [0]
        ours.fleet.distrust(OTHER, since=PolicyVersion(INCARNATION, 0))
        await ours.intake.fleet_changed()
        await env.next(LeaseGrant)
        await env.finish(group(0, attempt=1))
        again = await begun(ours, known)
        assert leases(again) == [0]
        assert again.groups[0] is not known.groups[0], "the same lease, and other answers"
        await env.finish(group(1))
        assert leases(await begun(ours, again)) == [0, 1]


class NotingTrainer(NothingToTrain):
    """Notes what it is given."""

    preset = PRESET

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[list[TrainSequence]] = []
        self.discarded = 0
        self.told: Callable[[], None] = lambda: None

    def begin_step(self, sequences: Sequence[TrainSequence], *, version: int) -> None:
        assert version == 0
        self.begun.append(list(sequences))
        self.told()

    def discard_step(self) -> None:
        self.discarded += 1


def begins(ours: RunningIntake, trainer: NotingTrainer) -> Any:
    """A run at version 0 whose trainer begins early."""
    settings = settings_of(max_lag=1, training={"partial_batches": True})
    return training_of(settings, intake=ours.intake, trainer=trainer, first_version=0)


async def test_the_trainer_computes_the_groups_as_they_come_and_goes_on_with_the_rest(tmp_path: Path) -> None:
    groups: list[TrajectoryGroup] = [group(number) for number in range(4)]
    async with learner(tmp_path, ledger_config=FOUR) as ours, ours.env("e") as env:
        await env.enter()
        await env.leases(8)
        trainer, told = NotingTrainer(), asyncio.Event()
        loop = asyncio.get_running_loop()
        trainer.told = lambda: cast("None", loop.call_soon_threadsafe(told.set))
        training = begins(ours, trainer)
        taking = asyncio.create_task(asyncio.to_thread(training._begin_and_take))
        for each in groups[:3]:
            await env.finish(each)
            await asyncio.wait_for(told.wait(), 30)
            told.clear()
        await env.finish(groups[3])
        batch, early_s = await asyncio.wait_for(taking, 30)
    assert leases(batch) == [0, 1, 2, 3]
    assert early_s > 0
    assert [len(each) for each in trainer.begun] == [2, 4, 6]
    whole = training._ahead.sequences(batch.groups)
    assert all(one is other for one, other in zip(trainer.begun[-1], whole, strict=False))
    assert (len(whole), trainer.discarded) == (8, 0)


async def test_a_run_that_ends_forgets_what_it_had_begun(tmp_path: Path) -> None:
    async with learner(tmp_path, ledger_config=FOUR) as ours, ours.env("e") as env:
        await env.enter()
        await env.leases(8)
        await env.finish(group(0))
        trainer, loop = NotingTrainer(), asyncio.get_running_loop()
        trainer.told = lambda: cast("None", loop.call_soon_threadsafe(ours.intake.end))
        with pytest.raises(EndedEarly):
            await asyncio.wait_for(asyncio.to_thread(begins(ours, trainer)._begin_and_take), 30)
    assert (len(trainer.begun), trainer.discarded) == (1, 1)
