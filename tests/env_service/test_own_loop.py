"""Coroutines of a user's environment or agent may block: the process goes on, and only who blocks is at fault."""

import asyncio
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from env_service.environments import catalog
from env_service.environments.interface import Action, AgentClient, AgentResult, Opening, Step, Task
from env_service.environments.task_configs import ClassTasks
from protocol.trajectories import Trajectory
from tests.env_service.agents.raw_calls import said_to
from tests.env_service.agents.served import Saying, agent, agent_benches
from tests.env_service.bench import Bench, MakeBench
from tests.env_service.peers import lease
from tests.env_service.rollouts.test_conversation import Counting, TrajectoryWords, counted, offered

WAIT_S = 20.0


class Blocking(Counting):
    """The word `block` blocks its event loop, for as long as `hold` or until somebody lets it go."""

    begun = threading.Event()
    go_on = threading.Event()
    hold = WAIT_S

    async def step(self, action: Action) -> Step:
        if action.text == "block":
            self.begun.set()
            return Step(reward=float(self.go_on.wait(self.hold)), stop="let_go")
        await asyncio.sleep(0.05)
        return await super().step(action)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Blocking, "begun", threading.Event())
    monkeypatch.setattr(Blocking, "go_on", threading.Event())


async def rolled_out(
    chat_bench: MakeBench, model: Path, *said: str, **settings: float
) -> tuple[Bench, tuple[Trajectory, ...]]:
    environment = replace(offered(start=Blocking), own_loop=True)
    made = await chat_bench(TrajectoryWords(model, *said), extra=[environment], **settings)
    return made, (await made.finished(lease(environment="counting", group_size=len(said)))).group.trajectories


async def test_a_step_that_blocks_does_not_stop_the_process(chat_bench: MakeBench, chat_model: Path) -> None:
    async def lets_go() -> None:
        while not Blocking.begun.is_set():  # noqa: ASYNC110 - it is set in another thread
            await asyncio.sleep(0.01)
        Blocking.go_on.set()

    letting_go = asyncio.create_task(lets_go())
    _, (trajectory,) = await rolled_out(chat_bench, chat_model, "block")
    await letting_go

    assert trajectory.reward.reward == 1.0, "the process's loop let it go"


async def test_only_the_step_that_blocks_is_at_fault(
    chat_bench: MakeBench, chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Blocking, "hold", 1.5)
    made, (spoilt, *whole) = await rolled_out(
        chat_bench, chat_model, "block", "one two stop", "one two three stop", environment_timeout_s=1.0
    )

    assert spoilt.reward.error_kind == "data"
    assert "the environment's step did not come back within 1 s" in str(spoilt.reward.error)
    assert [each.reward.reward for each in whole] == [2.0, 2.5]
    assert counted(made, "environment_faults_total", environment="counting", kind="hung") == 1


async def test_a_step_that_blocks_for_ever_is_no_fault_of_others(chat_bench: MakeBench, chat_model: Path) -> None:
    environment = replace(offered(start=Blocking), own_loop=True)
    made = await chat_bench(
        TrajectoryWords(chat_model, "block", "one stop"), extra=[environment], environment_timeout_s=1.0
    )

    failed = await made.failed(lease(environment="counting"))
    Blocking.go_on.set()

    assert not failed.data_fault, "the group is worth another attempt"
    assert "the environment's step could not go on: others' code blocks its event loop" in failed.reason
    assert counted(made, "environment_faults_total", environment="counting", kind="hung") == 1
    assert counted(made, "environment_faults_total", environment="counting", kind="unavailable") == 1


def test_classes_of_users_run_in_the_users_loop_and_ours_in_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "environments"))
    entries = [
        ClassTasks(source="sample_environments:GuessNumber", name="theirs"),
        ClassTasks(source="env_service.hosting.openenv:OpenEnvEnvironment", name="ours", options={"urls": ["ws://a"]}),
    ]
    offers = catalog.build(entries)

    assert {name: each.own_loop for name, each in offers.items()} == {"theirs": True, "ours": False}


async def test_an_agent_in_the_users_loop_has_what_the_process_holds(chat_model: Path) -> None:
    threads: list[threading.Thread] = []

    class Posting:
        async def run(self, task: Task, client: AgentClient) -> AgentResult:
            threads.append(threading.current_thread())
            await said_to(client, "chat/completions", '{"messages": [{"role": "user", "content": "go"}]}')
            waiting = asyncio.ensure_future(client.posted())
            await said_to(client, "../reward", '{"reward": 0.5}')
            return await waiting

    async with agent_benches(chat_model) as make:
        made = await make(Saying(chat_model, lambda _: "one"), offered=replace(agent(Posting), own_loop=True))
        (trajectory,) = (await made.finished(lease(environment="agent", group_size=1))).group.trajectories

    assert trajectory.reward.reward == 0.5
    assert threads[0] is not threading.main_thread()


class OpensInALoop(Counting):
    """An environment whose `reset` makes things that belong to the loop of all later calls."""

    async def reset(self, task: Task, seed: int) -> Opening:  # type: ignore[override]
        self.lock = asyncio.Lock()
        await self.lock.acquire()
        self._loop = asyncio.get_running_loop()
        return super().reset(task, seed)

    async def step(self, action: Action) -> Step:
        assert asyncio.get_running_loop() is self._loop
        return await super().step(action)


async def test_all_calls_of_a_conversation_are_in_one_loop(chat_bench: MakeBench, chat_model: Path) -> None:
    environment = replace(offered(start=OpensInALoop), own_loop=True)
    made = await chat_bench(TrajectoryWords(chat_model, "one stop"), extra=[environment])
    (trajectory,) = (await made.finished(lease(environment="counting", group_size=1))).group.trajectories

    assert trajectory.reward.reward == 1.5


class Odd(Counting):
    """Its constructor ends more than itself."""

    def __init__(self) -> None:
        sys.exit("no board")


async def test_a_constructor_that_exits_is_at_fault(chat_bench: MakeBench, chat_model: Path) -> None:
    made = await chat_bench(TrajectoryWords(chat_model, "stop"), extra=[replace(offered(start=Odd), own_loop=True)])

    failed = await made.failed(lease(environment="counting", group_size=1))

    assert failed.data_fault
    assert "its code let out SystemExit: no board" in failed.reason
