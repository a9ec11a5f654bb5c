"""Openings that are tried again: of environments and agents, whose server or host may be away.

open ─▶ opened
  ▲└─ nobody is there ─▶ a pause, until the rollout's time is over; its lease says that it waits for a host
  └── no place there ──▶ a pause, a few times; then it is for another env_service to try
"""

import logging
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import TypeVar

from env_service.environments.interface import EnvironmentFull, EnvironmentUnavailable
from env_service.rollouts.completions import RolloutProgress
from services.http.backoff import Backoff

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Openings:
    """Opens environments with patience. `attempts` is how often in a row one may have no place."""

    def __init__(self, *, attempts: int, backoff: Backoff) -> None:
        self._attempts = attempts
        self._backoff = backoff

    async def opened(self, open_it: Callable[[], Awaitable[T]], *, name: str, progress: RolloutProgress) -> T:
        """Returns what `open_it` returns, once it does not raise EnvironmentUnavailable. Whatever it had it lets go of
        before, or two leases that each hold half of what there is would wait for each other.

        Raises EnvironmentFull at the last attempt, and what else `open_it` raises.
        """
        tries = full = 0
        while True:
            try:
                # Once nobody was there, a later attempt that does not end is still a wait for the host, not the task's.
                with progress.waiting_for("host") if tries else nullcontext():
                    given = await open_it()
            except EnvironmentUnavailable as error:
                tries, full = tries + 1, full + 1 if isinstance(error, EnvironmentFull) else 0
                if full >= self._attempts:
                    raise
                logger.debug("environment %s is not available yet: %s", name, error)
                progress.said = str(error)
            else:
                progress.found()
                return given
            with progress.waiting_for("host"):
                await self._backoff.pause(tries)
