"""Agents of frameworks, by each of their APIs and ways, over real sockets: no token of theirs is made anew."""

import asyncio
from pathlib import Path

import pytest

from env_service.agents.program import AgentOptions, AgentProgram
from env_service.environments.tokenization import Tokenization
from env_service.harnesses.catalog import HarnessName
from env_service.rollouts.completions import RolloutProgress
from protocol.messages import FinishedLease
from tests.env_service.agents.served import MakeAgentBench, Saying
from tests.env_service.harnesses.installed import python_with
from tests.env_service.peers import lease

PROGRAM = Path(__file__).parent / "client_program.py"


def adds(prompt: str) -> str:
    asked = '<tool_call>\n{"name": "add", "arguments": {"a": 2,  "b": 3}}\n</tool_call>'
    return "It is 5." if prompt.rstrip().endswith("5<|im_end|>\n<|im_start|>assistant") else asked


@pytest.mark.parametrize("how", ["whole", "streamed"])
@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("framework", ["openai-agents", "pydantic-ai"])
async def test_an_agent_of_a_framework_goes_on_from_its_tokens(
    agents: MakeAgentBench, chat_model: Path, framework: HarnessName, api: str, how: str
) -> None:
    command = (str(python_with(framework)), str(PROGRAM), framework.replace("-", "_"), api, how)
    options = AgentOptions(command=command, confinement={"clean_environment": True}, timeout_s=120)
    saying = Saying(chat_model, adds, size=3)
    made = await agents(saying, start=lambda: AgentProgram(options), timeout_s=150.0)
    async with asyncio.timeout(160):
        outcome = await made.rollout.run(lease(environment="agent", group_size=1), RolloutProgress())

    assert isinstance(outcome, FinishedLease), outcome
    (trajectory,) = outcome.group.trajectories
    assert (len(trajectory.turns), len(trajectory.sequence_starts)) == (6, 2)
    (text,) = Tokenization(chat_model).decode([trajectory.token_ids.tolist()], special=True)
    assert text.count(adds("")) == 3
