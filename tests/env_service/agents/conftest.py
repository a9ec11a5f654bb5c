"""Agents with sessions on real sockets."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.env_service.agents.served import MakeAgentBench, agent_benches
from tests.env_service.chat_models import model_with


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    return model_with("chatml", tmp_path)


@pytest.fixture
async def agents(chat_model: Path) -> AsyncIterator[MakeAgentBench]:
    async with agent_benches(chat_model) as make:
        yield make
