"""A solution's process that answers: its greeting, and one request at a time."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from reward_service.code.harness.exchange import Message
from reward_service.code.processes import Harness
from reward_service.code.solution import Solution
from reward_service.sandbox.program import Running, Sandbox


class SolutionEnded(Exception):
    """The solution's process has ended, or has broken the exchange."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """The process, and what it said when it had loaded the solution."""

    running: Running

    async def names(self, *, deadline: float) -> list[str]:
        """The names that the solution defines. Raises SolutionEnded if it cannot be loaded, TimeoutError."""
        greeting = parsed(await self.line(deadline=deadline))
        names = greeting.get("ready")
        if not isinstance(names, list):
            raise SolutionEnded(str(greeting.get("failed", "it did not load")))
        return [name for name in names if isinstance(name, str)]

    async def line(self, *, deadline: float) -> bytes:
        """The next line. Raises SolutionEnded, TimeoutError, InfrastructureError if it is the sandbox that has died."""
        line = await self.running.readline(deadline=deadline)
        if not line:
            async with asyncio.timeout_at(deadline):
                await self.running.ended()
        if not line.endswith(b"\n"):
            raise SolutionEnded("it ended, or wrote a line without end")
        return line

    async def send(self, line: bytes, *, deadline: float) -> None:
        """Raises TimeoutError if it does not read."""
        await self.running.write(line, deadline=deadline)


@asynccontextmanager
async def open_solution(
    *, sandbox: Sandbox, solution: Solution, harness: Harness, seconds: float
) -> AsyncIterator[Served]:
    """Start the solution's process, whose cases have `seconds`; leaving kills it."""
    async with sandbox.open(solution.served(harness, seconds=seconds)) as running:
        yield Served(running=running)


def parsed(line: bytes) -> Message:
    """A line as an object. Raises SolutionEnded for anything else."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SolutionEnded("it wrote a line that is not JSON") from error
    if not isinstance(message, dict):
        raise SolutionEnded("it wrote a line that is no object")
    return message
