"""An agent on Anthropic's API, by its SDK: the user's own function, or the SDK's loop of tools with a shell."""

import asyncio

from anthropic import AsyncAnthropic, beta_async_tool
from driving import GivenTask, finish, shell


@beta_async_tool(name="shell")
async def run_shell(command: str) -> str:
    """Runs a command line on the task's computer and returns what it prints.

    Args:
        command: a command line for the shell
    """
    return await asyncio.to_thread(shell, command)


async def main() -> None:
    """Run it to its last message."""
    task = GivenTask()
    own = task.agent()
    # Address and key are in the variables that the SDK reads.
    async with AsyncAnthropic() as client:
        if own is not None:
            finish(await own(task.prompt, client))
            return
        running = client.beta.messages.tool_runner(
            model=task.model,
            max_tokens=int(task.settings.get("max_tokens", 4096)),
            messages=[{"role": "user", "content": task.prompt}],
            tools=[run_shell] if task.folder is not None else [],
            max_iterations=task.max_turns,
            thread=False,  # the conversation is sent whole each time: nothing is stored
            **({"system": task.instructions} if task.instructions else {}),
        )
        last = await running.until_done()
    finish(
        "".join(block.text for block in last.content if block.type == "text"),
        stop="turns_used" if last.stop_reason == "tool_use" else "finished",
    )


if __name__ == "__main__":
    asyncio.run(main())
