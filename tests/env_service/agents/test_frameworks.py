"""Agents of frameworks, each in a virtual environment of its own, over real sockets: no token of theirs is made anew.

The environments are made once, by uv, in the folder that HEADWAY_TEST_VENVS names (by default in the user's cache).
"""

import asyncio
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from env_service.agents.program import AgentOptions, AgentProgram
from env_service.environments.tokenization import Tokenization
from env_service.rollouts.completions import RolloutProgress
from protocol.messages import FinishedLease
from tests.env_service.agents.served import MakeAgentBench, Saying
from tests.env_service.peers import lease

PACKAGES = ("openai-agents==0.24.0", "pydantic-ai-slim[openai]==2.68.0")
PROGRAM = Path(__file__).parent / "client_program.py"


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter of an environment that has the frameworks."""
    folder = Path(os.environ.get("HEADWAY_TEST_VENVS", Path.home() / ".cache" / "headway-tests"))
    made = folder / hashlib.sha256(" ".join([sys.version, *PACKAGES]).encode()).hexdigest()[:16]
    interpreter = made / "bin" / "python"
    if not (made / "complete").exists():
        uv = shutil.which("uv")
        if uv is None:
            pytest.skip("needs uv: pip install uv")
        steps = ([uv, "venv", "-q", "--clear", "-p", sys.executable, str(made)],
                 [uv, "pip", "install", "-q", "--compile-bytecode", "-p", str(interpreter), *PACKAGES])  # fmt: skip
        for step in steps:
            ended = subprocess.run(step, capture_output=True, text=True, timeout=280, check=False)
            if ended.returncode:
                pytest.skip(f"the frameworks cannot be installed: {ended.stderr[-300:]}")
        (made / "complete").touch()
    return str(interpreter)


def adds(prompt: str) -> str:
    asked = '<tool_call>\n{"name": "add", "arguments": {"a": 2,  "b": 3}}\n</tool_call>'
    return "It is 5." if prompt.rstrip().endswith("5<|im_end|>\n<|im_start|>assistant") else asked


@pytest.mark.parametrize("how", ["whole", "streamed"])
@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("framework", ["openai_agents", "pydantic_ai"])
async def test_an_agent_of_a_framework_goes_on_from_its_tokens(
    agents: MakeAgentBench, chat_model: Path, python: str, framework: str, api: str, how: str
) -> None:
    options = AgentOptions(
        command=(python, str(PROGRAM), framework, api, how), confinement={"clean_environment": True}, timeout_s=120
    )
    saying = Saying(chat_model, adds, size=3)
    made = await agents(saying, start=lambda: AgentProgram(options), timeout_s=150.0)
    async with asyncio.timeout(160):
        outcome = await made.rollout.run(lease(environment="agent", group_size=1), RolloutProgress())

    assert isinstance(outcome, FinishedLease), outcome
    (trajectory,) = outcome.group.trajectories
    assert (len(trajectory.turns), len(trajectory.sequence_starts)) == (6, 2)
    (text,) = Tokenization(chat_model).decode([trajectory.token_ids.tolist()], special=True)
    assert text.count(adds("")) == 3
