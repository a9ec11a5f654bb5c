"""Watches the requests by which a learner moves weights into a generator, and springs traps at chosen ones.

    learner ──POST /v1/weights/{group,prepare,pull,commit}──▶ link ──▶ generator

A trap springs `on` a request, before the generator sees it, or in the `middle` of one: some time after it was passed
on, and only while it is unanswered.
"""

import asyncio
import contextlib
import re
import statistics
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Literal

from tests.chaos.network import LinkConnection, LinkWatcher

CONTROL, TRAFFIC = "control", "traffic"
_REQUEST = re.compile(rb"(?:GET|POST) (/[^ ]*) HTTP/1\.[01]\r\n")
_CONTROL_PATHS = ("/v1/weights/", "/v1/state")
Moment = Literal["on", "middle"]


@dataclass
class Trap:
    """Calls `action` once, at the `skip`-th request from now of `path`."""

    path: str
    moment: Moment
    action: Callable[[], None]
    skip: int = 0
    after_s: float | None = None
    sprung_at: float | None = None
    sprung: threading.Event = field(default_factory=threading.Event)

    def spring(self) -> None:
        self.sprung_at = time.monotonic()
        self.action()
        self.sprung.set()


@dataclass
class ControlWatch(LinkWatcher):
    """The requests of one generator's control plane, by path, with the times that earlier ones took."""

    traps: list[Trap] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    took_s: dict[str, list[float]] = field(default_factory=dict)
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    def trap(
        self, path: str, moment: Moment, action: Callable[[], None], *, skip: int = 0, after_s: float | None = None
    ) -> Trap:
        """Sets a trap; `after_s` is how far into the request, half of what it usually takes if left out."""
        trap = Trap(path=f"/v1/weights/{path}", moment=moment, action=action, skip=skip, after_s=after_s)
        self.traps.append(trap)
        return trap

    def kind_of(self, data: bytes) -> str:
        found = _REQUEST.match(data)
        return CONTROL if found and found[1].decode().startswith(_CONTROL_PATHS) else TRAFFIC

    async def before(self, connection: LinkConnection, data: bytes) -> None:
        if path := _path(connection, data):
            self.seen.append(path)
            for trap in self._due(path, "on"):
                trap.spring()

    async def after(self, connection: LinkConnection, data: bytes) -> None:
        path = _path(connection, data)
        if not path:
            return
        self._spawn(self._time(connection, path))
        for trap in self._due(path, "middle"):
            self._spawn(self._spring_in_the_middle(trap, connection))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _spring_in_the_middle(self, trap: Trap, connection: LinkConnection) -> None:
        usual_s = statistics.median(self.took_s.get(trap.path, [0.0])[-20:])
        await asyncio.sleep(usual_s / 2 if trap.after_s is None else trap.after_s)
        if connection.answered.is_set():
            self.traps.append(trap)  # too late: the next one
        else:
            trap.spring()

    async def _time(self, connection: LinkConnection, path: str) -> None:
        began = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60):
                await connection.answered.wait()
        self.took_s.setdefault(path, []).append(time.monotonic() - began)

    def _due(self, path: str, moment: Moment) -> list[Trap]:
        due = []
        for trap in [trap for trap in self.traps if (trap.path, trap.moment) == (path, moment)]:
            if trap.skip > 0:
                trap.skip -= 1
            else:
                self.traps.remove(trap)
                due.append(trap)
        return due


def _path(connection: LinkConnection, data: bytes) -> str:
    found = _REQUEST.match(data) if connection.kind == CONTROL else None
    return found[1].decode() if found else ""
