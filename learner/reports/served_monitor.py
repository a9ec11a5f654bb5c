"""The learner's look at itself and its generators while it serves training loops, and the verdict on them.

Like the look at a run, without its fleet: the generators are those of the settings.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from protocol.status import Status
from services.diagnosis.asked import AskedProcess, Condition, Target
from services.diagnosis.asking import ask
from services.diagnosis.culprits import diagnose
from services.diagnosis.verdict import RunVerdict, verdict_on

logger = logging.getLogger(__name__)
_EVERY_S = 3.0


class ServedMonitor:
    """Looks every few seconds. `own` is the learner's status at `url`. A verdict other than the last one holds, and is
    logged, once it was found twice in a row: a process of a busy machine may answer late.
    """

    def __init__(self, *, own: Callable[[], Status], url: str, generators: Sequence[Target]) -> None:
        self._own, self._url, self._generators = own, url, tuple(generators)
        self._found: RunVerdict | None = None
        self._failed = False
        self.verdict: RunVerdict | None = None
        """The one that holds, with its newest numbers."""
        self.procs: tuple[AskedProcess, ...] = ()

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            try:
                await self.look()
            except Exception as error:  # noqa: BLE001 - no server ends of being watched
                if not self._failed:
                    logger.warning("there is no verdict on this server: judging what it tells fails: %r", error)
                self._failed = True
            else:
                self._failed = False
            await asyncio.sleep(_EVERY_S)

    async def look(self) -> None:
        """Asks all of them, and judges."""
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(ask(target)) for target in self._generators]
        own = AskedProcess(Target(kind="learner", url=self._url), Condition.ANSWERS, status=self._own())
        self.procs = (own, *(task.result() for task in asked))
        found = verdict_on(self.procs, diagnose(self.procs))
        if found.is_like(self.verdict):
            self.verdict = found
        elif found.is_like(self._found) or self.verdict is None:
            self.verdict = found
            logger.log(logging.WARNING if found.state == "sick" else logging.INFO, "verdict: %s", found.text)
        self._found = found
