"""Rollouts on computers: what a solution earns, and what the death of one trajectory's computer costs."""

import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue

from env_service import app
from env_service.builtin.computer import ComputerEnvironment
from env_service.config import EnvServiceConfig
from env_service.environments import catalog
from env_service.environments.interface import Action, Step
from env_service.environments.task_configs import ClassTasks
from env_service.runtimes.config import RuntimeLimits, RuntimesConfig
from env_service.runtimes.pool import RuntimePool, use_runtimes
from examples.computer import make_tasks
from protocol.generation import GeneratePart, GenerateRequest, Sampling
from services.http.metrics import Metrics
from services.process import WrongSettings
from tests.env_service.bench import MakeBench
from tests.env_service.peers import lease, part
from tests.env_service.rollouts.test_conversation import TrajectoryWords, counted
from tests.env_service.runtimes.conftest import keepers
from tests.process_ends import all_end

TASKS = Path(make_tasks.__file__).with_name("shell.jsonl")
REPAIRS = Path(make_tasks.__file__).parents[1] / "task_sets/repairs.jsonl"


class DyingEnvironment(ComputerEnvironment):
    """Its computer dies at the command `die`."""

    async def step(self, action: Action) -> Step:
        if any(call.arguments.get("command") == "die" for call in action.calls):
            made: Any = self._runtime
            os.kill(made._runtime._keeper, signal.SIGKILL)
        return await super().step(action)


class TrajectoryCalls(TrajectoryWords):
    """A generator's script: the calls of each trajectory, turn by turn."""

    def __init__(self, model: Path, *said: Sequence[tuple[str, dict[str, JsonValue]]]) -> None:
        super().__init__(model)
        told = [[json.dumps({"name": name, "arguments": given}) for name, given in calls] for calls in said]
        self._said = [[f"<tool_call>\n{call}\n</tool_call>" for call in calls] for calls in told]

    def __call__(self, request: GenerateRequest) -> Sequence[GeneratePart]:
        if "." not in request.request_id.rpartition("/")[2]:
            return [part(index, self.tokens(calls[0])) for index, calls in enumerate(self._said)]
        index, turn = map(int, request.request_id.rpartition("/")[2].split("."))
        return [part(0, self.tokens(self._said[index][turn]))]


@pytest.fixture
async def pool() -> AsyncIterator[RuntimePool]:
    made = use_runtimes(RuntimePool(RuntimesConfig(spare=0, limits=RuntimeLimits(memory_mib=128, disk_mib=8))))
    made.settle()
    yield made
    await made.close()


@pytest.mark.usefixtures("pool")
async def test_a_solution_earns_its_reward_and_a_dead_computer_is_infrastructure(
    chat_bench: MakeBench, chat_model: Path
) -> None:
    entry = ClassTasks.model_validate(
        {"source": f"{__name__}:DyingEnvironment", "name": "computer", "options": {"train_file": str(TASKS)}}
    )
    calls: tuple[list[tuple[str, dict[str, JsonValue]]], ...] = (
        [("shell", {"command": "grep -c ^ERROR app.log > answer.txt"}), ("submit", {})],
        [("shell", {"command": "die"}), ("submit", {})],
        [("submit", {})],
    )
    extra = list(catalog.build([entry]).values())
    made = await chat_bench(TrajectoryCalls(chat_model, *calls), extra=extra, environment_timeout_s=100.0)
    granted = lease(environment="computer", group_size=3).model_copy(
        update={"sampling": Sampling(max_tokens=400), "timeout_s": 200.0}
    )

    solved, dead, idle = (await made.finished(granted)).group.trajectories

    assert (solved.reward.reward, solved.stop_reason, len(solved.turns)) == (1.0, "solved", 2)
    assert (dead.reward.reward, dead.reward.error_kind) == (None, "infrastructure")
    assert "its keeper has died" in (dead.reward.error or "")
    assert (idle.reward.reward, idle.stop_reason) == (0.0, "failed")
    assert counted(made, "environment_faults_total", environment="computer", kind="runtime") == 1
    assert all_end(keepers()), "all runtimes end with their conversations"


@pytest.mark.usefixtures("pool")
async def test_a_repair_is_judged_by_tests_that_nobody_in_the_group_saw(
    chat_bench: MakeBench, chat_model: Path
) -> None:
    entry = ClassTasks.model_validate(
        {"source": "repositories", "name": "repairs", "options": {"train_file": str(REPAIRS)}}
    )
    lie = "echo 'def test_commonest_16(): pass' > tests/test_wordbook.py; cp tests/test_wordbook.py conftest.py"
    calls: tuple[list[tuple[str, dict[str, JsonValue]]], ...] = (
        [("shell", {"command": "sed -i 's/= counts.get(word, 0)$/& + 1/' wordbook/index.py"}), ("submit", {})],
        [("shell", {"command": lie}), ("submit", {})],
        [("submit", {})],
    )
    extra = list(catalog.build([entry]).values())
    made = await chat_bench(TrajectoryCalls(chat_model, *calls), extra=extra, environment_timeout_s=100.0)
    granted = lease(environment="repairs", group_size=3).model_copy(
        update={"sampling": Sampling(max_tokens=400), "timeout_s": 200.0}
    )

    solved, lied, idle = (await made.finished(granted)).group.trajectories

    assert [each.reward.reward for each in (solved, lied, idle)] == [1.0, 0.0, 0.0]
    assert [each.stop_reason for each in (solved, lied, idle)] == ["solved", "failed", "failed"]
    assert [each.reward.components["kept_out"] for each in (solved, lied, idle)] == [0.0, 2.0, 0.0]


async def test_waiting_for_room_that_would_count_as_hanging_is_refused(chat_model: Path, pool: RuntimePool) -> None:
    pool.need("host")
    given = {"model": chat_model, "retry": {"environment_timeout_s": 100.0}}
    config = EnvServiceConfig.model_validate(given)
    with pytest.raises(WrongSettings, match=r"retry.environment_timeout_s, .* is 100 s: make it more than 180 s"):
        async with app.opened_places(config, app.hosting_of(config), pool, Metrics("env-service")):
            pass
