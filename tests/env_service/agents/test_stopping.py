"""An env-service that stops: agents that wait for a task or for an answer are told so, with 503."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from env_service.environments.interface import AgentClient, Task
from tests.env_service.agents.served import AgentBench, MakeAgentBench, Saying
from tests.env_service.peers import eventually, lease


async def test_who_waits_for_a_task_is_told_at_once(agents: MakeAgentBench, chat_model: Path) -> None:
    made = await agents(Saying(chat_model, lambda _: "one"))
    headers = {"Authorization": f"Bearer {AgentBench.token}"}

    async def wait(http: aiohttp.ClientSession) -> tuple[int, str]:
        async with http.post(f"{made.url}/v1/sessions", json={"wait_s": 60}, headers=headers) as said:
            return said.status, await said.text()

    async with asyncio.timeout(60), aiohttp.ClientSession() as http:
        waiting = asyncio.create_task(wait(http))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        made.sessions.stop()
        status, text = await waiting
        later, _ = await wait(http)

    assert (status, later) == (503, 503)
    assert "stopping" in text


@pytest.mark.parametrize(("stops", "status", "code"), [(True, 503, "stopping"), (False, 410, "session_over")])
async def test_who_waits_for_an_answer_is_told(
    agents: MakeAgentBench, chat_model: Path, stops: bool, status: int, code: str
) -> None:
    told: list[Any] = []
    asking: list[asyncio.Task[None]] = []

    async def ask(client: AgentClient) -> None:
        async with AsyncOpenAI(base_url=client.base_url, api_key=client.key, max_retries=0) as policy:
            try:
                await policy.chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}])
            except openai.APIStatusError as error:
                told.append((error.status_code, error.code))

    async def waits(task: Task, client: AgentClient) -> float:
        asking.append(asyncio.create_task(ask(client)))
        await asyncio.Event().wait()
        return 1.0

    made = await agents(Saying(chat_model, lambda _: "one"), run=waits)
    made.generators[0].hold = asyncio.Event()
    rolled = asyncio.create_task(made.finished(lease(environment="agent", group_size=1)))
    await eventually(lambda: bool(made.generators[0].requests))
    if stops:
        made.sessions.stop()
    rolled.cancel()
    async with asyncio.timeout(60):
        await asyncio.gather(rolled, *asking, return_exceptions=True)

    assert told == [(status, code)]
