"""The output of child processes, copied to this process's own output: whole lines, never blocking.

Nothing is lost to a reader that keeps up. One that stops (a pager, a terminal on hold) must not stop the processes:
what it leaves beyond a limit is left out, and counted where the lines go on.

A child that writes into a pipe cannot change the terminal's settings, and its lines do not mix with those of others.

In a terminal a bar may stand below the lines: it makes room before each of them, and comes back after them.
"""

import contextlib
import json
import logging
import os
import select
import shutil
import statistics
import sys
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import IO, Any, Self

from learner.reports.growing import FileRestarted, Mark, lines_after
from services.durations import clock_text
from services.standard_output import harmless

_MAX_LINE = 64 << 10
_MAX_HOLD = 256 << 10
_MAX_QUEUE = 256 << 10
_LAST_LINES, _MAX_LAST_LINE = 10, 2000
PATIENCE_S = 0.5
"""A reader that takes nothing for so long has stopped."""
_NEVER_BLOCKS = 4096  # bytes that a descriptor that is ready takes at once: POSIX's PIPE_BUF on Linux

# Escape sequences and other controls reach no terminal: a sampled text in a log may hold any of them.
_HARMLESS = bytes(byte if (byte >= 32 and byte != 127) or byte in b"\t\n\r" else ord("?") for byte in range(256))
_STEPS_MEANT = 20
_SHOWN = (("reward", "reward_mean", ".3f"), ("lag", "lag_mean", ".1f"), ("loss", "loss", ".4g"))
_BAR_EVERY_S = 1.0
_ERASE = b"\r\x1b[K"
_ECHO = 3  # cells that stay free for the `^C` that a terminal shows
_MAX_BAR, _SHORTEST_BAR = 40, 8


class RunProgress:
    """Progress of a run, read from its `metrics.jsonl` as this grows: step, mean reward, mean lag, time left.

    `total` is the number of its steps, None where nobody knows it. What the file holds at the start is of former lives.
    """

    def __init__(self, path: Path, *, total: int | None) -> None:
        self._path = path
        self.total = total
        self.step: int | None = None
        self.values: dict[str, float] = {}
        self._seconds = deque[float](maxlen=_STEPS_MEANT)
        self._is_first = True
        self._step_at = self._began = time.monotonic()
        self._mark = Mark.at_end_of(path)

    def look(self) -> None:
        """Reads what has been added, at most a part of a long file. A file that is another one is read anew."""
        try:
            lines, self._mark = lines_after(self._path, self._mark)
        except FileRestarted:
            lines, self._mark = [], Mark()
        except OSError:
            lines = []
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                self._take(json.loads(line))

    def words(self) -> list[str]:
        """The known facts in words, what matters most first."""
        now = time.monotonic()
        if self.step is None:
            return ["no step yet", clock_text(now - self._began)]
        words = [f"step {self.step}" if self.total is None else f"step {self.step}/{self.total}"]
        if self.total is not None and self._seconds:
            left = (self.total - self.step) * statistics.fmean(self._seconds) - (now - self._step_at)
            words.append(f"{clock_text(max(0.0, left))} left")
        words += [f"{label} {self.values[name]:{form}}" for label, name, form in _SHOWN if name in self.values]
        return words

    def _take(self, entry: Mapping[str, Any]) -> None:
        if entry["kind"] == "resume":
            self.step, self._is_first = int(entry["version"]), True
        if entry["kind"] not in ("step", "replay"):
            return
        self.step, self._step_at = int(entry["step"]), time.monotonic()
        given = [name for _, name, _ in _SHOWN if isinstance(entry.get(name), int | float)]
        rewarded = "reward_mean" in given  # then the loss says little
        self.values = {name: float(entry[name]) for name in given if name != "loss" or not rewarded}
        if entry["kind"] == "step":  # the first one of a life has waited for the start of the others
            if not self._is_first:
                self._seconds.append(sum(float(entry[name]) for name in ("wait_s", "train_s", "copy_s")))
            self._is_first = False


