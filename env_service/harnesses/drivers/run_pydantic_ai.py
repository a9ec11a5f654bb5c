"""An agent of pydantic-ai: the user's own one, or one that has the shell of the task's computer."""

import asyncio

from driving import GivenTask, finish, shell
from pydantic_ai import Agent, Tool
from pydantic_ai.exceptions import UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.usage import UsageLimits


def run_shell(command: str) -> str:
    """Runs a command line on the task's computer and returns what it prints."""
    return shell(command)


async def main() -> None:
    """Run it to its output."""
    task = GivenTask()
    tools = [Tool(run_shell, name="shell")] if task.folder is not None else []
    agent = task.agent() or Agent(instructions=task.instructions or None, tools=tools)
    # Addresses and keys are in the variables that OpenAI's client reads.
    kind = OpenAIResponsesModel if task.settings.get("responses", False) else OpenAIChatModel
    try:
        ended = await agent.run(
            task.prompt, model=kind(task.model), usage_limits=UsageLimits(request_limit=task.max_turns)
        )
    except UsageLimitExceeded:
        finish("", stop="turns_used")
    else:
        finish(ended.output)


if __name__ == "__main__":
    asyncio.run(main())
