"""The agents in docs/environments.md and docs/environments-how-to.md: they are short, and become trajectories."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from env_service.agents.attempts import attempts_in
from env_service.agents.routes import sessions_alone
from env_service.config import EnvServiceConfig
from env_service.environments import catalog
from protocol.messages import FinishedLease
from services.config.models import load_config
from tests.env_service.agents.served import Saying
from tests.env_service.bench import benches
from tests.env_service.chat_models import model_with
from tests.env_service.peers import lease

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_agent"
PAGE = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
HOW_TO = (ROOT / "docs" / "environments-how-to.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("language", "file"), [("python", "adder.py"), ("toml", "run.toml")])
def test_what_is_shown_is_in_the_files_of_the_example(language: str, file: str) -> None:
    (block,) = re.findall(rf"^```{language}\n# examples/own_agent/{file}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)

    assert block in (EXAMPLE / file).read_text(encoding="utf-8")


def test_an_agent_is_ten_lines() -> None:
    code = (EXAMPLE / "adder.py").read_text(encoding="utf-8").partition("async def run")[2]

    assert len([line for line in code.splitlines() if line.strip()]) <= 10


async def test_it_becomes_trajectories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    path = EXAMPLE / "run.toml"
    config = load_config(EnvServiceConfig, process="env-service", argv=["--config", str(path)], environ={})
    environment = catalog.build(config.environments)["adder"]
    model = model_with("chatml", tmp_path)

    def answer(prompt: str) -> str:
        a, b = map(int, re.findall(r"What is (\d+) \+ (\d+)", prompt)[-1])
        return str(a + b) if "sure?" in prompt else "Let me see"

    async with sessions_alone() as sessions, benches(model) as make:
        made = await make(Saying(model, answer), extra=[environment], agents=attempts_in(sessions))
        async with asyncio.timeout(60):
            outcome = await made.run(lease(environment="adder"))

    assert isinstance(outcome, FinishedLease), outcome
    for trajectory in outcome.group.trajectories:
        assert (trajectory.reward.reward, len(trajectory.turns), trajectory.sequence_starts) == (1.0, 2, ())


async def test_a_client_from_outside_is_fifteen_lines_and_its_sessions_become_trajectories(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n# outside.py\n(.*?)^```", HOW_TO, re.DOTALL | re.MULTILINE)
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    made_here: dict[str, Any] = {}
    exec(compile(code, "outside.py", "exec"), made_here)
    entry = {"name": "adder", "source": "agent", "options": {"timeout_s": 120}}
    config = EnvServiceConfig.model_validate({"model": tmp_path, "environments": [entry]})
    environment = catalog.build(config.environments)["adder"]
    model = model_with("chatml", tmp_path)

    def answer(prompt: str) -> str:
        a, b = map(int, re.findall(r"What is (\d+) \+ (\d+)", prompt)[-1])
        return str(a + b)

    async with sessions_alone(token="of-the-process") as sessions, benches(model) as make:
        made = await make(Saying(model, answer), extra=[environment], agents=attempts_in(sessions))
        wanted = lease(environment="adder")
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            rollout = tasks.create_task(made.run(wanted))
            clients = [
                tasks.create_task(asyncio.to_thread(made_here["solve_one"], sessions.url, "of-the-process"))
                for _ in range(wanted.group_size)
            ]
        outcome = rollout.result()

    assert [client.result() for client in clients] == [1.0] * len(clients)
    assert isinstance(outcome, FinishedLease), outcome
    assert [trajectory.reward.reward for trajectory in outcome.group.trajectories] == [1.0] * len(clients)
