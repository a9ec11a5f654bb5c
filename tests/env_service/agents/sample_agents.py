"""Agents of a user's, as functions."""

import asyncio
import sys
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


async def cancels(task: Task, client: AgentClient) -> float:
    await asks(task, client)
    tool = asyncio.create_task(asyncio.sleep(60))
    tool.cancel()
    await tool
    return 1.0


async def cancels_itself(task: Task, client: AgentClient) -> float:
    await asks(task, client)
    own = asyncio.current_task()
    assert own is not None
    own.cancel()
    await asyncio.sleep(60)
    return 1.0


async def quits(task: Task, client: AgentClient) -> float:
    await asks(task, client)
    sys.exit("I quit")


def not_async(task: Task, client: AgentClient) -> float:
    return 1.0
