"""Sessions of clients: made, kept alive by heartbeats, finished. A dead one's models are parked, never removed."""

import secrets
import time
from collections.abc import Callable, Iterator

from learner.tenants.catalog import SessionEntry
from learner.tenants.operations import OperationLog
from learner.tenants.refusals import unknown
from protocol.tinker.bodies import CreateSession, FinishSession

DEAD_S = 600.0
"""Without a heartbeat a session counts as dead after it."""
_ID_BYTES = 16


class TenantSessions:
    """Sessions by name; names hold 128 random bits, and those of models and samplers begin with them.

    `clock` is in seconds, of any start.
    """

    def __init__(self, log: OperationLog, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        now = clock()
        self._beats = dict.fromkeys(log.catalog.sessions, now)

    async def create(self, owner: str, body: CreateSession) -> str:
        """The name of a new session. Raises OSError."""
        session_id = f"session-{secrets.token_hex(_ID_BYTES)}"
        entry = SessionEntry(
            owner=owner,
            session_id=session_id,
            created_at=time.time(),
            user_metadata=body.user_metadata,
            display_name=body.display_name,
        )
        await self._log.entry(entry)
        self._beats[session_id] = self._clock()
        return session_id

    def get(self, session_id: str, *, owner: str) -> SessionEntry:
        """The owner's session. Raises RequestRefused."""
        entry = self._log.catalog.sessions.get(session_id)
        if entry is None or entry.owner != owner:
            raise unknown("session", session_id)
        return entry

    def beat(self, session_id: str, *, owner: str) -> None:
        """Its client lives. Raises RequestRefused."""
        self.get(session_id, owner=owner)
        self._beats[session_id] = self._clock()

    async def finish(self, session_id: str, body: FinishSession, *, owner: str) -> None:
        """Its client is done. Raises RequestRefused, OSError."""
        entry = self.get(session_id, owner=owner)
        status = {"reason": body.status, "detail": body.detail}
        await self._log.entry(entry.model_copy(update={"finished": status}))

    def alive(self, session_id: str) -> bool:
        """A client of it was heard not long ago, and has not said that it is done."""
        entry = self._log.catalog.sessions.get(session_id)
        beat = self._beats.get(session_id)
        return entry is not None and not entry.finished and beat is not None and self._clock() - beat < DEAD_S

    def living(self) -> Iterator[SessionEntry]:
        """Sessions whose clients were heard not long ago."""
        return (entry for entry in self._log.catalog.sessions.values() if self.alive(entry.session_id))

    def title(self, session_id: str) -> str:
        """The name that its client has given it; empty without one."""
        entry = self._log.catalog.sessions.get(session_id)
        return "" if entry is None else entry.display_name or ""

    def silent_s(self, session_id: str) -> float:
        """Seconds since its last heartbeat."""
        return self._clock() - self._beats.get(session_id, 0.0)

    def dead(self) -> Iterator[str]:
        """Sessions whose clients are gone or done."""
        return (session_id for session_id in self._beats if not self.alive(session_id))
