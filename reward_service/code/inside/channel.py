"""Lines of JSON between the two sides, over descriptors that nothing else in the process uses."""

import json
import os
from collections.abc import Callable
from typing import BinaryIO

from reward_service.code.inside.plain import Json, NotPlain

Message = dict[str, Json]


class Gone(BaseException):
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
            raise Gone from error

    def receive(self) -> Message:
        """Wait for one line. Raises Gone at the end, NotPlain for what is no object."""
        line = self._reader.readline()
        if not line.endswith(b"\n"):
            raise Gone
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise NotPlain("the line is not JSON") from error
        if not isinstance(message, dict):
            raise NotPlain("the line is not an object")
        return message


class Conversation:
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
