"""The learner, wired: what is taken, bound and closed, and in which order."""

import asyncio
import json
import socket
import threading
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from learner import service
from learner.config import LearnerConfig
from learner.journal.journal import FOLDER, LoggedDistrust, RunLog, read_journal
from learner.journal.run_folder import hold_run_folder
from learner.reports.run_records import Records
from learner.reports.status import LearnerMetrics
from learner.training.trainer_thread import TrainerThread
from protocol.model import PolicyVersion
from services.http.server import AddressInUse
from services.http.waiting import Waiting
from services.process import Stop, WrongSettings
from services.run_lock import FolderTaken, RunLock
from tests.learner.reports.test_run_records import BOOKS, evaluated, record, run_of_two_steps, step_metrics, two_groups
from tests.learner.training.tiny_model import write_tiny_llama

DISTRUST = LoggedDistrust("g-1", PolicyVersion(1, 2))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture
def config(model: Path, tmp_path: Path) -> LearnerConfig:
    return LearnerConfig.model_validate(
        {
            "model": model,
            "run": {"directory": tmp_path, "name": "run"},
            "http": {"port": 0},
            "leases": {"address": "tcp://127.0.0.1:*"},
        }
    )


def test_what_the_trainers_thread_writes_to_is_closed_after_it(
    config: LearnerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[RunLog] = []
    working: list[asyncio.Task[None]] = []
    really_open = service._journal

    def open_journal(config: LearnerConfig, stack: AsyncExitStack, lock: RunLock, metrics: LearnerMetrics) -> RunLog:
        opened.append(really_open(config, stack, lock, metrics))
        return opened[0]

    async def stopped(
        loops: Mapping[str, Coroutine[object, object, None]], thread: TrainerThread, *_: object, **__: object
    ) -> None:
        for loop in loops.values():
            loop.close()
        begun, stop = threading.Event(), threading.Event()
        thread.on_stop(stop.set)

        def write() -> None:
            begun.set()
            stop.wait(20)
            opened[0].append_provenance(DISTRUST)

        task = asyncio.create_task(thread.run(write))
        await asyncio.to_thread(begun.wait)
        working.append(task)

    monkeypatch.setattr(service, "_journal", open_journal)
    monkeypatch.setattr(service, "beside_loops", stopped)
    asyncio.run(service.train_online(config, Stop()))
    assert list(read_journal(config.run.folder / FOLDER)) == [DISTRUST]


def test_a_second_start_of_a_living_run_changes_nothing(config: LearnerConfig) -> None:
    async def twice() -> None:
        lock = await hold_run_folder(config.run.folder, resume=False)
        with lock, pytest.raises(FolderTaken, match=r"the run in .*/run is that of process"):
            await service.train_online(config, Stop())

    (config.run.folder / "journal").mkdir(parents=True)
    (config.run.folder / "incarnation").write_text("1\n")
    asyncio.run(twice())
    assert [path.name for path in config.run.directory.iterdir()] == ["run"], "nothing was moved aside"
    assert (config.run.folder / "incarnation").read_text() == "1\n"


def test_a_taken_port_is_noticed_before_anything_is_touched(config: LearnerConfig) -> None:
    (config.run.folder / "journal").mkdir(parents=True)
    (config.run.folder / "incarnation").write_text("1\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        http = config.http.model_copy(update={"port": taken.getsockname()[1]})
        with pytest.raises(AddressInUse):
            asyncio.run(service.train_online(config.model_copy(update={"http": http}), Stop()))
    assert [path.name for path in config.run.directory.iterdir()] == ["run"], "nothing was moved aside"
    assert (config.run.folder / "incarnation").read_text() == "1\n"


def test_an_own_algorithm_that_does_not_fit_is_refused_before_anything_is_touched(config: LearnerConfig) -> None:
    algo = {"type": "custom", "path": "tests.learner.test_event_loop:of_turns", "options": {"name": "turn_rewards"}}
    given = {**config.model_dump(include={"model", "http", "leases"}), "run": {"directory": config.run.directory}}
    unfit = LearnerConfig.model_validate({**given, "algo": algo, "lag": {"on_lag": "mask"}})
    with pytest.raises(WrongSettings, match="needs whole trajectories: it has turn_rewards"):
        asyncio.run(service.train_online(unfit, Stop()))
    assert list(config.run.directory.iterdir()) == []


class _LongStep:
    """A training whose present step ends when it is told to; it is its own trainer's thread."""

    def __init__(self) -> None:
        self.asked, self.done = asyncio.Event(), asyncio.Event()

    def end_early(self) -> None:
        self.asked.set()

    async def run(self, work: object = None, **_: object) -> None:
        await self.done.wait()


async def test_that_a_stop_waits_for_the_present_step_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(service, "QUIET_S", 0.0)
    stop, step, waits = Stop(), _LongStep(), Waiting()
    async with asyncio.TaskGroup() as group:
        group.create_task(service._ended_early_on(stop, step, step, waits))  # type: ignore[arg-type]
        stop.request("SIGINT")
        await step.asked.wait()
        await asyncio.sleep(0)
        assert [each.whom for each in waits.status()][1:] == ["the end of the present step"]
        step.done.set()
    assert "a second Ctrl-C ends at once" in caplog.text
    assert len(waits.status()) == 1, "its own start"


def closed(config: LearnerConfig, records: Records) -> dict[str, Any]:
    """The summary that the end of a life of the learner leaves."""
    parts = SimpleNamespace(
        config=config, records=records, intake=SimpleNamespace(books=lambda: BOOKS), idle=SimpleNamespace(share=0.5),
        closing_words="",
    )  # fmt: skip
    service._close(cast("Any", parts), train_wall_s=10.0)
    found = json.loads((config.run.folder / "summary.json").read_text())
    assert isinstance(found, dict)
    return {**found, "said": bool(parts.closing_words)}


def test_a_summary_is_kept_only_while_it_is_whole_and_of_these_steps_and_evaluations(
    config: LearnerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "draw_curves", lambda *_, **__: None)
    folder = config.run.folder
    folder.mkdir()
    path = folder / "summary.json"
    with Records(folder=folder, total_steps=3) as records:
        run_of_two_steps(records)
        assert closed(config, records)["accuracy_after"] == 0.875
        records.step(record(step=3), step_metrics(), two_groups())
    assert json.loads(path.read_text())["steps"] == 2, "the life ended before it wrote another"

    def ended_again(*, evaluation: float | None = None) -> dict[str, Any]:
        with Records(folder=folder, total_steps=3) as records:
            records.resume(version=3, incarnation=2)
            if evaluation is not None:
                records.evaluation(evaluated(3, evaluation))
            return closed(config, records)

    assert (found := ended_again())["steps"] == 3, "it was of fewer steps"
    assert (found["accuracy_after"], found["said"]) == (None, True)
    assert ended_again(evaluation=0.75)["accuracy_after"] == 0.75, "there was no evaluation before"
    assert ended_again(evaluation=0.625)["accuracy_after"] == 0.625, "the newest evaluation counts"
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    assert ended_again()["said"], "half of it was there"
    assert json.loads(path.read_text()) == json.loads(whole) | {
        "train_wall_s": json.loads(path.read_text())["train_wall_s"]
    }
    assert not ended_again()["said"], "it still holds"
