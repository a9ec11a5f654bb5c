"""Environments in child processes, through the rollout loop: whatever they do costs their own trajectory."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from env_service.environments import catalog
from env_service.environments.imported import EnvironmentFault
from env_service.environments.interface import (
    Action,
    EnvironmentFailed,
    EnvironmentUnavailable,
    OfferedEnvironment,
    Task,
)
from env_service.environments.task_configs import ClassTasks
from env_service.hosting.hosted import Hosting
from env_service.hosting.messages import fault_of
from env_service.rollouts.completions import RolloutProgress
from protocol.trajectories import Trajectory
from tests.env_service.bench import Bench, MakeBench
from tests.env_service.peers import eventually, lease
from tests.env_service.rollouts.test_conversation import TrajectoryWords, counted

HERE = "tests.env_service.hosting.naughty"
Host = Callable[..., Awaitable[tuple[Hosting, OfferedEnvironment]]]


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    """Makes child processes for an entry, and ends them."""
    async with AsyncExitStack() as stack:

        async def make(name: str = "Naughty", *, workers: int = 1, **entry: Any) -> tuple[Hosting, OfferedEnvironment]:
            settings = {"isolation": "process", "spares": 0, "source": f"{HERE}:{name}", "name": "naughty", **entry}
            hosting = Hosting(workers=workers, environment_timeout_s=60)
            offered = catalog.build([ClassTasks.model_validate(settings)], elsewhere=hosting.offered)["naughty"]
            await stack.enter_async_context(hosting)
            return hosting, offered

        yield make


async def rolled_out(
    chat_bench: MakeBench, model: Path, offered: OfferedEnvironment, *said: str
) -> tuple[Bench, tuple[Trajectory, ...]]:
    made = await chat_bench(TrajectoryWords(model, *said), extra=[offered], environment_timeout_s=60.0, timeout_s=100.0)
    async with asyncio.timeout(120):
        outcome: Any = await made.rollout.run(lease(environment="naughty", group_size=len(said)), RolloutProgress())
    assert outcome.kind == "finished", outcome
    return made, outcome.group.trajectories


async def test_each_misdeed_costs_its_own_trajectory_is_counted_and_named(
    host: Host, chat_bench: MakeBench, chat_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, offered = await host(options={"step_timeout_s": 5.0})
    said = ("boom", "quit", "odd", "huge", "hang", "leave", "segfault", "killed", "away", "on loud well")

    with caplog.at_level(logging.WARNING):
        made, (*lost, kept) = await rolled_out(chat_bench, chat_model, offered, *said)

    assert (kept.reward.reward, kept.stop_reason, len(kept.turns)) == (1.5, "done", 3)
    errors = dict(zip(said, [trajectory.reward.error or "" for trajectory in lost], strict=False))
    for word in ("boom", "quit", "hang", "segfault"):
        assert "naughty.py:" in errors[word]
        assert "in _do" in errors[word]
    assert "ValueError: a bug of mine" in errors["boom"]
    assert "SystemExit: I quit" in errors["quit"]
    assert "the environment's step returned str, expected a Step" in errors["odd"]
    assert "it may have" in errors["huge"]
    assert "did not come back within" in errors["hang"]
    assert "died in its step: it ended with exit code 3" in errors["leave"]
    assert "died in its step: it was ended by SIGSEGV" in errors["segfault"]
    assert "died in its step: it was ended by SIGKILL" in errors["killed"]
    assert "the game server is full" in errors["away"]
    kinds = [trajectory.reward.error_kind for trajectory in lost]
    assert kinds == ["data"] * 7 + ["infrastructure"] * 2
    assert 'raise ValueError("a bug of mine")' in caplog.text
    for kind, times in {"raised": 2, "nonsense": 2, "hung": 1, "crashed": 2, "killed": 1, "unavailable": 1}.items():
        assert counted(made, "environment_faults_total", environment="naughty", kind=kind) == times


async def test_conversations_share_no_state_unless_they_share_a_process(
    host: Host, chat_bench: MakeBench, chat_model: Path
) -> None:
    _, alone = await host(fresh=True, processes=3)
    _, shared = await host(isolation="workers")

    _, apart = await rolled_out(chat_bench, chat_model, alone, "well", "well", "well")
    _, together = await rolled_out(chat_bench, chat_model, shared, "on well", "on well", "on well")

    assert [one.reward.components["conversations"] for one in apart] == [1.0, 1.0, 1.0]
    assert len({one.reward.components["process"] for one in apart}) == 3
    assert [one.reward.components["conversations"] for one in together] == [3.0, 3.0, 3.0]
    assert len({one.reward.components["process"] for one in together}) == 1


async def test_a_process_of_one_conversation_leaves_no_file(host: Host) -> None:
    hosting, offered = await host(fresh=True)
    task: Any = offered.tasks.task("train", 0)
    async with asyncio.timeout(240):
        for _ in range(2):
            environment: Any = offered.start()
            await environment.reset(task, 0)
            await environment.close()

    folder = hosting._pools["naughty"]._folder
    assert folder is not None
    assert list(folder.iterdir()) == []


async def test_those_that_share_a_dead_process_are_infrastructure_and_the_next_one_goes_on(host: Host) -> None:
    _, offered = await host(isolation="workers")
    task: Any = offered.tasks.task("train", 0)
    culprit, other, later = (cast("Any", offered.start()) for _ in range(3))
    async with asyncio.timeout(240):
        await culprit.reset(task, 0)
        await other.reset(task, 0)
        with pytest.raises(EnvironmentFailed, match="exit code 3") as raised:
            await culprit.step(Action("leave"))
        assert raised.value.kind == "crashed"
        with pytest.raises(EnvironmentUnavailable, match="with all conversations in it"):
            await other.step(Action("on"))
        await later.reset(task, 0)
        assert (await later.step(Action("well"))).stop == "done"


def test_a_fault_is_told_without_halves_of_characters() -> None:
    told = fault_of(EnvironmentFailed("raised", "no such move: \ud83d", traceback="at \ud83d"))

    assert (told.kind, told.text, told.traceback) == ("raised", "no such move: ?", "at ?")


async def test_a_task_that_cannot_be_sent_leaves_a_shared_process_to_the_others(host: Host) -> None:
    _, offered = await host(isolation="workers")
    task: Any = offered.tasks.task("train", 0)
    culprit, other = (cast("Any", offered.start()) for _ in range(2))
    async with asyncio.timeout(240):
        await other.reset(task, 0)
        with pytest.raises(EnvironmentFailed, match="the environment's reset cannot be sent to it"):
            await culprit.reset(Task(data={"half": "\ud83d"}), 0)
        assert (await other.step(Action("well"))).stop == "done"


async def test_a_call_that_is_cancelled_leaves_a_shared_process_to_the_others(host: Host) -> None:
    hosting, offered = await host(isolation="workers")
    task: Any = offered.tasks.task("train", 0)
    gone, other = (cast("Any", offered.start()) for _ in range(2))
    async with asyncio.timeout(240):
        await gone.reset(task, 0)
        await other.reset(task, 0)
        processes = hosting.process_ids
        under_way = asyncio.create_task(gone.step(Action("slow")))
        await asyncio.sleep(0.3)
        under_way.cancel()
        assert (await other.step(Action("well"))).stop == "done"
        await asyncio.gather(under_way, return_exceptions=True)
        assert under_way.cancelled()
        assert hosting.process_ids == processes


async def test_a_process_killed_from_outside_between_two_turns_is_infrastructure(
    host: Host, chat_bench: MakeBench, chat_model: Path
) -> None:
    hosting, offered = await host()
    environment: Any = offered.start()
    task: Any = offered.tasks.task("train", 0)
    async with asyncio.timeout(240):
        await environment.reset(task, 0)
        (process_id,) = hosting.process_ids
        os.kill(process_id, signal.SIGKILL)

        with pytest.raises(EnvironmentUnavailable, match="SIGKILL") as raised:
            await environment.step(Action("well"))
        assert raised.value.kind == "killed"
        await environment.close()

    _, (again,) = await rolled_out(chat_bench, chat_model, offered, "well")
    assert again.reward.reward == 1.0


async def test_a_group_that_wants_more_processes_than_there_are_is_told_what_to_do(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("env_service.hosting.pool._WAIT_S", 0.5)
    _, offered = await host(processes=1)
    task: Any = offered.tasks.task("train", 0)
    one, two = offered.start(), offered.start()
    async with asyncio.timeout(240):
        await one.reset(task, 0)  # type: ignore[misc]
        with pytest.raises(EnvironmentUnavailable, match="all 1 processes are taken: raise the environment's `proc"):
            await two.reset(task, 0)  # type: ignore[misc]
        await one.close()  # type: ignore[attr-defined]
        await two.reset(task, 0)  # type: ignore[misc]
        await two.close()  # type: ignore[attr-defined]


async def test_spares_are_started_before_they_are_wanted_and_all_end_with_the_service() -> None:
    entry = ClassTasks.model_validate(
        {"source": f"{HERE}:Naughty", "name": "naughty", "isolation": "process", "spares": 2, "processes": 8}
    )
    hosting = Hosting(workers=1, environment_timeout_s=60)
    hosting.offered(entry)
    async with hosting:
        await eventually(lambda: len(hosting.process_ids) == 2)
        processes = hosting.process_ids
    for process_id in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)


async def test_tasks_of_its_own_are_made_in_a_process_too(host: Host) -> None:
    _, offered = await host("OwnTasks")

    assert (offered.tasks.train_tasks, offered.tasks.evaluation_tasks) == (3, 1)
    async with asyncio.timeout(240):
        task: Any = await offered.tasks.task("train", 1)  # type: ignore[misc]
        assert task.data == {"row": 1}
        with pytest.raises(Exception, match=r"LookupError: no such row \(.*naughty.py"):
            await offered.tasks.task("train", 2)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "said"),
    [("Naughtier", "has no class 'Naughtier'"), ("DiesAtOnce", r"its process ended with 7 before it could be")],
)
def test_a_class_that_cannot_be_used_is_named_at_the_start(name: str, said: str) -> None:
    entry = ClassTasks.model_validate({"source": f"{HERE}:{name}", "name": "naughty", "isolation": "process"})

    with pytest.raises(EnvironmentFault, match=said):
        Hosting(workers=1, environment_timeout_s=60).offered(entry)
