"""What the intake does while the journal's disk is full: says so now and then, and waits where it must."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from learner.history.journal import JournalFull
from services.waiting import Waiting

log = logging.getLogger(__name__)

_SAY_EVERY_S = 30.0
_RETRY_EVERY_S = 0.5


class DiskRoom:
    """`clock` is in seconds."""

    def __init__(self, *, waits: Waiting, clock: Callable[[], float]) -> None:
        self._waits = waits
        self._clock = clock
        self._said_at = float("-inf")

    def say(self, error: JournalFull) -> None:
        """A group could not be kept. Said at most twice a minute."""
        if self._clock() - self._said_at >= _SAY_EVERY_S:
            self._said_at = self._clock()
            log.error("%s. Groups are not acknowledged, and env_services send them again: make room", error.strerror)

    async def wait_for(self, write: Callable[[], None]) -> None:
        """Calls `write` in a thread until the disk takes it."""
        try:
            await asyncio.to_thread(write)
        except JournalFull as error:
            self.say(error)
            with self._waits.wait(f"room on the disk of {error.folder}"):
                await _until_written(write)


async def _until_written(write: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(_RETRY_EVERY_S)  # nobody tells when a disk has room again
        with contextlib.suppress(JournalFull):
            await asyncio.to_thread(write)
            return
