"""`source = "agent"`: the user's own agent, a function, a program, or one that comes from outside.

options = { run = "my_agent:run" }               async def run(task, client) -> float
options = { command = ["python", "agent.py"] }   a process for each trajectory
options = {}                                     agents ask for tasks by POST /v1/sessions
"""

import asyncio

from pydantic import Field

from env_service.environments.interface import AgentClient, AgentResult, EnvironmentUnavailable, Task
from services.config.models import ConfigModel


class AgentOptions(ConfigModel):
    """Which agent, and its bounds."""

    claim_s: float = Field(600.0, gt=0, description="how long a task waits for an agent from outside, in seconds")


class AgentProgram:
    """An agent of one's own, which asks the policy through an address and a key."""

    def __init__(self, options: AgentOptions) -> None:
        self._options = options

    async def run(self, task: Task, client: AgentClient) -> AgentResult | float:
        """Let it run; what it is worth."""
        return await self._from_outside(client)

    async def _from_outside(self, client: AgentClient) -> AgentResult:
        try:
            async with asyncio.timeout(self._options.claim_s):
                await client.offer()
        except TimeoutError as error:
            raise EnvironmentUnavailable(f"no agent asked for the task in {self._options.claim_s:g} s") from error
        return await client.posted()
