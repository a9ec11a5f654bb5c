"""An agent of openai-agents: the user's own one, or one that has the shell of the task's computer."""

import asyncio

from agents import Agent, MaxTurnsExceeded, OpenAIProvider, RunConfig, Runner, function_tool
from driving import GivenTask, finish, shell


@function_tool(name_override="shell")
def run_shell(command: str) -> str:
    """Runs a command line on the task's computer and returns what it prints.

    Args:
        command: a command line for the shell
    """
    return shell(command)


async def main() -> None:
    """Run it to its final output."""
    task = GivenTask()
    agent = task.agent() or Agent(
        name="agent", instructions=task.instructions or None, tools=[run_shell] if task.folder is not None else []
    )
    # Addresses and keys are in the variables that OpenAI's client reads.
    provider = OpenAIProvider(use_responses=bool(task.settings.get("responses", False)))
    config = RunConfig(model=task.model, model_provider=provider, tracing_disabled=True)
    try:
        ended = await Runner.run(agent, task.prompt, max_turns=task.max_turns, run_config=config)
    except MaxTurnsExceeded:
        finish("", stop="turns_used")
    else:
        finish(ended.final_output)


if __name__ == "__main__":
    asyncio.run(main())
