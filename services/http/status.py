"""The route `GET /v1/status`: what every process says about itself, and what its own provider adds."""

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from fastapi import FastAPI, Response

from protocol.model import PROTOCOL_VERSION
from protocol.status import FailureStatus, Kind, PeerStatus, Report, Status
from services.http.bodies import json_answer
from services.http.client import Contact
from services.http.waiting import Waiting

_KEPT = 8
_LINES = 20
_MAX_LINE = 300
_MAX_TEXT = 2000

Provider = Callable[[], Report]
"""Reads what the process holds in memory: it must not wait, and is called in the event loop."""


@dataclass(frozen=True)
class _SeenFailure:
    text: str
    when: float


class RecentFailures(logging.Handler):
    """The last few warnings and errors that were logged, and the last lines of all. May be used from any thread."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(level=logging.INFO)
        self._clock = clock
        self._seen: deque[_SeenFailure] = deque(maxlen=_KEPT)
        self._lines: deque[str] = deque(maxlen=_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        """Notes a record."""
        try:
            text = record.getMessage().encode(errors="replace").decode()  # no answer can hold half a character
        except Exception:  # noqa: BLE001 - a record that cannot be formatted ends nothing
            self.handleError(record)
            return
        severity = f"{record.levelname} " if record.levelno >= logging.WARNING else ""
        line = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {severity}{' '.join(text.split())}"
        self._lines.append(line[:_MAX_LINE])
        if record.levelno >= logging.WARNING:
            self._seen.append(_SeenFailure(text=text[:_MAX_TEXT], when=self._clock()))

    def lines(self) -> tuple[str, ...]:
        """The last lines of the log, the newest last, with the clock of this machine."""
        return tuple(self._lines)

    def newest_first(self) -> tuple[FailureStatus, ...]:
        """The failures with their ages."""
        now = self._clock()
        return tuple(FailureStatus(text=one.text, age_s=max(0.0, now - one.when)) for one in reversed(self._seen))


@contextmanager
def recent_failures() -> Iterator[RecentFailures]:
    """Within it, warnings and errors of the whole process are noted."""
    failures, root = RecentFailures(), logging.getLogger()
    root.addHandler(failures)
    try:
        yield failures
    finally:
        root.removeHandler(failures)


def add_status_route(
    app: FastAPI,
    *,
    service: Kind,
    version: str,
    waits: Waiting,
    failures: RecentFailures,
    stopping: Callable[[], bool],
    provider: Provider,
) -> Callable[[], Status]:
    """Adds `GET /v1/status`; returns what makes its answer."""
    began = time.monotonic()

    def tell() -> Status:
        report = provider()
        return Status(
            **{name: getattr(report, name) for name in Report.model_fields},
            service=service,
            version=version,
            protocol_version=PROTOCOL_VERSION,
            pid=os.getpid(),
            host=socket.gethostname(),
            uptime_s=time.monotonic() - began,
            stopping=stopping(),
            waits=waits.status(),
            failures=failures.newest_first(),
            log=failures.lines(),
        )

    @app.get("/v1/status", responses={200: {"model": Status}})
    async def status() -> Response:
        """Load, peers, queues, versions, waits and recent failures; `headway doctor` reads it."""
        return json_answer(tell())

    return tell


def peers_at(urls: Sequence[str], contacts: Sequence[Contact], *, kind: Kind) -> tuple[PeerStatus, ...]:
    """The peers at these addresses, as an HTTP client has found them."""
    known = {contact.origin: contact for contact in contacts}
    return tuple(
        PeerStatus(
            name=url,
            kind=kind,
            url=url,
            last_heard_s=None if (contact := known.get(url.rstrip("/"))) is None else contact.last_answer_s,
            state="not called yet" if contact is None else contact.state,
        )
        for url in urls
    )
