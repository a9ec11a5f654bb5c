"""Comparisons of gradients by lag: the steps that make them, the groups in them, and what a step does with them."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from pydantic import ValidationError

from learner.config import LearnerConfig
from learner.lag_measurements import ComparedGroups, MeasurementPlan, units_of
from learner.leases.intake import TakenBatch
from learner.online import OnlineTraining
from learner.training.config import GuardConfig
from learner.training.guard import Guard
from protocol.messages import FailedLease
from tests.learner.envs import RunningIntake, ScriptedEnv, learner
from tests.learner.samples import INCARNATION, group, trajectory

PLAN = MeasurementPlan(every=4, groups=2, timeout_s=30.0)


def test_every_fourth_step_measures_but_not_the_first_and_without_a_number_none_does() -> None:
    assert [version for version in range(12) if PLAN.is_due(version)] == [3, 7, 11]
    assert [version for version in range(3) if MeasurementPlan(every=1, groups=2, timeout_s=1.0).is_due(version)] == [
        1,
        2,
    ]
    assert not any(MeasurementPlan(every=None, groups=2, timeout_s=1.0).is_due(version) for version in range(9))


def test_of_each_bucket_the_first_groups_take_part_and_of_lag_0_none_of_the_batch() -> None:
    groups = tuple(group(number) for number in range(6))
    batch = TakenBatch(version=9, groups=groups, lags=(7, 5, 6, 3, 0, 0))
    one = PLAN.select(batch, [group(8), group(9)])
    assert [(each.lease_id, bucket) for each, bucket in zip(one.groups, one.buckets, strict=True)] == [
        (0, 4), (1, 4), (3, 3), (8, 0), (9, 0)
    ]  # fmt: skip
    none = PLAN.select(TakenBatch(version=9, groups=groups[:1], lags=(7,)), [group(8), group(9), group(10)])
    assert [each.lease_id for each in none.groups] == [0, 8, 9]
    assert none.fresh == 2


def test_groups_of_a_bucket_are_dealt_out_to_eight_units() -> None:
    buckets = [4, 0, 4, *[0] * 9]
    assert units_of(buckets) == (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 3)
    compared = ComparedGroups(groups=tuple(group(number) for number in range(12)), buckets=tuple(buckets))
    assert compared.unit_buckets == (4, 0, 4, *[0] * 7)
    assert compared.sizes == (1, 2, 1, 2, 1, 1, 1, 1, 1, 1)


async def newest(ours: RunningIntake, *, timeout_s: float = 30.0, groups: int = 2) -> list[int]:
    found = await ours.intake.newest(version=1, groups=groups, timeout_s=timeout_s)
    return [one.lease_id for one in found]


async def two_leases_of_version_1(ours: RunningIntake, env: ScriptedEnv) -> None:
    """Leases 0 to 3 are granted at version 0, a step takes 0 and 1, and 4 and 5 are granted once 1 is served."""
    await env.enter()
    await env.leases(4)
    await env.finish(group(0), group(1))
    await ours.train()
    assert [lease.lease_id for lease in await env.leases(2)] == [4, 5]


async def test_groups_of_the_newest_version_are_those_granted_first_however_early_others_are(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await two_leases_of_version_1(ours, env)
        # Granted before, and sampled by version 1 all the same: finished so early that it is the first to be there.
        await env.finish(group(3, version=1))
        waiting = asyncio.create_task(newest(ours))
        await env.finish(group(5, version=1))
        assert not waiting.done(), "the first one runs still"
        await env.finish(group(4, version=1))
        assert await waiting == [4, 5]
        assert ours.ledger.books().buffered == 3, "they wait for their own step"


async def test_if_one_of_them_is_not_there_in_time_none_is_taken(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await two_leases_of_version_1(ours, env)
        await env.finish(group(5, version=1))
        assert await newest(ours, timeout_s=0.05) == []


async def test_fewer_are_taken_where_no_more_were_granted_and_one_that_failed_is_left_out(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await two_leases_of_version_1(ours, env)
        await env.finish(group(4, version=1))
        failure = FailedLease(
            incarnation=INCARNATION, lease_id=5, attempt=0, purpose="train", data_fault=True, reason="no answer"
        )
        await env.send(failure)
        (in_its_place,) = await env.leases(1)
        await env.finish(group(in_its_place.lease_id, version=1))
        assert await newest(ours, timeout_s=0.05, groups=4) == [4, 6]


async def test_an_early_end_does_not_wait_for_them(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await two_leases_of_version_1(ours, env)
        waiting = asyncio.create_task(newest(ours, timeout_s=600.0))
        await asyncio.sleep(0)
        ours.intake.end()
        async with asyncio.timeout(30):
            assert await waiting == []


class SketchingTrainer:
    """Gives the sketches that it is told, and notes what is asked of it, in order."""

    def __init__(self, sketches: list[list[float]]) -> None:
        self.asked: list[tuple[list[int], list[int]]] = []
        self._sketches = np.array(sketches)

    preset = SimpleNamespace(select=None, paired=False, components=(), turn_rewards=False, turn_discounts=False)

    def sketches(self, sequences: Any, *, units: list[int], parts: list[int]) -> Any:
        self.asked.append((list(units), list(parts)))
        return self._sketches


def comparing(trainer: SketchingTrainer, fresh: list[Any]) -> Any:
    """A training at version 8, whose intake has these groups of the newest version."""
    training = cast("Any", OnlineTraining.__new__(OnlineTraining))

    async def of_version(*, version: int, groups: int, timeout_s: float) -> tuple[Any, ...]:
        assert (version, groups, timeout_s) == (8, 2, 30.0)
        return tuple(fresh)

    vars(training).update(
        _measurements=PLAN, _version=8, _trainer=trainer, _guard=Guard(GuardConfig(), max_lag=8),
        _intake=SimpleNamespace(newest=of_version), _config=SimpleNamespace(max_lag=8, teachers=()),
        _call=lambda work, **_: asyncio.run(work),
    )  # fmt: skip
    return training


BATCH = TakenBatch(
    version=8,
    groups=(group(0, trajectory(0, 1), trajectory(1), version=0), group(1, trajectory(4), trajectory(4, 4))),
    lags=(8, 4),
)


def test_a_comparison_takes_old_and_new_groups_and_is_read_by_the_guard() -> None:
    """By hand as in the tests of the moments; of a bucket with one group nothing is known."""
    trainer = SketchingTrainer([[5.0, 5.0], [5.0, 5.0], [2.0, 1.0], [2.0, -1.0]])
    training = comparing(trainer, [group(7, trajectory(8), trajectory(8)), group(9, trajectory(8), trajectory(8, 8))])
    reading, change = training._compare(BATCH, served_s=0.0)
    assert trainer.asked == [([0, 0, 1, 1, 2, 2, 3, 3], [4, 3, 0, 0])]
    assert (reading.version, reading.buckets, change) == (8, (), None)
    assert reading.halves == pytest.approx(0.6)
    assert len(training._guard.state.gradients.history) == 1


def test_without_two_groups_of_lag_0_nothing_is_computed_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    trainer = SketchingTrainer([])
    training = comparing(trainer, [group(7, trajectory(8), trajectory(8))])
    assert training._compare(BATCH, served_s=0.0) == (None, None)
    assert trainer.asked == []
    assert caplog.messages == [
        "gradients are not compared by lag before step 9: 1 groups of lag 0 were there after 30 s, expected 2 at "
        "least; learner.lag.straggler_timeout_s is that time"
    ]


def config(tmp_path: Path, **settings: Any) -> LearnerConfig:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}), encoding="utf-8")
    return LearnerConfig.model_validate({"model": str(tmp_path), **settings})


def test_it_is_off_unless_asked_for_and_what_it_cannot_do_is_refused(tmp_path: Path) -> None:
    assert config(tmp_path).lag.measure_every is None
    asked = config(tmp_path, lag={"measure_every": 50, "adapt": "gradient", "min_cosine": 0.9})
    assert (asked.lag.measure_groups, asked.lag.adapt) == (64, "gradient")
    for settings, fault in (
        ({"lag": {"adapt": "gradient"}}, "adapt set and measure_every is not"),
        ({"lag": {"measure_groups": 4, "min_cosine": 0.5}}, "measure_groups, min_cosine set and measure_every is not"),
        ({"lag": {"measure_every": 50}, "max_lag": 0}, "max_lag is 0: all groups have lag 0"),
        ({"lag": {"measure_every": 50}, "training": {"zero_stage": 3}}, "expected zero_stage 2 or less"),
    ):
        with pytest.raises(ValidationError, match=fault):
            config(tmp_path, **settings)
