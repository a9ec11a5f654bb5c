"""Online training: evaluations of checkpoints beside it, the step at which it gives up, and how it goes on."""

import asyncio
import dataclasses
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from learner.algorithms.presets.registry import ALGORITHMS
from learner.evaluation.results import Evaluation, Sample, TaskSamples, result_of
from learner.journal.checkpoints import Checkpoints
from learner.journal.journal import Journal
from learner.leases.intake import EndedEarly, TakenBatch
from learner.ledger import LedgerConfig
from learner.online import Credits
from learner.page.taken import TakenStep
from learner.recovery import logged_steps
from learner.taught_batches import TaughtBatch
from learner.teachers.teachers import GroupScores, TeacherFailed, TeacherScores, TextRefused, Told
from learner.training.config import GuardConfig
from learner.training.guard import Guard, GuardState
from learner.training.trainer import NotFinite
from protocol.trajectories import TrajectoryGroup
from services.config import made_with
from tests.learner.envs import RunningIntake, learner
from tests.learner.samples import LEDGER, group
from tests.learner.trainings import NothingToTrain, settings_of, training_of


def evaluation(version: int, *, own: int) -> Evaluation:
    """Of four tasks, `own` of which the version itself has answered."""
    sample = Sample(completion="a", reward=1.0, answer="a", length=1, truncated=False)
    tasks = tuple(TaskSamples(task_index=at, prompt="?", samples=(sample,)) for at in range(4))
    whole = result_of(tasks, version=version, failed=0, sampled_by=(version, version + 9), success=1.0, ks=(1,))
    mine = dataclasses.replace(whole, tasks=own, newest_version=version) if own else None
    return Evaluation(environment="sums", result=whole, tasks=tasks, own=mine)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    made = Checkpoints(tmp_path, keep=3, keep_best=1)
    for version in (100, 200, 300):
        made.write(version=version, save_trainer=lambda folder: folder.mkdir())
    return made


