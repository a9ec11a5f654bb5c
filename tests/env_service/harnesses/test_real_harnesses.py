"""The harnesses themselves, unmodified, each from a virtual environment of its own: make harnesses."""

import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from env_service.harnesses.catalog import HARNESSES, HarnessName
from tests.env_service.harnesses.conftest import HarnessRun, call, turns_of
from tests.env_service.harnesses.installed import python_with
from tests.process_ends import all_end, children_of

ROOT = Path(__file__).parents[3]
LOOK, SOLVE = "cat app.log", "grep -c ^ERROR app.log > answer.txt; cat answer.txt"


@dataclass(frozen=True)
class ExpectedHarness:
    """Name of a harness's shell, the words that end its work, the sequences that three turns become, and the API that
    it asks by.
    """

    shell: str
    last: str
    sequences: int = 1
    api: str = "chat"


EXPECTED: dict[HarnessName, ExpectedHarness] = {
    "mini-swe-agent": ExpectedHarness("bash", call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")),
    "openai-agents": ExpectedHarness("shell", "It is done."),
    "pydantic-ai": ExpectedHarness("shell", "It is done."),
    # It tells calls and results in words of its own, so that each request begins a sequence.
    "smolagents": ExpectedHarness("run_shell", call("final_answer", answer="done"), sequences=3),
    "anthropic": ExpectedHarness("shell", "It is done.", api="messages"),
}
assert set(EXPECTED) == set(HARNESSES)


@pytest.fixture(params=list(HARNESSES))
def harness(request: pytest.FixtureRequest) -> HarnessName:
    """A harness that is installed."""
    name: HarnessName = request.param
    python_with(name)
    return name


def options(name: HarnessName, **given: Any) -> dict[str, Any]:
    return {"harness": name, "python": python_with(name), "timeout_s": 120.0, **given}


def answers(name: HarnessName) -> Sequence[str]:
    shell = EXPECTED[name].shell
    return [f"Look.\n{call(shell, command=LOOK)}", call(shell, command=SOLVE), EXPECTED[name].last]


async def test_it_works_on_a_computer_and_its_tokens_are_those_that_were_sampled(
    rolled_out: HarnessRun, harness: HarnessName, asked_by: Counter[str]
) -> None:
    ended = await rolled_out(options(harness), answers(harness))

    (trajectory,) = ended.trajectories
    assert (trajectory.reward.reward, trajectory.stop_reason) == (1.0, "solved"), trajectory.reward
    assert list(turns_of(trajectory)) == list(zip(ended.policy.shown, ended.policy.sampled, strict=True))
    assert 1 + len(trajectory.sequence_starts) == EXPECTED[harness].sequences
    assert "ERROR a" in ended.policy.prompts[1]
    assert trajectory.loss_mask.sum() == sum(map(len, ended.policy.sampled))
    assert asked_by == {EXPECTED[harness].api: 3}


ADDS = '"""Add two numbers.\n\n    Args:\n        a: one\n        b: another\n    """\n    return a + b\n'
OWN_AGENTS: dict[HarnessName, str] = {
    "openai-agents": (ROOT / "examples" / "harnesses" / "adder.py").read_text(encoding="utf-8"),
    "pydantic-ai": f"""
from pydantic_ai import Agent
agent = Agent("openai:gpt-5", instructions="Add.")
@agent.tool_plain
def add(a: int, b: int) -> int:
    {ADDS}""",
    "smolagents": f"""
from smolagents import ToolCallingAgent, tool
@tool
def add(a: int, b: int) -> int:
    {ADDS}
def agent(model):
    return ToolCallingAgent(tools=[add], model=model)
""",
    "anthropic": """
from anthropic import beta_async_tool
@beta_async_tool
async def add(a: int, b: int) -> str:
    \"\"\"Add two numbers.\"\"\"
    return str(a + b)
async def agent(prompt, client):
    asked = {"role": "user", "content": prompt}
    running = client.beta.messages.tool_runner(
        model="claude", max_tokens=99, messages=[asked], tools=[add], thread=False
    )
    return (await running.until_done()).content[0].text
""",
}
"""Files with an agent that adds by a tool, as a user would have them."""


@pytest.mark.parametrize("name", list(OWN_AGENTS))
async def test_an_agent_of_the_users_own_is_run_as_it_is(
    rolled_out: HarnessRun, name: HarnessName, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN_AGENTS[name])
    last = call("final_answer", answer="5") if name == "smolagents" else "5"
    ended = await rolled_out(options(name, agent_file=file), [call("add", a=2, b=3), last], questions=True)

    (trajectory,) = ended.trajectories
    assert (trajectory.reward.reward, len(trajectory.turns)) == (1.0, 2), trajectory.reward
    assert list(turns_of(trajectory)) == list(zip(ended.policy.shown, ended.policy.sampled, strict=True))


async def test_settings_of_mini_swe_agent_go_over_its_own(rolled_out: HarnessRun) -> None:
    settings = {"config": "mini_textbased.yaml", "model": {"model_class": "litellm_textbased"}}
    lines = ["cat app.log", SOLVE, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
    words = [f"THOUGHT: so.\n```mswea_bash_command\n{line}\n```" for line in lines]
    ended = await rolled_out(options("mini-swe-agent", settings=settings), words)

    (trajectory,) = ended.trajectories
    assert (trajectory.reward.reward, trajectory.sequence_starts) == (1.0, ())


@pytest.mark.parametrize("name", ["openai-agents", "pydantic-ai"])
async def test_it_asks_by_responses_if_that_is_set(
    rolled_out: HarnessRun, name: HarnessName, asked_by: Counter[str]
) -> None:
    (trajectory,) = (await rolled_out(options(name, settings={"responses": True}), answers(name))).trajectories

    assert (trajectory.reward.reward, trajectory.sequence_starts) == (1.0, ())
    assert asked_by == {"responses": 3}


def killer(name: HarnessName, pids: list[int]) -> Callable[[int], object]:
    driver = str(HARNESSES[name].driver).encode()

    def kill(number: int) -> None:
        if number == 1 and not pids:
            pids.extend(pid for pid in children_of(os.getpid()) if driver in Path(f"/proc/{pid}/cmdline").read_bytes())
            os.kill(pids[0], signal.SIGKILL)

    return kill


async def test_killing_it_costs_its_trajectory_alone(rolled_out: HarnessRun, harness: HarnessName) -> None:
    pids: list[int] = []
    ended = await rolled_out(
        options(harness), answers(harness), before=killer(harness, pids), group_size=2, by_turns=True
    )

    # One that was killed before it had an answer is no trajectory at all.
    assert [each.reward.reward for each in ended.trajectories if each.reward.error is None] == [1.0]
    faults = {"environment": "agent", "kind": "crashed"}
    assert ended.bench.metrics.registry.get_sample_value("headway_env_service_environment_faults_total", faults) == 1.0
    assert all_end(pids)
    assert len(ended.bench.sessions) == 0
