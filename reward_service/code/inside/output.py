"""What the tests' process says: the standard output that it keeps, and lines to the service marked by a secret word."""

import io

from reward_service.code.inside.channel import Channel, Message
from reward_service.code.inside.plain import Json

_MOST = 1 << 16


class Printed(io.TextIOBase):
    """Keeps the first 65536 characters."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._size = 0

    def writable(self) -> bool:
        """It is there to be written to."""
        return True

    def write(self, text: str, /) -> int:
        """Keep as much of it as there is room for."""
        kept = text[: _MOST - self._size]
        if kept:
            self._parts.append(kept)
            self._size += len(kept)
        return len(text)

    def taken(self) -> str:
        """All that was printed since the last call."""
        text = "".join(self._parts)
        self._parts.clear()
        self._size = 0
        return text


_MAX_TEXT = 500


class Reporter:
    """Reports by the number of a case."""

    def __init__(self, *, channel: Channel, nonce: str) -> None:
        self._channel = channel
        self._prefix = f"R {nonce} ".encode()

    def collected(self, names: list[str]) -> None:
        """The cases by name, in order."""
        listed: list[Json] = list(names)
        self._send({"collected": listed})

    def begin(self, case: int) -> None:
        """A case runs from now on."""
        self._send({"begin": case})

    def end(self, case: int, *, passed: bool | None, error: str = "") -> None:
        """A case has ended; `passed` is None for one that is not to be counted."""
        self._send({"end": case, "passed": passed, "error": error[:_MAX_TEXT]})

    def broken(self, error: str, *, touched: bool) -> None:
        """The tests could not begin; `touched`: after code of the solution had been run."""
        self._send({"broken": error[:_MAX_TEXT], "touched": touched})

    def done(self) -> None:
        """There are no more cases."""
        self._send({"done": True})

    def _send(self, message: Message) -> None:
        self._channel.send(self._prefix, message)


def text_of(error: BaseException) -> str:
    """An exception in a line."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  its text may need the solution, which may be gone
        return type(error).__name__
