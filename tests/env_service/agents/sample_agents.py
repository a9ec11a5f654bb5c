"""Agents of a user's, as functions."""

import asyncio
import time

from openai import AsyncOpenAI

from env_service.environments.interface import AgentClient, AgentResult, Task


async def asks(task: Task, client: AgentClient) -> AgentResult:
    async with AsyncOpenAI(base_url=client.base_url, api_key=client.key) as policy:
        said = await policy.chat.completions.create(
            model=client.model, messages=[{"role": "user", "content": str(task.data.get("question", "go"))}]
        )
    return AgentResult(reward=1.0, stop=said.choices[0].message.content or "")


async def blocks(task: Task, client: AgentClient) -> float:
    await asks(task, client)
    time.sleep(3)  # noqa: ASYNC251 - a function that holds its thread is what is tested
    return 1.0


async def never_ends(task: Task, client: AgentClient) -> float:
    await asks(task, client)
    await asyncio.Event().wait()
    return 1.0


async def raises(task: Task, client: AgentClient) -> float:
    await asks(task, client)
    raise KeyError("a bug of mine")


def not_async(task: Task, client: AgentClient) -> float:
    return 1.0
