"""The load of a process over the last seconds, for its status: looked at once a second, summed over a window."""

import asyncio
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from protocol.status import GpuStatus, LoadStatus, UsageStatus, WaitingItems
from services.cores import usable_cores
from services.gpus import GpuWatch
from services.local_processes import proportional_memory_of, usage_of

WINDOW_S = 10.0
"""Long enough for a mean over uneven work, short enough to say soon what has changed."""
LONG_S = 60.0
_LEAST_LONG_S = 18.0
_EVERY_S = 1.0
_SHORTEST_S = 3.0
_USAGE_EVERY = 5
_MEMORY_EVERY_S = 30.0


@dataclass(frozen=True)
class LoadSample:
    """A look at a process: `done` and `idle_s` count since its start, `running` items are at hand now.

    Without `idle_s` the process counts as idle from one look to the next if nothing was at hand at the latter.
    """

    done: float
    running: float
    idle_s: float | None = None
    waits: Mapping[str, int] = field(default_factory=dict)


def _unheard(gpus: Sequence[GpuStatus]) -> None:
    pass


class LoadWindow:
    """Samples of the last `WINDOW_S` seconds. `limit` is the number of places for items; `clock` is in seconds."""

    def __init__(
        self,
        look: Callable[[], LoadSample],
        *,
        limit: Callable[[], int | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look = look
        self._limit = limit
        self._clock = clock
        self._seen: deque[tuple[float, LoadSample]] = deque()
        self._long: deque[tuple[float, LoadSample]] = deque()
        self._measured: tuple[float, float] | None = None
        self._usage: UsageStatus | None = None
        self._asked = True
        self._memory: tuple[float, int] | None = None

    @property
    def usage(self) -> UsageStatus | None:
        """Use of this machine by this process and its children, over the last seconds."""
        self._asked = True
        return self._usage

    async def run(self, *, gpus: Callable[[Sequence[GpuStatus]], None] = _unheard) -> None:
        """Looks once a second until cancelled, and more rarely at what the machine gives. `gpus` is told each time
        which GPUs this process and its children hold.
        """
        watch = GpuWatch()
        for number in itertools.count():
            self.sample()
            if number % _USAGE_EVERY == 0:
                (cpu_s, resident), held = await asyncio.to_thread(
                    lambda: (usage_of(os.getpid()), watch.look(os.getpid()))
                )
                gpus(held)
                self._measure(cpu_s, await self._memory_bytes(resident), gpus=held)
            await asyncio.sleep(_EVERY_S)

    async def _memory_bytes(self, resident: int) -> int:
        """Memory with shared pages counted once, which costs the kernel a walk through all of them: so it is looked at
        every half minute at most, and only if somebody has asked since. After a minute without it is `resident`.
        """
        if self._asked and (self._memory is None or self._clock() - self._memory[0] >= _MEMORY_EVERY_S):
            self._asked = False
            self._memory = self._clock(), await asyncio.to_thread(proportional_memory_of, os.getpid())
        if self._memory is None or self._clock() - self._memory[0] > LONG_S:
            return resident
        return self._memory[1]

    def _measure(self, cpu_s: float, memory_bytes: int, *, gpus: tuple[GpuStatus, ...] = ()) -> None:
        now = self._clock()
        if self._measured is not None and now > self._measured[0]:
            since, before_s = self._measured
            cores = max(0.0, (cpu_s - before_s) / (now - since))  # children that ended take their seconds with them
            self._usage = UsageStatus(
                cores=cores, usable_cores=usable_cores(), cpu_s=cpu_s, memory_bytes=memory_bytes, gpus=gpus
            )
        self._measured = now, cpu_s

    def restart(self) -> None:
        """Forgets what was seen: from here on it is another kind of work."""
        self._seen.clear()
        self._long.clear()

    def sample(self) -> None:
        """Looks now, and forgets what is older than the window."""
        now = self._clock()
        self._seen.append((now, self._look()))
        while now - self._seen[0][0] > WINDOW_S:
            self._seen.popleft()
        self._long.append(self._seen[-1])
        while now - self._long[0][0] > LONG_S:
            self._long.popleft()

    def status(self) -> LoadStatus | None:
        """The means of the window; None until it is of some seconds."""
        if not self._seen or (over_s := self._seen[-1][0] - self._seen[0][0]) < _SHORTEST_S:
            return None
        first, last = self._seen[0][1], self._seen[-1][1]
        later = [sample for _, sample in self._seen][1:]
        names = sorted({name for sample in later for name in sample.waits})
        return LoadStatus(
            over_s=over_s,
            busy_share=_busy_share(self._seen),
            long_busy_share=_busy_share(self._long) if self._long[-1][0] - self._long[0][0] >= _LEAST_LONG_S else None,
            per_s=max(0.0, (last.done - first.done) / over_s),
            running=sum(sample.running for sample in later) / len(later),
            limit=self._limit(),
            waits=tuple(
                WaitingItems(whom=name, running=sum(one.waits.get(name, 0) for one in later) / len(later))
                for name in names
            ),
        )


def _busy_share(seen: Sequence[tuple[float, LoadSample]]) -> float:
    (began, first), (end, last) = seen[0], seen[-1]
    if first.idle_s is not None and last.idle_s is not None:
        idle_s = last.idle_s - first.idle_s
    else:
        idle_s = sum(now - at for (at, _), (now, sample) in itertools.pairwise(seen) if not sample.running)
    return min(1.0, max(0.0, 1 - idle_s / (end - began)))
