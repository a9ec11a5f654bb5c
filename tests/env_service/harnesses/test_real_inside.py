"""The harnesses themselves, unmodified, inside of their task's computer: make harnesses."""

import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from env_service.environments.rules import Rules
from env_service.harnesses.catalog import HARNESSES, HarnessName
from env_service.runtimes.config import RuntimesConfig
from env_service.runtimes.pool import RuntimePool, use_runtimes
from tests.env_service.harnesses.conftest import EndedHarness, HarnessRun, turns_of
from tests.env_service.harnesses.installed import python_with
from tests.env_service.harnesses.test_real_harnesses import EXPECTED, SOLVE, answers, options
from tests.env_service.runtimes.conftest import keepers
from tests.process_ends import all_end, children_of


@dataclass(frozen=True)
class WayToAsk:
    """A harness and, of those that it has, the API that it asks by."""

    name: HarnessName
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name} {'responses' if self.settings else ''}".strip()

    @property
    def inside(self) -> dict[str, Any]:
        return options(self.name, settings=self.settings, inside=True)

    @property
    def answers(self) -> Sequence[str]:
        return answers(self.name)


RESPONSES = {"responses": True}
WAYS = [*map(WayToAsk, HARNESSES), WayToAsk("openai-agents", RESPONSES), WayToAsk("pydantic-ai", RESPONSES)]


@pytest.fixture(params=WAYS, ids=str)
def way(request: pytest.FixtureRequest) -> WayToAsk:
    """A harness that is installed."""
    given: WayToAsk = request.param
    python_with(given.name)
    return given


@pytest.fixture
async def runtimes() -> AsyncIterator[RuntimePool]:
    """Runtimes of the usual size, in which the harness has to have room."""
    pool = use_runtimes(RuntimePool(RuntimesConfig(spare=0)))
    yield pool
    await pool.close()


def inside() -> list[int]:
    """The processes that are in runtimes, and those that keep them there."""
    found = keepers()
    for pid in found:
        with suppress(FileNotFoundError):
            found.extend(children_of(pid))
    return found


def nothing_is_left(ended: EndedHarness, pids: Sequence[int]) -> bool:
    assert pids
    return all_end([*pids, *keepers()]) and len(ended.bench.sessions) == 0


async def test_it_works_inside_and_its_tokens_are_those_that_were_sampled(
    rolled_out: HarnessRun, way: WayToAsk, asked_by: Counter[str]
) -> None:
    pids: list[int] = []
    ended = await rolled_out(way.inside, way.answers, before=lambda _: pids.extend(inside()))

    (trajectory,) = ended.trajectories
    assert (trajectory.reward.reward, trajectory.stop_reason) == (1.0, "solved"), trajectory.reward
    assert list(turns_of(trajectory)) == list(zip(ended.policy.shown, ended.policy.sampled, strict=True))
    assert 1 + len(trajectory.sequence_starts) == EXPECTED[way.name].sequences
    assert "ERROR a" in ended.policy.prompts[1]
    assert asked_by == {"responses" if way.settings else EXPECTED[way.name].api: 3}
    assert nothing_is_left(ended, pids)


async def test_killing_it_inside_costs_its_trajectory_alone(rolled_out: HarnessRun, way: WayToAsk) -> None:
    driver, killed, pids = HARNESSES[way.name].driver.name.encode(), list[int](), list[int]()

    def kill(number: int) -> None:
        pids.extend(inside())
        if number == 1 and not killed:
            killed.extend(pid for pid in pids if driver in Path(f"/proc/{pid}/cmdline").read_bytes())
            os.kill(killed[0], signal.SIGKILL)

    ended = await rolled_out(way.inside, way.answers, before=kill, group_size=2, by_turns=True)

    # One that was killed before it had an answer is no trajectory at all.
    assert [each.reward.reward for each in ended.trajectories if each.reward.error is None] == [1.0]
    faults = {"environment": "agent", "kind": "crashed"}
    assert ended.bench.metrics.registry.get_sample_value("headway_env_service_environment_faults_total", faults) == 1.0
    assert nothing_is_left(ended, pids)


async def test_at_its_limit_of_turns_what_it_has_done_inside_is_judged(rolled_out: HarnessRun, way: WayToAsk) -> None:
    pids: list[int] = []
    ended = await rolled_out(way.inside, way.answers, rules=Rules(max_turns=2), before=lambda _: pids.extend(inside()))

    (trajectory,) = ended.trajectories
    assert (trajectory.reward.reward, len(ended.policy.sampled)) == (1.0, 2), trajectory.reward
    # It asks for last words beyond its limit, which the session refuses.
    assert trajectory.truncated == (way.name == "smolagents")
    assert nothing_is_left(ended, pids)


async def test_an_agent_of_the_users_own_has_the_shell_inside(rolled_out: HarnessRun, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from agents import Agent, function_tool\n"
        "from driving import shell\n"
        "agent = Agent(name='mine', tools=[function_tool(shell, name_override='run')])\n"
    )
    given = options("openai-agents", agent_file=file, inside=True)
    words = [f'<tool_call>\n{{"name": "run", "arguments": {{"line": "{SOLVE}"}}}}\n</tool_call>', "It is done."]
    (trajectory,) = (await rolled_out(given, words)).trajectories

    assert (trajectory.reward.reward, len(trajectory.turns)) == (1.0, 2), trajectory.reward
