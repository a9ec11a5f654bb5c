"""Comparisons of gradients by lag: the steps that make them, the groups in them, and what a step does with them."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from learner import online
from learner.algorithms.presets.registry import ALGORITHMS
from learner.config import LearnerConfig
from learner.lag_measurements import ComparedGroups, MeasurementPlan, units_of
from learner.leases.intake import NewestGroups, TakenBatch
from learner.reports.tally import Timing
from learner.teachers.teachers import TeacherScores
from learner.training.config import GuardConfig
from learner.training.guard import Guard, GuardState
from learner.training.lag_rule import GradientLagState, GradientRule
from protocol.messages import FailedLease
from tests.learner.envs import RunningIntake, ScriptedEnv, SetClock, learner
from tests.learner.samples import INCARNATION, LEDGER, group, trajectory
from tests.learner.trainings import NothingToTrain, settings_of, training_of

PLAN = MeasurementPlan(every=4, groups=2, timeout_s=30.0)


def test_every_fourth_step_measures_but_not_the_first_and_without_a_number_none_does() -> None:
    assert [version for version in range(12) if PLAN.is_due(version)] == [3, 7, 11]
    assert [version for version in range(3) if MeasurementPlan(every=1, groups=2, timeout_s=1.0).is_due(version)] == [
        1,
        2,
    ]
    assert not any(MeasurementPlan(every=None, groups=2, timeout_s=1.0).is_due(version) for version in range(9))


def test_of_each_bucket_the_first_groups_take_part_and_of_lag_0_those_granted_first_alone() -> None:
    groups = tuple(group(number) for number in range(6))
    batch = TakenBatch(version=9, groups=groups, lags=(7, 5, 6, 3, 0, 0))
    one = PLAN.select(batch, [groups[5], group(8), group(9)])
    assert [(each.lease_id, bucket) for each, bucket in zip(one.groups, one.buckets, strict=True)] == [
        (0, 4), (1, 4), (3, 3), (5, 0), (8, 0)
    ]  # fmt: skip
    rest = one.only([1, 4])
    assert ([each.lease_id for each in rest.groups], rest.buckets, rest.fresh) == ([1, 8], (4, 0), 1)
    none = PLAN.select(TakenBatch(version=9, groups=groups[:1], lags=(7,)), [group(8), group(9), group(10)])
    assert [each.lease_id for each in none.groups] == [0, 8, 9]
    assert none.fresh == 2


def test_groups_that_are_trained_again_take_no_part() -> None:
    batch = TakenBatch(version=9, groups=(group(0), group(1), group(2)), lags=(3, 0, 5), reused=1)
    assert [each.lease_id for each in PLAN.select(batch, [group(1)]).groups] == [0, 1]


def test_groups_of_a_bucket_are_dealt_out_to_eight_units() -> None:
    buckets = [4, 0, 4, *[0] * 9]
    assert units_of(buckets) == (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 3)
    compared = ComparedGroups(groups=tuple(group(number) for number in range(12)), buckets=tuple(buckets))
    assert compared.unit_buckets == (4, 0, 4, *[0] * 7)
    assert compared.sizes == (1, 2, 1, 2, 1, 1, 1, 1, 1, 1)


NONE_YET = TakenBatch(version=1, groups=(), lags=())
WIDE = replace(LEDGER, max_lag=4)


async def newest(
    ours: RunningIntake, batch: TakenBatch = NONE_YET, *, timeout_s: float = 30.0, groups: int = 2
) -> list[int]:
    found = await ours.intake.newest(batch, groups=groups, timeout_s=timeout_s)
    return [one.lease_id for one in found.groups]


async def taken(ours: RunningIntake) -> TakenBatch:
    async with asyncio.timeout(30):
        return await ours.intake.take()


async def two_are_running(ours: RunningIntake) -> None:
    async with asyncio.timeout(30):
        while ours.ledger.books().running < 2:  # noqa: ASYNC110  what is waited for has no event of its own
            await asyncio.sleep(0.005)


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


async def test_those_short_enough_to_be_in_the_batch_itself_are_among_them(tmp_path: Path) -> None:
    """An env_service with room for two leases is granted 4 and 5 at version 1, when 2 and 4 have ended."""
    async with learner(tmp_path, ledger_config=WIDE) as ours, ours.env("e") as env:
        await env.enter(capacity=2)
        for lease_id, version in ((0, 0), (1, 0), (2, 0), (4, 1)):
            await two_are_running(ours)
            if lease_id == 2:
                await ours.train()
            await env.finish(group(lease_id, version=version))
        await two_are_running(ours)
        batch = await taken(ours)
        assert ([one.lease_id for one in batch.groups], batch.lags) == ([2, 4], (1, 0))
        waiting = asyncio.create_task(newest(ours, batch))
        await env.finish(group(5, version=1))
        assert await waiting == [4, 5]
        compared = PLAN.select(batch, (await ours.intake.newest(batch, groups=2, timeout_s=30.0)).groups)
        assert [(one.lease_id, lag) for one, lag in zip(compared.groups, compared.buckets, strict=True)] == [
            (2, 1), (4, 0), (5, 0)
        ]  # fmt: skip


async def test_if_one_of_them_is_not_there_in_time_none_is_taken(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await two_leases_of_version_1(ours, env)
        await env.finish(group(5, version=1))
        found = await ours.intake.newest(NONE_YET, groups=2, timeout_s=0.05)
        assert found == NewestGroups((), "the others were not there after learner.lag.straggler_timeout_s, 0.05 s")


async def test_leases_that_no_step_needs_are_not_waited_for(tmp_path: Path) -> None:
    """The last step but one has taken its groups, and those of the last one are granted: there are six in all."""
    async with learner(tmp_path, total_groups=6) as ours, ours.env("e") as env:
        await two_leases_of_version_1(ours, env)
        waiting = asyncio.create_task(newest(ours, groups=4, timeout_s=600.0))
        await env.finish(group(4, version=1))
        assert not waiting.done(), "one that was granted runs still"
        await env.finish(group(5, version=1))
        async with asyncio.timeout(30):
            assert await waiting == [4, 5]


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
        waiting = asyncio.create_task(ours.intake.newest(NONE_YET, groups=2, timeout_s=600.0))
        await asyncio.sleep(0)
        ours.intake.end()
        async with asyncio.timeout(30):
            assert await waiting == NewestGroups((), "the run is to end")


class SketchingTrainer(NothingToTrain):
    """Gives the sketches that it is told, and notes what is asked of it, in order."""

    def __init__(self, sketches: list[list[float]]) -> None:
        super().__init__()
        self.asked: list[tuple[list[int], list[int]]] = []
        self._sketches = np.array(sketches)

    preset = ALGORITHMS["grpo"](type="grpo").preset()

    def sketches(self, sequences: Any, *, units: list[int], parts: list[int]) -> Any:
        self.asked.append((list(units), list(parts)))
        self.sequences = sequences
        return self._sketches


def comparing(trainer: SketchingTrainer, fresh: list[Any], **settings: Any) -> Any:
    """A training at version 8, whose intake has these groups of the newest version."""

    async def of_version(batch: TakenBatch, *, groups: int, timeout_s: float) -> NewestGroups:
        assert (batch.version, groups, timeout_s) == (8, 2, 30.0)
        return NewestGroups(tuple(fresh), "no more may be granted")

    intake = SimpleNamespace(newest=of_version)
    training = training_of(
        settings_of(max_lag=8, **settings), trainer=trainer, intake=intake, measurements=PLAN, first_version=8
    )
    training._call = lambda work, **_: asyncio.run(work)
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
    reading, change, _ = training._compare(BATCH, served_s=0.0)
    assert trainer.asked == [([0, 0, 1, 1, 2, 2, 3, 3], [4, 3, 0, 0])]
    assert (reading.version, reading.buckets, change) == (8, (), None)
    assert reading.halves == pytest.approx(0.6)
    assert len(training._guard.state.gradients.history) == 1


def test_without_two_groups_of_lag_0_nothing_is_computed_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    trainer = SketchingTrainer([])
    training = comparing(trainer, [group(7, trajectory(8), trajectory(8))])
    assert training._compare(BATCH, served_s=0.0)[:2] == (None, None)
    assert trainer.asked == []
    assert caplog.messages == [
        "gradients are not compared by lag before step 9: 1 groups of lag 0 were there, expected 2 at least: no more "
        "may be granted"
    ]


async def test_a_bound_that_fell_to_0_rises_again_by_measurements_of_the_batch_alone(tmp_path: Path) -> None:
    """Two of them; a lease beyond the batch is granted at no step, so that each measurement is of its two groups."""
    trainer = SketchingTrainer([[2.0, 1.0], [2.0, -1.0]])
    training = comparing(trainer, [])
    state = GuardState(max_lag=4, gradients=GradientLagState(bound=0))
    rule = GradientRule(adapts=True)
    loop = asyncio.get_running_loop()
    async with learner(tmp_path, ledger_config=WIDE) as ours, ours.env("e") as env:
        vars(training).update(
            _guard=Guard(GuardConfig(), max_lag=4, state=state, rule=rule), _intake=ours.intake,
            _call=lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(),
        )  # fmt: skip
        await ours.intake.bound_lag(0)
        await env.enter()
        bounds = []
        for version in range(2):
            training._version = version
            leases = await env.leases(2)
            await env.finish(*(group(lease.lease_id, version=version) for lease in leases))
            batch = await taken(ours)
            assert batch.lags == (0, 0)
            async with asyncio.timeout(20):  # less than the plan's longest wait
                await asyncio.to_thread(training._compare, batch, served_s=0.0)
            bounds.append(training._guard.max_lag)
            await ours.intake.trained(version + 1)
            await ours.serve(version + 1)
    assert bounds == [0, 1]
    assert [parts for _, parts in trainer.asked] == [[0, 0]] * 2


class GlancedTeachers:
    """Notes what is asked of teachers behind a URL; of the group of lease 9 nothing is known any more."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[int]]] = []

    async def glance(self, groups: Any, *, batch: Any) -> dict[int, Any]:
        self.asked.append(("glance", [one.lease_id for one in batch]))
        return {at: self._logprobs(one) for at, one in enumerate(groups) if one.lease_id != 9}

    async def of_batch(self, groups: Any) -> list[Any]:
        self.asked.append(("of_batch", [one.lease_id for one in groups]))
        return [self._logprobs(one) for one in groups]

    def _logprobs(self, one: Any) -> tuple[Any, ...]:
        told = [np.full(len(each.token_ids), -float(one.lease_id), dtype=np.float32) for each in one.trajectories]
        return tuple(TeacherScores(each, "1.0") for each in told)


