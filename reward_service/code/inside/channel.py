"""Lines of JSON between the two sides, over descriptors that nothing else in the process uses.

The tests' process keeps what it prints itself, and marks its lines to the service by a secret word.
"""

import io
import json
import os
from collections.abc import Callable
from typing import BinaryIO

from reward_service.code.inside.plain import Json, NotPlain

Message = dict[str, Json]
_MOST = 1 << 16
_MAX_TEXT = 500


class ChannelClosed(BaseException):
    """The other side has ended. No ordinary handler of an exception may catch it."""


class Channel:
    """Standard input and output, taken away from the process: it reads nothing, and what it prints goes nowhere."""

    def __init__(self, *, reader: BinaryIO, writer: BinaryIO) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    def take(cls) -> "Channel":
        """Move descriptors 0 and 1 to numbers that no child process inherits."""
        reader, writer = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        os.close(nothing)
        return cls(reader=reader, writer=writer)

    def send(self, prefix: bytes, message: Message) -> None:
        """Write one line. Raises Gone."""
        try:
            self._writer.write(prefix + json.dumps(message).encode() + b"\n")
            self._writer.flush()
        except OSError as error:
            raise ChannelClosed from error

    def receive(self) -> Message:
        """Wait for one line. Raises Gone at the end, NotPlain for what is no object."""
        line = self._reader.readline()
        if not line.endswith(b"\n"):
            raise ChannelClosed
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise NotPlain("the line is not JSON") from error
        if not isinstance(message, dict):
            raise NotPlain("the line is not an object")
        return message


class CallChannel:
    """Requests in both directions, one inside another like calls: who waits for an answer serves requests meanwhile."""

    def __init__(self, *, channel: Channel, prefix: bytes, serve: Callable[[Message], Message]) -> None:
        self._channel = channel
        self._prefix = prefix
        self._serve = serve

    def request(self, message: Message, *, prefix: bytes | None = None) -> Message:
        """The answer to a request. Raises Gone."""
        self._channel.send(prefix or self._prefix, {"ask": message})
        while True:
            answer = self.step()
            if answer is not None:
                return answer

    def step(self) -> Message | None:
        """Take one line: serve a request, or return an answer."""
        got = self._channel.receive()
        asked, answer = got.get("ask"), got.get("answer")
        if isinstance(asked, dict):
            self._channel.send(self._prefix, {"answer": self._serve(asked)})
            return None
        if not isinstance(answer, dict):
            raise NotPlain("neither a request nor an answer")
        return answer

    def serve_forever(self) -> None:
        """Serve requests until the other side ends."""
        while True:
            self.step()


class PrintedText(io.TextIOBase):
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
