"""Pauses between retries: doubling, with jitter."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """Doubling pauses with jitter, from `first_s` to at most `max_s` seconds."""

    first_s: float
    max_s: float
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    async def pause(self, failures: int) -> None:
        """Wait after the `failures`-th failure in a row, counted from 1."""
        await self.sleep(self.pause_s(failures))

    def pause_s(self, failures: int) -> float:
        """A pause after so many failures: between half and all of the nominal one."""
        return self.nominal_s(failures) * random.uniform(0.5, 1.0)

    def nominal_s(self, failures: int) -> float:
        """Twice as long each time, up to the longest, however long a counterpart is away."""
        return min(self.max_s, self.first_s * 2.0 ** min(failures - 1, 30))