def taught(trainer: SketchingTrainer, fresh: list[Any]) -> tuple[Any, GlancedTeachers]:
    """As `comparing`, with a teacher behind a URL."""
    behind = {"name": "t", "urls": ["http://127.0.0.1:1"]}
    training, teachers = comparing(trainer, fresh, algo={"type": "opd"}, teachers=[behind]), GlancedTeachers()
    training._teachers = teachers
    return training, teachers


def test_a_group_whose_fetch_was_cancelled_takes_no_part_and_the_others_keep_their_own_logprobs() -> None:
    trainer = SketchingTrainer([[5.0, 5.0], [5.0, 5.0], [2.0, 1.0], [2.0, -1.0]])
    fresh = [group(number, trajectory(8), trajectory(8)) for number in (9, 7, 6)]
    training, _ = taught(trainer, fresh)
    training._measurements = replace(PLAN, groups=3)

    async def three(batch: TakenBatch, *, groups: int, timeout_s: float) -> NewestGroups:
        return NewestGroups(tuple(fresh), "")

    training._intake.newest = three
    reading, _, _ = training._compare(BATCH, served_s=0.0)
    assert reading is not None
    assert trainer.asked == [([0, 0, 1, 1, 2, 2, 3, 3], [4, 3, 0, 0])]
    assert [set(one.teacher_logprobs[1:].tolist()) for one in trainer.sequences] == [
        {0.0}, {0.0}, {-1.0}, {-1.0}, {-7.0}, {-7.0}, {-6.0}, {-6.0}
    ]  # fmt: skip


