"""What an HTTP client knows about its counterparts from its own calls."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

_MOST = 8192


@dataclass(frozen=True)
class Contact:
    """How calls to one counterpart went; `origin` is scheme://host:port.

    `last_answer_s` is how many seconds ago it last said anything, a refusal included; None if it never did.
    """

    origin: str
    last_answer_s: float | None
    failures_in_row: int
    last_failure: str | None

    @property
    def state(self) -> str:
        """In a few words."""
        if not self.failures_in_row:
            return "answers"
        times = "1 call" if self.failures_in_row == 1 else f"{self.failures_in_row} calls"
        return f"{times} in a row failed: {self.last_failure}"


@dataclass
class _Calls:
    last_answer: float | None = None
    failures_in_row: int = 0
    last_failure: str | None = None


class Contacts:
    """Counterparts by origin; of too many, the one not called for longest is forgotten. `clock` is in seconds."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._calls: dict[str, _Calls] = {}

    def answered(self, url: str) -> None:
        """A call was answered, be it with a refusal."""
        calls = self._of(url)
        calls.last_answer, calls.failures_in_row = self._clock(), 0

    def failed(self, url: str, *, why: str, heard: bool) -> None:
        """A call failed; `heard` tells whether the counterpart said so itself."""
        calls = self._of(url)
        calls.failures_in_row += 1
        calls.last_failure = why[:300]
        if heard:
            calls.last_answer = self._clock()

    def all(self) -> tuple[Contact, ...]:
        """Those that were called, the most recent last."""
        now = self._clock()
        return tuple(
            Contact(
                origin=origin,
                last_answer_s=None if calls.last_answer is None else now - calls.last_answer,
                failures_in_row=calls.failures_in_row,
                last_failure=calls.last_failure,
            )
            for origin, calls in self._calls.items()
        )

    def _of(self, url: str) -> _Calls:
        parts = urlsplit(url)
        origin = f"{parts.scheme}://{parts.netloc}"
        calls = self._calls[origin] = self._calls.pop(origin, _Calls())
        if len(self._calls) > _MOST:
            del self._calls[next(iter(self._calls))]
        return calls
