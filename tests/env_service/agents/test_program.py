"""Agents that are functions or programs of the user's."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from env_service.agents.processes import Confinement, ProgramRun, result_of
from env_service.agents.program import AgentOptions, AgentProgram
from env_service.environments.imported import EnvironmentFault, NumberedTasks, offered
from env_service.environments.interface import AgentClient, EnvironmentFailed
from env_service.environments.task_configs import ClassTasks
from protocol.messages import FailedLease
from protocol.trajectories import Trajectory
from tests.env_service.agents.served import MakeAgentBench, Saying
from tests.env_service.peers import eventually, lease
from tests.process_ends import all_end, children_of

PROGRAM = Path(__file__).parent / "sample_program.py"


@pytest.fixture(autouse=True)
def importable_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def program(what: str, *arguments: str, **options: Any) -> AgentOptions:
    return AgentOptions(command=(sys.executable, str(PROGRAM), what, *arguments), **options)


@pytest.fixture
def rolled_out(agents: MakeAgentBench, chat_model: Path) -> Any:
    async def roll(options: AgentOptions) -> Trajectory | FailedLease:
        made = await agents(Saying(chat_model, lambda _: "one"), start=lambda: AgentProgram(options))
        outcome = await made.run(lease(environment="agent", group_size=1))
        assert len(made.sessions) == 0
        return outcome if isinstance(outcome, FailedLease) else outcome.group.trajectories[0]

    return roll


async def test_a_function_is_run_by_its_path(rolled_out: Any) -> None:
    trajectory = await rolled_out(AgentOptions(run="sample_agents:asks"))

    assert (trajectory.reward.reward, trajectory.stop_reason) == (1.0, "one")


async def test_a_function_that_raises_is_told_with_its_place(rolled_out: Any) -> None:
    failed = await rolled_out(AgentOptions(run="sample_agents:raises"))

    assert failed.data_fault
    assert "KeyError: 'a bug of mine' (" in failed.reason
    assert "sample_agents.py" in failed.reason


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cancels", "its code let out CancelledError ("),
        ("cancels_itself", "CancelledError"),
        ("quits", "its code let out SystemExit: I quit ("),
    ],
)
async def test_a_function_that_ends_more_than_itself_is_at_fault(rolled_out: Any, name: str, said: str) -> None:
    failed = await rolled_out(AgentOptions(run=f"sample_agents:{name}"))

    assert failed.data_fault
    assert said in failed.reason
    assert (await rolled_out(AgentOptions(run="sample_agents:asks"))).reward.reward == 1.0


@pytest.mark.parametrize("name", ["blocks", "never_ends"])
async def test_a_function_has_its_time_and_holds_nobody_else_up(rolled_out: Any, name: str) -> None:
    failed = await rolled_out(AgentOptions(run=f"sample_agents:{name}", timeout_s=1.0))

    assert "the agent was not done within 1 s" in failed.reason
    assert (await rolled_out(AgentOptions(run="sample_agents:asks"))).reward.reward == 1.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"run": "sample_agents:not_async"}, "is no async function; expected `async def not_async"),
        ({"run": "sample_agents:absent"}, "is no async function"),
        ({"run": "no_such_module:run"}, "cannot import 'no_such_module'"),
        ({"run": "sample_agents:asks", "command": ["true"]}, "run and command are both set"),
        ({"rum": "sample_agents:asks"}, "rum"),
    ],
)
def test_an_agent_that_cannot_be_used_is_refused_at_the_start(options: dict[str, Any], said: str) -> None:
    with pytest.raises(EnvironmentFault, match=said):
        offered(ClassTasks(source="agent", name="mine", options=options))


def test_a_module_of_an_agent_that_ends_the_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "leaving_agent.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(EnvironmentFault, match=r"'leaving_agent' calls sys\.exit when imported: SystemExit: 3"):
        offered(ClassTasks(source="agent", name="mine", options={"run": "leaving_agent:run"}))


def test_tasks_come_from_files_of_objects(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"question": "a"}\n\n{"question": "b"}\n')
    entry = ClassTasks(source="agent", name="mine", options={"train_file": str(file)})

    tasks = offered(entry).tasks

    assert (tasks.train_tasks, tasks.evaluation_tasks) == (2, 0)
    file.write_text("[1]\n")
    with pytest.raises(EnvironmentFault, match=r"tasks.jsonl:1: "):
        offered(entry)


def test_numbered_tasks_are_those_of_the_entrys_seed() -> None:
    def seed(**entry: Any) -> int:
        task: Any = offered(ClassTasks(source="agent", name="mine", **entry)).tasks.task("train", 3)
        return int(task.seed)

    assert seed() == seed(seed=0) == NumberedTasks(seed=0, train_tasks=4, evaluation_tasks=0).task("train", 3).seed
    assert seed(seed=1) == NumberedTasks(seed=1, train_tasks=4, evaluation_tasks=0).task("train", 3).seed


def test_an_agent_has_no_redundant_trajectories() -> None:
    entry = ClassTasks.model_validate({"source": "agent", "name": "mine", "rules": {"redundant": 2}})

    with pytest.raises(EnvironmentFault, match=r"rules\.redundant is 2, and it is an agent"):
        offered(entry)


@pytest.mark.parametrize(("what", "reward", "stop"), [("prints", 0.5, "finished"), ("posts", 0.25, "solved")])
async def test_a_program_prints_its_reward_or_posts_it(rolled_out: Any, what: str, reward: float, stop: str) -> None:
    trajectory = await rolled_out(program(what))

    assert (trajectory.reward.reward, trajectory.stop_reason) == (reward, stop)


async def test_a_program_that_crashes_is_told_with_its_last_words(rolled_out: Any) -> None:
    failed = await rolled_out(program("crashes"))

    assert (failed.data_fault, failed.reason) == (True, "the agent exited with code 3: ValueError: no such file")


async def test_a_program_without_a_reward_is_at_fault_unless_somebody_judges(rolled_out: Any) -> None:
    assert "expected its reward" in (await rolled_out(program("says_nothing"))).reason

    assert (await rolled_out(program("says_nothing", verifier="exact_match"))).reward.verifier == "exact_match"


async def test_a_program_that_cannot_be_started_is_named(rolled_out: Any) -> None:
    assert (
        "'no-such-program' cannot be started" in (await rolled_out(AgentOptions(command=("no-such-program",)))).reason
    )


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_program_that_has_ended_before_the_loop_looks_is_heard(
    make_loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = ProgramRun._started

    async def started_late(self: ProgramRun, *given: Any) -> asyncio.subprocess.Process:
        process = await start(self, *given)
        await process.wait()
        return process

    monkeypatch.setattr(ProgramRun, "_started", started_late)

    async def nothing() -> Any: ...

    client = AgentClient(base_url="http://mine/v1", key="", model="", seed=0, posted=nothing, offer=nothing)
    run = ProgramRun(command=("/bin/echo", "0.5"), environ={}, confinement=Confinement())
    with asyncio.Runner(loop_factory=make_loop) as runner:
        assert runner.run(run.result({}, client)) == 0.5


def test_a_program_that_is_killed_by_a_signal_without_a_name_is_at_fault_as_by_any_other() -> None:
    with pytest.raises(EnvironmentFailed, match="the agent was killed by signal 40: Oh"):
        result_of(-40, said=b"1", complained=b"Oh\n")


async def test_what_a_program_started_ends_with_it(rolled_out: Any, tmp_path: Path) -> None:
    file = tmp_path / "pid"

    assert (await rolled_out(program("leaves_a_child", str(file)))).reward.reward == 1.0

    assert all_end([int(file.read_text())])


async def test_a_program_that_hangs_is_ended(rolled_out: Any) -> None:
    assert "not done within 2 s" in (await rolled_out(program("hangs", timeout_s=2.0))).reason


async def test_a_program_is_confined_as_wished(
    rolled_out: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_ENV_SERVICE__REWARD_TOKEN", "secret")
    monkeypatch.setenv("OF_MINE", "1")
    open_file, closed_file = tmp_path / "open.json", tmp_path / "closed.json"
    await rolled_out(program("shows", str(open_file)))
    await rolled_out(
        program(
            "shows", str(closed_file), confinement={"own_folder": True, "clean_environment": True, "memory_mb": 2048}
        )
    )

    seen, confined = json.loads(open_file.read_text()), json.loads(closed_file.read_text())
    assert "OF_MINE" in seen["names"]
    assert not [name for name in seen["names"] if name.startswith("HEADWAY")]
    assert "OF_MINE" not in confined["names"]
    assert not os.path.exists(confined["folder"])  # noqa: ASYNC240
    assert "MemoryError" in (await rolled_out(program("grows", confinement={"memory_mb": 512}))).reason


@pytest.mark.parametrize("what", ["prints", "streams"])
async def test_a_program_that_is_killed_in_a_call_leaves_nothing_behind(
    agents: MakeAgentBench, chat_model: Path, what: str
) -> None:
    made = await agents(Saying(chat_model, lambda _: "one"), start=lambda: AgentProgram(program(what)))
    made.generators[0].hold = asyncio.Event()
    others = set(children_of(os.getpid()))
    rolled = asyncio.create_task(made.failed(lease(environment="agent", group_size=1)))
    await eventually(lambda: made.generators[0].requests)
    (child,) = set(children_of(os.getpid())) - others

    os.kill(child, signal.SIGKILL)

    assert (await rolled).reason == "the agent was killed by SIGKILL: it said nothing"
    assert len(made.sessions) == 0
    assert sum(made.fleet.outstanding.values()) == 0