def test_a_measuring_step_takes_teachers_answers_after_the_measurement_and_its_wait_is_no_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wait of 7 s that comes to nothing, then 5 s of training."""
    training, teachers = taught(SketchingTrainer([]), [group(9, trajectory(8), trajectory(8))])
    clock = SetClock()
    timings: list[Timing] = []

    async def waiting(batch: TakenBatch, *, groups: int, timeout_s: float) -> NewestGroups:
        clock.now += 7.0
        return NewestGroups((), "")

    async def take() -> TakenBatch:
        return BATCH

    async def trained(version: int, *, max_lag: int) -> None:
        clock.now += 5.0

    def record(batch: TakenBatch, timing: Timing, **_: object) -> Any:
        timings.append(timing)
        return SimpleNamespace(step=9)

    def nothing(*_: object, **__: object) -> None:
        pass

    told = SimpleNamespace(step=nothing)
    vars(training).update(
        _intake=SimpleNamespace(newest=waiting, take=take, trained=trained, level=None, drawn=None), _records=told,
        _metrics=told, _guard=SimpleNamespace(max_lag=8, observe=nothing), _began=0.0, _measures=lambda: True,
        _record=record,
        **dict.fromkeys(("_train", "_publish", "_keep", "_test_generators", "_after_step"), nothing),
    )  # fmt: skip
    monkeypatch.setattr(online, "time", SimpleNamespace(monotonic=clock, thread_time=clock, time_ns=lambda: 0))
    training._step()
    assert [(one.wait_s, one.train_s) for one in timings] == [(7.0, 5.0)]
    assert teachers.asked == [("glance", [0, 1]), ("of_batch", [0, 1])]


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
        ({"lag": {"measure_every": 50}, "groups_per_step": 1}, "groups_per_step is 1: .* 2 or more"),
        ({"lag": {"measure_every": 50}, "training": {"zero_stage": 3}}, "expected zero_stage 2 or less"),
    ):
        with pytest.raises(ValidationError, match=fault):
            config(tmp_path, **settings)
