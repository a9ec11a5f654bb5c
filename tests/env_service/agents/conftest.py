"""Agents with sessions on real sockets."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.env_service.agents.served import MakeAgentBench, agent_benches


@pytest.fixture
async def agents(chat_model: Path) -> AsyncIterator[MakeAgentBench]:
    async with agent_benches(chat_model) as make:
        yield make
