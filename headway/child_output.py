"""The output of child processes, copied to this process's own output: whole lines, never blocking.

Nothing is lost to a reader that keeps up. One that stops (a pager, a terminal on hold) must not stop the processes:
what it leaves beyond a limit is left out, and counted where the lines go on.

A child that writes into a pipe cannot change the terminal's settings, and its lines do not mix with those of others.
"""

import os
import select
import time
from collections import deque
from collections.abc import Iterable
from typing import IO

_LONGEST_LINE = 64 << 10
_LARGEST_HOLD = 256 << 10
_LARGEST_QUEUE = 256 << 10
_LAST_LINES = 10
PATIENCE_S = 0.5
"""A reader that takes nothing for so long has stopped."""
_NEVER_BLOCKS = 4096  # bytes that a descriptor that is ready takes at once: POSIX's PIPE_BUF on Linux

# Escape sequences and other controls reach no terminal: a sampled text in a log may hold any of them.
_HARMLESS = bytes(byte if (byte >= 32 and byte != 127) or byte in b"\t\n\r" else ord("?") for byte in range(256))


class Sink:
    """A descriptor of this process that lines are written to. One that nobody reads any more swallows them."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._is_terminal = os.isatty(descriptor)
        self._queue = bytearray()
        self._left_out = 0
        self._took_at = time.monotonic()

    @property
    def has_queue(self) -> bool:
        """True if something waits to be written."""
        return bool(self._queue)

    @property
    def is_full(self) -> bool:
        """True if so much waits that sources are better not read: for a slow reader, not for one that has stopped."""
        return len(self._queue) > _LARGEST_QUEUE and time.monotonic() < self._took_at + PATIENCE_S

    def add(self, lines: bytes) -> None:
        """Queues lines, or counts them where so many wait that nobody seems to read."""
        if not self._queue:
            self._took_at = time.monotonic()
        if len(self._queue) > _LARGEST_QUEUE and not self.is_full:
            self._left_out += lines.count(b"\n")
            return
        self._say_what_is_missing()
        self._queue += lines.translate(_HARMLESS) if self._is_terminal else lines

    def write_some(self) -> None:
        """Writes what the descriptor, which select has found ready, takes without blocking; whole lines if it can."""
        size = self._queue.rfind(b"\n", 0, _NEVER_BLOCKS) + 1 or _NEVER_BLOCKS
        try:
            written = os.write(self.descriptor, self._queue[:size])
        except BlockingIOError:
            return
        except OSError:  # the reader has left, or the terminal is gone
            written = len(self._queue)
        self._took_at = time.monotonic()
        del self._queue[:written]
        if not self._queue:
            self._say_what_is_missing()

    def _say_what_is_missing(self) -> None:
        if self._left_out:
            self._queue += b"[%d lines are missing here: nobody read them]\n" % self._left_out
            self._left_out = 0

    def flush(self, *, deadline: float) -> None:
        """Writes all, or as much as is taken until `deadline` on the monotonic clock."""
        while self._queue and (left := deadline - time.monotonic()) > 0:
            if select.select([], [self.descriptor], [], left)[1]:
                self.write_some()


class Source:
    """The reading end of a pipe that a child writes to. While it is held, its lines wait."""

    def __init__(self, pipe: IO[bytes], sink: Sink, *, held: bool = False) -> None:
        self._pipe = pipe
        self.descriptor = pipe.fileno()
        os.set_blocking(self.descriptor, False)
        self.sink = sink
        self._line = b""
        self._held: bytearray | None = bytearray() if held else None
        self._last = deque[bytes](maxlen=_LAST_LINES)
        self.is_open = True

    @property
    def last_lines(self) -> list[str]:
        """The newest lines, the oldest of them first."""
        return [line.decode(errors="replace") for line in self._last]

    def read(self) -> bool:
        """Takes what is there; whether there may be more."""
        try:
            data = os.read(self.descriptor, _LONGEST_LINE)
        except BlockingIOError:
            return False
        if not data:
            self.is_open = False
            return False
        data = self._line + data
        size = data.rfind(b"\n") + 1 or (len(data) if len(data) >= _LONGEST_LINE else 0)
        self._line = data[size:]
        self._pass_on(data[:size])
        return True

    def drain(self) -> None:
        """Takes everything that has been written so far."""
        while self.is_open and self.read():
            pass

    def hold(self) -> None:
        """Keeps the lines from here on, until there are too many to be kept."""
        self._held = bytearray()

    def close(self, *, discard: bool = False) -> None:
        """Takes the rest, and lets all that is held go, or drops it."""
        self.drain()
        self._pass_on(self._line + b"\n" if self._line else b"")
        self._line = b""
        if discard and self._held is not None:
            self._held.clear()
        self._release()
        self.is_open = False
        self._pipe.close()

    def _pass_on(self, lines: bytes) -> None:
        self._last.extend(lines.splitlines()[-_LAST_LINES:])
        if self._held is None:
            self.sink.add(lines)
            return
        self._held += lines
        if len(self._held) > _LARGEST_HOLD:
            self._release()

    def _release(self) -> None:
        if self._held is not None:
            self.sink.add(bytes(self._held))
            self._held = None


def turn(sources: Iterable[Source], sinks: Iterable[Sink], *, wake: int, timeout_s: float | None) -> None:
    """Waits for output, for something to read from `wake`, or for the time; then copies what there is."""
    readers = {one.descriptor: one for one in sources if one.is_open and not one.sink.is_full}
    writers = {one.descriptor: one for one in sinks if one.has_queue}
    if any(one.is_full for one in writers.values()):
        timeout_s = PATIENCE_S if timeout_s is None else min(timeout_s, PATIENCE_S)
    ready, writable, _ = select.select([wake, *readers], list(writers), [], timeout_s)
    for descriptor in ready:
        if descriptor in readers:
            readers[descriptor].read()
    for descriptor in writable:
        writers[descriptor].write_some()
