"""A real OpenEnv server, in a virtual environment of its own, through the rollout loop."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest

from env_service.environments import catalog
from env_service.environments.imported import EnvironmentFault
from env_service.environments.interface import Action, EnvironmentUnavailable, OfferedEnvironment, Task
from env_service.environments.task_configs import ClassTasks
from tests.env_service.bench import MakeBench
from tests.env_service.hosting.other_environments import free_port, python_with, running
from tests.env_service.peers import lease
from tests.env_service.rollouts.test_conversation import TrajectoryWords, counted

SERVER = Path(__file__).parents[3] / "examples" / "openenv" / "number_server.py"


def entry(port: int, **options: Any) -> ClassTasks:
    said = {"action_field": "guess", "opening": "0 to 31: {hint}", "template": "{hint}", **options}
    given = {"source": "openenv", "name": "number", "options": {"urls": [f"ws://127.0.0.1:{port}"], **said}}
    return ClassTasks.model_validate(given)


def offered(port: int, **options: Any) -> OfferedEnvironment:
    return catalog.build([entry(port, **options)])["number"]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[int, "subprocess.Popen[bytes]"]]:
    port = free_port()
    with running(python_with("openenv", "0.8.0"), SERVER, "--port", port, "--sessions", 4) as process:
        yield port, process


@pytest.fixture
async def ready(server: tuple[int, "subprocess.Popen[bytes]"]) -> int:
    port, process = server
    async with asyncio.timeout(120), aiohttp.ClientSession() as session:
        while True:
            assert process.poll() is None, "the server has ended"
            try:
                async with session.get(f"http://127.0.0.1:{port}/schema") as answer:
                    assert answer.status == 200
                    return port
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.05)


def guesses(seed: int) -> str:
    """Guesses of a bisection until the number is found."""
    number, low, high = Random(seed % (1 << 31)).randint(0, 31), 0, 31
    said: list[int] = []
    while not said or said[-1] != number:
        said.append((low + high) // 2)
        low, high = (said[-1] + 1, high) if said[-1] < number else (low, said[-1] - 1)
    return " ".join(map(str, said))


async def test_leases_become_trajectories_step_by_step(ready: int, chat_bench: MakeBench, chat_model: Path) -> None:
    environment = offered(ready)
    for index in range(4):
        task: Any = environment.tasks.task("train", index)
        wins = guesses(task.seed)
        wrong = "31 " * 6 if wins != "31" else "0 " * 6
        made = await chat_bench(TrajectoryWords(chat_model, wins, wrong), extra=[environment])

        won, lost = (await made.finished(lease(index, environment="number", task_index=index))).group.trajectories

        assert (won.reward.reward, won.stop_reason, len(won.turns)) == (1.0, "done", len(wins.split()))
        assert lost.stop_reason == "done"
        assert "too " in lost.completion_text or wins.startswith("31")


async def test_bad_actions_are_invalid_and_exceptions_there_cost_their_trajectory(
    ready: int, chat_bench: MakeBench, chat_model: Path
) -> None:
    environment = offered(ready)
    task: Any = environment.tasks.task("train", 0)
    wins = guesses(task.seed)
    made = await chat_bench(TrajectoryWords(chat_model, f"abc 1.5 {wins}", "-1", wins), extra=[environment])

    clumsy, broken, well = (await made.finished(lease(environment="number", group_size=3))).group.trajectories

    assert clumsy.reward.components["invalid_actions"] == 2
    assert clumsy.reward.reward == well.reward.reward == 1.0
    assert broken.reward.error_kind == "data"
    assert "EXECUTION_ERROR: no such number" in str(broken.reward.error)
    assert counted(made, "environment_faults_total", environment="number", kind="raised") == 1


async def test_a_full_server_is_infrastructure(ready: int, chat_bench: MakeBench, chat_model: Path) -> None:
    made = await chat_bench(TrajectoryWords(chat_model, *["1"] * 5), extra=[offered(ready)])

    failed = await made.failed(lease(environment="number", group_size=5))

    assert not failed.data_fault
    assert "CAPACITY_REACHED" in failed.reason


async def test_a_server_that_is_away_is_infrastructure_and_is_named(chat_bench: MakeBench, chat_model: Path) -> None:
    port = free_port()
    made = await chat_bench(TrajectoryWords(chat_model, "1"), extra=[offered(port, action_field="")], timeout_s=1.5)

    failed = await made.failed(lease(environment="number", group_size=1))

    assert not failed.data_fault
    assert f"the OpenEnv server at ws://127.0.0.1:{port} does not take the connection" in failed.reason


async def test_a_field_that_is_none_is_named(ready: int, chat_bench: MakeBench, chat_model: Path) -> None:
    made = await chat_bench(TrajectoryWords(chat_model, "1"), extra=[offered(ready, action_field="number")])

    failed = await made.failed(lease(environment="number", group_size=1))

    assert failed.data_fault
    assert "have no field 'number'; they have guess, metadata" in failed.reason


async def test_a_server_that_goes_away_in_the_middle_is_infrastructure(chat_bench: MakeBench, chat_model: Path) -> None:
    """Last: it takes a server of its own, which it ends."""
    port = free_port()
    with running(python_with("openenv", "0.8.0"), SERVER, "--port", port) as process:
        environment: Any = offered(port, action_field="").start()
        async with asyncio.timeout(120):
            while True:
                try:
                    await environment.reset(Task(seed=1), 0)
                    break
                except EnvironmentUnavailable:
                    assert process.poll() is None
                    await asyncio.sleep(0.05)
            process.kill()
            process.wait()
            with pytest.raises(EnvironmentUnavailable, match=r"ended the session|went away"):
                await environment.step(Action("", value={"guess": 1}))
            await environment.close()


def test_a_template_that_is_none_is_named_at_the_start() -> None:
    with pytest.raises(EnvironmentFault, match="is no template"):
        catalog.build([entry(1, template="{hint")])
