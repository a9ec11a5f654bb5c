"""Pauses between attempts."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """Doubling pauses with jitter, from `first_s` to at most `max_s` seconds."""

    first_s: float
    max_s: float
    sleep: Callable[[float], Awaitable[None]]

    async def pause(self, failures: int) -> None:
        """Wait after the `failures`-th failure in a row, counted from 1; between half and all of the nominal pause."""
        nominal = min(self.max_s, self.first_s * 2 ** min(failures - 1, 30))
        await self.sleep(nominal * random.uniform(0.5, 1.0))