def test_that_an_evaluation_does_not_count_for_the_best_checkpoints_is_said_once_in_a_run(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    credits = Credits(checkpoints, wanted=True)
    with caplog.at_level("INFO"):
        for version, own in ((50, 1), (100, 1), (200, 0), (300, 2)):
            credits.note(evaluation(version, own=own))

    (said,) = caplog.messages
    assert said.startswith("the evaluation of version 100 does not count for checkpoint.keep_best")
    assert "headway eval RUN.toml --checkpoint" in said
    assert "/checkpoint-00000100 " in said
    assert [each.version for each in checkpoints.best()] == [300]


def test_where_no_checkpoint_is_kept_for_its_evaluation_nothing_is_said_of_it(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        Credits(checkpoints, wanted=False).note(evaluation(100, own=0))
    assert not caplog.messages


def test_the_step_at_which_training_gives_up_is_kept_for_the_viewer() -> None:
    kept: list[TakenStep] = []
    skipped = SimpleNamespace(skipped_updates=1, skipped_in_row=3)
    parts: Any = NothingToTrain()
    parts.train_step = lambda _, version, demonstrations: skipped
    settings = settings_of(training={"max_skipped_updates": 3})
    training = training_of(settings, parts=parts, samples=SimpleNamespace(put=kept.append))

    with pytest.raises(NotFinite, match="3 updates in a row"):
        training._train(SimpleNamespace(version=6, groups=(), times=()), [])

    assert [taken.step for taken in kept] == [7]


async def test_a_resumed_run_goes_on_with_the_bound_that_the_guard_had_lowered(tmp_path: Path) -> None:
    wide = LedgerConfig(**{**dataclasses.asdict(LEDGER), "max_lag": 4})
    async with learner(tmp_path, ledger_config=wide) as ours:
        parts: Any = NothingToTrain()
        guard = Guard(GuardConfig(), max_lag=4, state=GuardState(max_lag=1, tightened=2))
        settings = settings_of(tmp_path, steps=7, max_lag=4)
        training = training_of(settings, parts=parts, intake=ours.intake, guard=guard)
        assert ours.ledger.max_lag == 4
        await asyncio.to_thread(training.run)
        assert ours.ledger.max_lag == 1
        assert [snapshot.version for snapshot in parts.offered] == [7]


class Written(NothingToTrain):
    """Notes the versions of checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.versions: list[int] = []

    def begin(self, *, version: int | None = None, **_: object) -> Any:
        if version is None:
            return super().begin()
        self.versions.append(version)
        return lambda: Path(f"checkpoint-{version}")

    def save(self, folder: Path) -> None:
        pass

    def progress(self) -> dict[str, object]:
        return {}

    def checkpoint(self, *, version: int, seconds: float) -> None:
        pass


@pytest.mark.parametrize(
    ("version", "steps", "written"), [(8, 9, [8]), (7, 9, []), (9, 9, [])], ids=["trained on", "as resumed", "whole"]
)
async def test_a_run_that_ends_early_leaves_a_checkpoint_of_its_last_step(
    tmp_path: Path, version: int, steps: int, written: list[int]
) -> None:
    settings = settings_of(tmp_path, steps=steps, max_lag=1, time_limit_s=1e-9)
    async with learner(tmp_path) as ours:
        parts: Any = Written()
        training = training_of(settings, parts=parts, intake=ours.intake)
        training._version = version
        await asyncio.to_thread(training.run)
    assert parts.versions == written


class StepBegun(Exception):
    """The trainer was given a batch."""


async def test_a_batch_that_is_being_written_when_the_end_comes_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its groups would be in no later segment of the journal, and its version there twice."""
    begun, may_end = threading.Event(), threading.Event()
    really = Journal.append_batch

    def slowly(self: Journal, *, version: int, lease_ids: Sequence[int], **_: object) -> None:
        begun.set()
        assert may_end.wait(30), "the end came meanwhile"
        really(self, version=version, lease_ids=lease_ids)

    monkeypatch.setattr(Journal, "append_batch", slowly)
    given: list[TakenBatch] = []

    def take(as_taught: TaughtBatch, **_: object) -> None:
        given.append(as_taught.batch)
        raise StepBegun

    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter()
        await env.leases(4)
        await env.finish(group(0), group(1))
        training = training_of(settings_of(max_lag=1), intake=ours.intake)
        training._sequences = take
        step = asyncio.create_task(asyncio.to_thread(training._step))
        assert await asyncio.to_thread(begun.wait, 30)
        training.end_early()
        may_end.set()
        with pytest.raises(StepBegun):
            await asyncio.wait_for(step, 30)
        assert [[one.lease_id for one in batch.groups] for batch in given] == [[0, 1]]
        with pytest.raises(EndedEarly):
            await asyncio.to_thread(training._step)


class RefusingTeachers:
    """Teaches all groups but that of lease 1, whose text it refuses."""

    async def of_batch(self, groups: Sequence[TrajectoryGroup]) -> list[Told]:
        return [TextRefused("too long") if one.lease_id == 1 else self._scores(one) for one in groups]

    def _scores(self, one: TrajectoryGroup) -> GroupScores:
        return tuple(TeacherScores(np.full(len(each.token_ids), -2.0, np.float32), "1.0") for each in one.trajectories)


def taught_by_refusing_teachers(left_out: list[str]) -> Any:
    parts: Any = NothingToTrain()
    parts.left_out, parts.preset = left_out.append, ALGORITHMS["opd"].model_validate({"type": "opd"}).preset()
    taught: dict[str, Any] = {"algo": {"type": "opd"}, "teachers": [{"name": "t", "urls": ["http://127.0.0.1:1"]}]}
    training = training_of(settings_of(**taught), parts=parts, teachers=RefusingTeachers(), first_version=0)
    training._call = lambda work: asyncio.run(work)
    return training


def test_of_a_group_whose_text_a_teacher_refuses_no_token_is_trained_and_others_are_taught(
    caplog: pytest.LogCaptureFixture,
) -> None:
    left_out: list[str] = []
    training = taught_by_refusing_teachers(left_out)

    as_taught = training._taught(TakenBatch(version=0, groups=(group(0), group(1)), lags=(0, 0)))
    sequences = training._sequences(as_taught)

    assert [(one.group, bool(one.loss_mask.any()), one.teacher_logprobs.min()) for one in sequences] == [
        (0, True, -2.0), (0, True, -2.0), (1, False, 0.0), (1, False, 0.0)
    ]  # fmt: skip
    assert left_out == ["untaught"]
    assert caplog.messages == ["lease 1 of addition is not trained: too long"]


def test_a_teacher_that_refuses_all_texts_of_some_steps_in_a_row_ends_the_run_by_name() -> None:
    training = taught_by_refusing_teachers([])
    refused, others = TakenBatch(0, (group(1),), (0,)), TakenBatch(0, (group(0), group(1)), (0, 0))
    for batch in (refused, refused, others, refused, refused):
        training._taught(batch)
    with pytest.raises(TeacherFailed, match=r"of 3 steps in a row no text was taught.*last: too long"):
        training._taught(refused)


class ChangingTeachers:
    """A policy that teaches, of which it is noted what it is asked; each life gets other logprobs of it."""

    def __init__(self, logprob: float) -> None:
        self.asked: list[int] = []
        self._logprob = logprob

    async def of_batch(self, groups: Sequence[TrajectoryGroup]) -> list[Told]:
        self.asked += [one.lease_id for one in groups]
        return [
            tuple(
                TeacherScores(np.where(each.loss_mask, self._logprob, 0).astype(np.float32), "3.0")
                for each in one.trajectories
            )
            for one in groups
        ]


async def test_a_step_that_is_trained_again_is_taught_as_it_was_by_a_policy_that_has_changed_since(
    tmp_path: Path,
) -> None:
    parts: Any = NothingToTrain()
    parts.preset = ALGORITHMS["opd"].model_validate({"type": "opd"}).preset()
    policy: dict[str, Any] = {"algo": {"type": "opd"}, "teachers": [{"name": "self", "policy": True}], "max_lag": 1}
    first, second, third = ChangingTeachers(-2.0), ChangingTeachers(-3.0), ChangingTeachers(-4.0)
    async with learner(tmp_path) as ours, ours.env("e") as env:

        async def trained(teachers: ChangingTeachers, batch: TakenBatch, **noted: Any) -> list[list[float]]:
            training = training_of(
                settings_of(**policy), parts=parts, intake=ours.intake, teachers=teachers, first_version=0
            )
            as_taught = await asyncio.to_thread(training._taught, batch, **noted)
            sequences = training._sequences(as_taught)
            return [one.teacher_logprobs.tolist() for one in sequences]

        await env.enter()
        await env.leases(4)
        await env.finish(group(0), group(1))
        as_it_was = await trained(first, await ours.intake.take())
        (step,) = logged_steps(tmp_path, version=0)
        assert await trained(second, step.read(), noted=step.told()) == as_it_was
        assert (first.asked, second.asked, step.is_taught) == ([0, 1], [], True)
        (lost, kept) = step.taught
        assert not dataclasses.replace(step, taught={kept: step.taught[kept]}).is_taught
        once_more = await trained(second, step.read(), noted={kept: step.told()[kept]})
        assert (once_more[2:], second.asked) == (as_it_was[2:], [lost])
        (step,) = logged_steps(tmp_path, version=0)
        assert await trained(third, step.read(), noted=step.told()) == once_more
        assert third.asked == []


async def test_a_policy_that_teaches_is_served_before_steps_are_replayed_that_it_has_not_taught(tmp_path: Path) -> None:
    """They ask it, and a generator that starts with the learner has no weights before it publishes some. Steps that it
    has taught ask nobody.
    """
    parts: Any = NothingToTrain()
    served: list[list[int]] = []

    def ask(*_: object, **__: object) -> None:
        served.append([snapshot.version for snapshot in parts.offered])
        raise StepBegun

    for place, (teaches, is_taught) in enumerate(((True, False), (True, True), (False, False))):
        parts.offered.clear()
        batch = SimpleNamespace(bound=lambda most: most)
        logged = SimpleNamespace(version=7, told=dict, read=partial(lambda it: it, batch), is_taught=is_taught)
        async with learner(tmp_path / str(place)) as ours:
            policy: dict[str, Any] = {"algo": {"type": "opd"}, "teachers": [{"name": "self", "policy": True}]}
            settings = settings_of(tmp_path, max_lag=1, **(policy if teaches else {}))
            training = training_of(settings, parts=parts, intake=ours.intake, replay=(logged,))
            training._taught = ask
            with pytest.raises(StepBegun):
                await asyncio.to_thread(training.run)
    assert served == [[7], [], []]


def trained_beyond(parts: Any, ours: RunningIntake, folder: Path, **settings: Any) -> Any:
    """A run of nine steps that has trained eight, of which seven are in a checkpoint."""
    training = training_of(settings_of(folder, steps=9, max_lag=1, **settings), parts=parts, intake=ours.intake)
    training._version = 8
    return training


class SlowlyWritten(Written):
    """Its checkpoint is on the disk only when the model has been exported."""

    def __init__(self) -> None:
        super().__init__()
        self.exported, self.told = threading.Event(), list[int]()

    def begin_save(self, folder: Path) -> None:
        pass

    def begin(self, *, version: int | None = None, **_: object) -> Any:
        if version is None:
            return super().begin()

        def finish() -> Path:
            assert self.exported.wait(30)
            return Path(f"checkpoint-{version}")

        return finish

    def export(self, folder: Path) -> None:
        self.exported.set()

    def checkpoint(self, *, version: int, seconds: float) -> None:
        self.told.append(version)


async def test_a_checkpoint_of_an_early_end_that_is_written_beside_is_there_before_the_process_ends(
    tmp_path: Path,
) -> None:
    async with learner(tmp_path) as ours:
        parts = SlowlyWritten()
        await asyncio.to_thread(
            trained_beyond(parts, ours, tmp_path, checkpoint={"beside_training": True}, time_limit_s=1e-9).run
        )
    assert parts.told == [8]


async def test_a_wait_for_groups_ends_with_the_time_of_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with learner(tmp_path) as ours:
        parts = Written()
        training = trained_beyond(parts, ours, tmp_path, time_limit_s=0.05)
        run = asyncio.create_task(asyncio.to_thread(training.run))
        try:
            await asyncio.wait_for(asyncio.shield(run), 20)
        finally:
            training.interrupt()
            await asyncio.wait([run])
    assert parts.versions == [8]
    assert [said for said in caplog.messages if "time_limit_s" in said] == [
        f"training ends after time_limit_s, 0.05 s; to go on: {made_with.to_go_on()}"
    ]


async def test_a_run_whose_time_is_over_before_its_first_step_has_no_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with learner(tmp_path) as ours:
        parts = SlowlyWritten()
        training = trained_beyond(parts, ours, tmp_path, time_limit_s=1e-9)
        vars(training).update(_version=0, _kept_version=0)
        await asyncio.to_thread(training.run)
    assert not parts.exported.is_set()
    assert "ended before the first step: there is no model to write" in caplog.text


async def test_what_an_evaluation_beside_training_leaves_on_the_disk_is_not_written_in_the_event_loop() -> None:
    threads: dict[str, threading.Thread] = {}

    async def evaluated(**_: object) -> Evaluation:
        return evaluation(100, own=4)

    def noting(name: str) -> Any:
        return lambda _: threads.update({name: threading.current_thread()})

    intake, records = SimpleNamespace(evaluated=evaluated), SimpleNamespace(evaluation=noting("line"))
    training = training_of(settings_of(), intake=intake, records=records)
    training._credits = SimpleNamespace(note=noting("score"))
    await training._evaluate_beside(4, 100)

    assert threads["line"] is threading.current_thread()
    assert threads["score"] is not threading.current_thread(), "the lock may be held while checkpoints are removed"
