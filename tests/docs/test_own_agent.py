"""The agent in docs/environments.md: it is that of the example, is ten lines, and becomes trajectories."""

import asyncio
import re
from pathlib import Path

import pytest

from env_service.agents.attempts import attempts_in
from env_service.agents.routes import sessions_alone
from env_service.config import EnvServiceConfig
from env_service.environments import catalog
from protocol.messages import Finished
from services.config.models import load_config
from tests.env_service.agents.served import Saying
from tests.env_service.bench import benches
from tests.env_service.chat_models import model_with
from tests.env_service.peers import lease

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_agent"
PAGE = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")


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

    assert isinstance(outcome, Finished), outcome
    for trajectory in outcome.group.trajectories:
        assert (trajectory.reward.reward, len(trajectory.turns), trajectory.sequence_starts) == (1.0, 2, ())
