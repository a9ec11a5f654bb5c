"""A real env server of verifiers, in a virtual environment of its own: its harness asks through a session."""

import asyncio
import json
import re
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from env_service.environments import catalog
from env_service.environments.imported import EnvironmentFault
from env_service.environments.interface import (
    AgentClient,
    AgentResult,
    EnvironmentUnavailable,
    OfferedEnvironment,
)
from env_service.environments.task_configs import ClassTasks
from env_service.rollouts.completions import RolloutProgress
from protocol.messages import FailedLease, FinishedLease
from tests.env_service.agents.served import AgentBench, MakeAgentBench, Saying, agent_benches
from tests.env_service.hosting.other_environments import free_port, python_with, running
from tests.env_service.peers import lease
from tests.env_service.rollouts.test_conversation import counted

SERVE = Path(__file__).parents[3] / "examples" / "verifiers" / "serve.py"
START_S = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, "subprocess.Popen[bytes]"]]:
    """Its address, the file of its tasks, and its process."""
    file, address = tmp_path_factory.mktemp("tasks") / "tasks.jsonl", f"tcp://127.0.0.1:{free_port()}"
    command = (SERVE, "sums", "--tasks", file, "--count", 8, "--address", address)
    with running(python_with("verifiers", "0.4.0"), *command) as process:
        ends = time.monotonic() + START_S
        while not (file.exists() and file.read_text().count("\n") == 8):
            assert process.poll() is None, "the server has ended"
            assert time.monotonic() < ends, "the server has not written its tasks"
            time.sleep(0.05)
        yield address, file, process


def offered(address: str, file: Path, **options: Any) -> OfferedEnvironment:
    given = {"addresses": [address], "train_file": str(file), "connect_timeout_s": 60.0, **options}
    entry = ClassTasks.model_validate({"source": "verifiers", "name": "sums", "options": given})
    return catalog.build([entry])["sums"]


@pytest.fixture
async def agents(chat_model: Path) -> AsyncIterator[MakeAgentBench]:
    async with agent_benches(chat_model) as make:
        yield make


def adds(prompt: str) -> str:
    """Says 0 at first, and the sum when it is told no."""
    left, right = re.findall(r"(\d)\+(\d)=", prompt)[-1]
    return str(int(left) + int(right)) if "no<|im_end|>" in prompt else "x"


async def rolled_out(
    make: MakeAgentBench,
    model: Path,
    environment: OfferedEnvironment,
    says: Callable[[str], str],
    index: int = 0,
    *,
    timeout_s: float = 100.0,
) -> tuple[AgentBench, FinishedLease | FailedLease]:
    bench = await make(Saying(model, says), offered=environment, timeout_s=timeout_s, environment_timeout_s=60.0)
    async with asyncio.timeout(120):
        granted = lease(index, environment="sums", task_index=index)
        granted = granted.model_copy(update={"sampling": granted.sampling.model_copy(update={"max_tokens": 16})})
        return bench, await bench.rollout.run(granted, RolloutProgress())


async def test_leases_become_trajectories_with_the_tokens_that_were_sampled(
    server: tuple[str, Path, Any], agents: MakeAgentBench, chat_model: Path
) -> None:
    address, file, _ = server
    for index in range(4):
        _, outcome = await rolled_out(agents, chat_model, offered(address, file), adds, index)

        assert isinstance(outcome, FinishedLease), outcome
        for trajectory in outcome.group.trajectories:
            assert trajectory.reward.reward == 1.0
            assert trajectory.reward.components["tries"] == 2.0
            assert trajectory.reward.components["right"] == 1.0
            assert len(trajectory.turns) == 2
            assert trajectory.loss_mask.sum() == sum(turn.end - turn.completion_start for turn in trajectory.turns)


async def test_what_raises_there_costs_its_trajectory_and_is_named_with_its_traceback(
    server: tuple[str, Path, Any],
    agents: MakeAgentBench,
    chat_model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    address, file, _ = server
    broken = tmp_path / "broken.jsonl"
    row = json.loads(file.read_text().splitlines()[0])
    broken.write_text(json.dumps({**row, "answer": "none"}))

    bench, outcome = await rolled_out(agents, chat_model, offered(address, broken), adds)

    assert isinstance(outcome, FailedLease)
    assert outcome.data_fault
    assert "TaskError" in outcome.reason
    assert "a task without an answer" in outcome.reason
    assert "sums.py" in caplog.text
    assert counted(bench, "environment_faults_total", environment="sums", kind="raised") == 2


async def test_a_row_that_is_no_task_is_named(
    server: tuple[str, Path, Any], agents: MakeAgentBench, chat_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "odd.jsonl"
    file.write_text('{"idx": "first", "prompt": 3}\n')

    _, outcome = await rolled_out(agents, chat_model, offered(server[0], file), adds)

    assert isinstance(outcome, FailedLease)
    assert outcome.data_fault
    assert "ValidationError" in outcome.reason


async def test_a_server_that_is_away_is_infrastructure(
    agents: MakeAgentBench, chat_model: Path, tmp_path: Path
) -> None:
    file, address = tmp_path / "tasks.jsonl", f"tcp://127.0.0.1:{free_port()}"
    file.write_text('{"prompt": "1+1="}\n')

    _, outcome = await rolled_out(
        agents, chat_model, offered(address, file, connect_timeout_s=0.2), adds, timeout_s=2.0
    )

    assert isinstance(outcome, FailedLease)
    assert not outcome.data_fault
    assert f"the env server at {address} does not answer within 0.2 s; is it running?" in outcome.reason


def test_a_file_that_holds_no_tasks_is_named_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1"}\nnonsense\n')

    with pytest.raises((EnvironmentFault, ValueError), match=r"bad\.jsonl:2: .*; expected one JSON object per line"):
        offered("tcp://127.0.0.1:1", tmp_path / "bad.jsonl")


async def test_a_server_that_dies_in_the_middle_is_infrastructure(
    server: tuple[str, Path, "subprocess.Popen[bytes]"],
) -> None:
    """Last, since it ends the server."""
    address, file, process = server
    environment = offered(address, file, silence_s=4.0)
    asked = asyncio.Event()

    async def hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()
        writer.close()

    policy = await asyncio.start_server(hangs, "127.0.0.1", 0)
    port = policy.sockets[0].getsockname()[1]
    client = AgentClient(
        base_url=f"http://127.0.0.1:{port}/v1", key="k", model="policy", seed=0, posted=_never, offer=_offered
    )
    task: Any = environment.tasks.task("train", 0)
    made: Any = environment.agent() if environment.agent else None
    async with asyncio.timeout(240):
        running_there = asyncio.ensure_future(made.run(task, client))
        called = asyncio.ensure_future(asked.wait())
        await asyncio.wait([called, running_there], return_when=asyncio.FIRST_COMPLETED)
        assert asked.is_set(), running_there
        process.kill()
        with pytest.raises(EnvironmentUnavailable, match="has been silent: it died, or it hangs"):
            await running_there
    policy.close()


async def _never() -> AgentResult:
    await asyncio.Event().wait()
    raise AssertionError


async def _offered() -> None:
    return None
