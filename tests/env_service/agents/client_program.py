# mypy: ignore-errors
"""An agent that is written with somebody else's framework, in a virtual environment of its own.

It adds two numbers by a tool and says the sum. Its arguments are the framework, the API, and whether it streams. What
it imports is not installed where its types could be checked.
"""

import asyncio
import json
import os
import sys

TASK = json.loads(sys.stdin.readline())
QUESTION = f"What is the number of {TASK['data']['question']}?"


async def openai_agents(*, responses: bool, streamed: bool) -> str:
    """With the package openai-agents."""
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)

    @function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    kind = OpenAIResponsesModel if responses else OpenAIChatCompletionsModel
    agent = Agent(
        name="adder", instructions="Add.", tools=[add], model=kind(model="policy", openai_client=AsyncOpenAI())
    )
    if streamed:
        running = Runner.run_streamed(agent, QUESTION)
        async for _ in running.stream_events():
            pass
        return str(running.final_output)
    return str((await Runner.run(agent, QUESTION)).final_output)


async def pydantic_ai(*, responses: bool, streamed: bool) -> str:
    """With the package pydantic-ai."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

    agent = Agent((OpenAIResponsesModel if responses else OpenAIChatModel)("policy"), instructions="Add.")

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    if streamed:
        async with agent.run_stream(QUESTION) as running:
            return str(await running.get_output())
    return str((await agent.run(QUESTION)).output)


async def main(framework: str, api: str, how: str) -> None:
    """Run three at once, and give a reward if all came to the right end."""
    run = {"openai_agents": openai_agents, "pydantic_ai": pydantic_ai}[framework]
    answers = await asyncio.gather(*(run(responses=api == "responses", streamed=how == "streamed") for _ in range(3)))
    assert all(answer == "It is 5." for answer in answers), answers
    assert os.environ["OPENAI_API_KEY"]
    print(1.0)


asyncio.run(main(*sys.argv[1:]))
