"""Bodies sent to a session's routes as they are, without a client's help."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from env_service.environments.interface import AgentClient, Task
from tests.env_service.agents.served import MakeAgentBench, Saying
from tests.env_service.peers import lease

GO: Any = [{"role": "user", "content": "go"}]


async def said_to(client: AgentClient, route: str, body: str) -> tuple[int, Mapping[str, Any]]:
    headers = {"Authorization": f"Bearer {client.key}"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{client.base_url}/{route}", data=body.encode(), headers=headers) as said,
    ):
        text = await said.text()
        return said.status, json.loads(text) if text.startswith("{") else {"text": text}


async def answers(
    agents: MakeAgentBench, model: Path, asked: list[tuple[str, str]]
) -> list[tuple[int, Mapping[str, Any]]]:
    """Posts each body to its route, in one session; returns the answers."""
    found = []

    async def asks(task: Task, client: AgentClient) -> float:
        for route, body in asked:
            found.append(await said_to(client, route, body))
        status, _ = await said_to(client, "chat/completions", json.dumps({"model": "m", "messages": GO}))
        assert status == 200
        return 1.0

    made = await agents(Saying(model, lambda _: "one"), run=asks)
    await made.finished(lease(environment="agent", group_size=1))
    return found