class Bar:
    """The last line of a terminal, drawn anew each second and after other lines; a context manager.

    It is narrower than the terminal, so that what is typed does not break it in two. Log lines of this process, too,
    come above it. Nothing of it stays when it is closed. A terminal that takes nothing is not waited for.
    """

    def __init__(self, progress: RunProgress, *, descriptor: int = 1) -> None:
        self._progress = progress
        self._descriptor = descriptor
        self._is_shown = False
        self._drawn_at = -_BAR_EVERY_S
        self._has_colour = not os.environ.get("NO_COLOR")
        encoding = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "")
        self._done, self._rest = ("━", "─") if encoding == "utf8" else ("#", "-")

    @classmethod
    def where_possible(cls, progress: RunProgress) -> Self | None:
        """None where standard output is no terminal, or one that moves no cursor."""
        can = os.isatty(1) and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")
        return cls(progress) if can else None

    def __enter__(self) -> Self:
        self._handlers = tuple(logging.getLogger().handlers)
        for handler in self._handlers:
            handler.addFilter(self._before_log)
        return self

    def __exit__(self, *_: object) -> None:
        for handler in self._handlers:
            handler.removeFilter(self._before_log)
        self._clear()

    @property
    def due_s(self) -> float:
        """Seconds until it is to be drawn again."""
        return max(0.0, self._drawn_at + _BAR_EVERY_S - time.monotonic())

    def taken_away(self) -> bytes:
        """The text to be written before a line; from here on it is not there."""
        if not self._is_shown:
            return b""
        self._is_shown, self._drawn_at = False, -_BAR_EVERY_S
        return _ERASE

    def draw(self) -> None:
        """Reads what is new, and draws it if it is not there, or is old."""
        if self.due_s > 0:
            return
        self._progress.look()
        self._drawn_at = time.monotonic()
        line = self.line(shutil.get_terminal_size().columns)
        self._is_shown = self._write(_ERASE + line.encode(errors="replace")) or self._is_shown

    def line(self, columns: int) -> str:
        """The bar and as many words as fit; the words alone where there is little room."""
        room = columns - _ECHO
        words = self._progress.words()
        while words and len("  ".join(words)) > room:
            words.pop()
        text = "  ".join(words)
        cells = min(_MAX_BAR, room - len(text) - 2)
        total, step = self._progress.total, self._progress.step or 0
        if cells < _SHORTEST_BAR or not total:
            return text
        done = min(cells, cells * step // total)
        on, dim, off = ("\x1b[32m", "\x1b[2m", "\x1b[0m") if self._has_colour else ("", "", "")
        return f"{on}{self._done * done}{off}{dim}{self._rest * (cells - done)}{off}  {text}"

    def _before_log(self, record: logging.LogRecord) -> bool:
        self._clear()
        return True

    def _clear(self) -> None:
        if self._is_shown:
            self._write(self.taken_away())

    def _write(self, data: bytes) -> bool:
        try:
            if select.select([], [self._descriptor], [], 0.0)[1]:
                return os.write(self._descriptor, data) > 0
        except OSError:  # the terminal is gone
            pass
        return False


class Sink:
    """A descriptor of this process that lines are written to. One that nobody reads any more swallows them."""

    def __init__(self, descriptor: int, *, bar: Bar | None = None) -> None:
        self.descriptor = descriptor
        self._bar = bar if os.isatty(descriptor) else None
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
        return len(self._queue) > _MAX_QUEUE and time.monotonic() < self._took_at + PATIENCE_S

    def add(self, lines: bytes) -> None:
        """Queues lines, or counts them where so many wait that nobody seems to read."""
        if not self._queue:
            self._took_at = time.monotonic()
        if len(self._queue) > _MAX_QUEUE and not self.is_full:
            self._left_out += lines.count(b"\n")
            return
        self._say_what_is_missing()
        self._queue += lines.translate(_HARMLESS) if self._is_terminal else lines

    def write_some(self) -> None:
        """Writes what the descriptor, which select has found ready, takes without blocking; whole lines if it can."""
        if self._bar is not None:
            self._queue[:0] = self._bar.taken_away()
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
        """The newest lines, the oldest of them first, to be shown anywhere: without controls, and of bounded length."""
        return [harmless(line.decode(errors="replace")) for line in self._last]

    def read(self) -> bool:
        """Takes what is there; whether there may be more."""
        try:
            data = os.read(self.descriptor, _MAX_LINE)
        except BlockingIOError:
            return False
        if not data:
            self.is_open = False
            return False
        data = self._line + data
        size = data.rfind(b"\n") + 1 or (len(data) if len(data) >= _MAX_LINE else 0)
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
        self._last.extend(line[:_MAX_LAST_LINE] for line in lines.splitlines()[-_LAST_LINES:])
        if self._held is None:
            self.sink.add(lines)
            return
        self._held += lines
        if len(self._held) > _MAX_HOLD:
            self._release()

    def _release(self) -> None:
        if self._held is not None:
            self.sink.add(bytes(self._held))
            self._held = None


def turn(
    sources: Iterable[Source],
    sinks: Collection[Sink],
    *,
    wake: int,
    timeout_s: float | None,
    bar: Bar | None = None,
) -> None:
    """Waits for output, for something to read from `wake`, or for the time; then copies what there is.

    The bar is drawn while no line waits.
    """
    if bar is not None and not any(one.has_queue for one in sinks):
        timeout_s = bar.due_s if timeout_s is None else min(timeout_s, bar.due_s)
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
    if bar is not None and not any(one.has_queue for one in sinks):
        bar.draw()
