"""Futures: the results of requests, by the name of the request, kept until their client has had them for a while."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field

from pydantic import JsonValue

Payload = bytes | dict[str, JsonValue]
"""Protobuf, or a JSON object."""
_KEEP_S = 600.0
"""After it was retrieved: the answer may have been lost on its way."""
_FUTURE_BYTES = 1 << 10
"""Of a result beside its protobuf."""
INLINE_BYTES = 1 << 20
"""A larger result is announced first, if its client allows that, so that it can make room."""


class RequestReused(ValueError):
    """Another request came under the name of a former one."""


@dataclass(eq=False)
class ResultFuture:
    """The result of a request of `owner`; `payload` is set once. `digest` knows the request's own retries.

    `given_up`: it was not done for want of one before it, and is a new one if it is sent again.
    """

    request_id: str
    owner: str
    digest: str
    kind: str
    done: asyncio.Event = field(default_factory=asyncio.Event)
    payload: Payload | None = None
    retrieved_at: float | None = None
    given_up: bool = False

    def finish(self, payload: Payload) -> None:
        """Set the result; a second one is ignored."""
        if self.payload is None:
            self.payload = payload
            self.done.set()


class ResultFutures:
    """All futures of this life. `clock` is in seconds."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._futures: dict[str, ResultFuture] = {}
        self._unfetched: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._futures)

    def open(self, request_id: str, *, owner: str, digest: str, kind: str) -> tuple[ResultFuture, bool]:
        """The future of the name, and if it is new. Raises RequestReused for another request under a known name."""
        known = self._futures.get(request_id)
        if known is None:
            known = self._futures[request_id] = ResultFuture(request_id, owner, digest, kind)
            return known, True
        if known.digest != digest:
            raise RequestReused(
                f"{request_id} was another request before, a {known.kind}; a {kind} needs the next seq_id"
                if known.kind != kind
                else f"{request_id} was a {known.kind} with another content before; send the same again, or count up"
            )
        return known, False

    def get(self, request_id: str, *, owner: str) -> ResultFuture | None:
        """The future, if there is one of this owner."""
        future = self._futures.get(request_id)
        return None if future is None or future.owner != owner else future

    def retrieved(self, future: ResultFuture) -> None:
        """Its client was sent the result."""
        future.retrieved_at = self._clock()

    def forget(self, request_id: str) -> None:
        """Drop a future, with its result."""
        self._futures.pop(request_id, None)

    def forget_results(self, sessions: Set[str], *, owner: str | None = None) -> None:
        """Drop all results of requests of these sessions, whose names begin with theirs; of one owner, if given."""
        for name, future in list(self._futures.items()):
            if owner in (None, future.owner) and future.payload is not None and name.partition(":")[0] in sessions:
                del self._futures[name]

    def results(self, prefix: str) -> Iterator[ResultFuture]:
        """Futures whose names begin so, and that have a result."""
        return (
            future for name, future in self._futures.items() if name.startswith(prefix) and future.payload is not None
        )

    def unfetched_bytes(self, owner: str) -> int:
        """The size of the owner's results that nobody had retrieved at the last sweep."""
        return self._unfetched[owner]

    def sweep(self) -> None:
        """Drop what was retrieved long ago, and count what never was."""
        old = self._clock() - _KEEP_S
        self._unfetched.clear()
        for name, future in list(self._futures.items()):
            if future.retrieved_at is not None and future.retrieved_at < old:
                del self._futures[name]
            elif future.retrieved_at is None and future.payload is not None:
                self._unfetched[future.owner] += _FUTURE_BYTES
                self._unfetched[future.owner] += len(future.payload) if isinstance(future.payload, bytes) else 0
