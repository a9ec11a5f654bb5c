"""Sessions of clients: made, kept alive by heartbeats, finished. A dead one's models are parked, never removed."""

import asyncio
import hashlib
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from learner.tenants.catalog import SessionEntry
from learner.tenants.operations import OperationLog
from learner.tenants.refusals import QueueFull, unknown
from protocol.tinker.bodies import CreateSession, FinishSession

MAX_LIVING, MAX_EMPTY = 16_384, 1024
"""Sessions of a tenant that live, at the last sweep, and that are dead and never held anything."""
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
        self._living: Counter[str] = Counter()

    async def create(self, owner: str, body: CreateSession) -> str:
        """The name of a new session. Raises RequestRefused where too many live, OSError."""
        if self._living[owner] > MAX_LIVING:
            raise QueueFull(f"{self._living[owner]} sessions of yours are open, more than may be at once; finish some")
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

    async def of_request(self, owner: str, key: str) -> SessionEntry:
        """The session of its own that a request has, by the `key` that all of its tries have. Raises OSError."""
        digest = hashlib.sha256(f"{owner}\n{key}".encode()).hexdigest()
        session_id = f"session-{digest[: 2 * _ID_BYTES]}"
        if session_id not in self._log.catalog.sessions:
            await self._log.entry(SessionEntry(owner=owner, session_id=session_id, created_at=time.time()))
        return self._log.catalog.sessions[session_id]

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

    async def tidy(self) -> None:
        """Count those that live, and drop the first of too many dead ones that hold nothing. Raises OSError."""
        self._living = Counter(entry.owner for entry in self.living())
        used, empty = self._log.catalog.sessions_in_use(), defaultdict[str, list[SessionEntry]](list)
        for session_id in self.dead():
            if session_id not in used:
                entry = self._log.catalog.sessions[session_id]
                empty[entry.owner].append(entry)
        await asyncio.gather(*(self._drop(entry) for entries in empty.values() for entry in entries[:-MAX_EMPTY]))

    async def _drop(self, entry: SessionEntry) -> None:
        await self._log.entry(entry.model_copy(update={"dropped": True}))
        del self._beats[entry.session_id]

    def silent_s(self, session_id: str) -> float:
        """Seconds since its last heartbeat."""
        return self._clock() - self._beats.get(session_id, 0.0)

    def dead(self) -> Iterator[str]:
        """Sessions whose clients are gone or done."""
        return (session_id for session_id in self._beats if not self.alive(session_id))
