"""Logging of a process: one readable line, or one JSON object, for each record; a reader that stops stops nobody."""

import json
import logging
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TextIO

from services.standard_output import harmless
from services.user_code import in_lines

_NAME_WIDTH = len("reward-service")
_NEVER_BLOCKS = 4096  # bytes that a descriptor that is ready takes at once: POSIX's PIPE_BUF on Linux
_MAX_PENDING = 256 << 10
_FLUSH_S = 1.0
_PATIENCE_S = 0.5
_MAX_NAMES = 1000
_NOISY = ("matplotlib", "uvicorn", "uvicorn.access", "uvicorn.error", "httpx", "httpcore", "asyncio")


class TextFormatter(logging.Formatter):
    """`12:03:44 learner         step 12 …`; severities other than info and debug are spelled out."""

    def __init__(self, *, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line, with the traceback below it if it has one."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        severity = f"{record.levelname} " if record.levelno >= logging.WARNING else ""
        line = f"{clock} {self._process:<{_NAME_WIDTH}} {severity}{record.getMessage()}"
        return f"{line}\n{_traceback(self, record)}" if record.exc_info else line


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """Of an error in code of the user's, the lines that are theirs."""
    assert record.exc_info is not None
    error = record.exc_info[1]
    theirs = "" if error is None else in_lines(error)
    return "\n".join(f"    {line}" for line in theirs.splitlines()) or formatter.formatException(record.exc_info)


class SaidBefore(logging.Filter):
    """Lets a warning or an error through once. Equal ones are counted, and told by their number from time to time.

    Equal are those of one text, those of one error in one place, whatever it was raised for, and those that their
    author has given one name: `extra={"same": name}`.
    """

    def __init__(self, *, every_s: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._every_s = every_s
        self._clock = clock
        self._said: dict[object, _WrittenLine] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """True if to write it. One that cannot be formatted is: whoever writes it says so."""
        if record.levelno < logging.WARNING:
            return True
        try:
            return self._is_new(record)
        except Exception:  # noqa: BLE001 - logging must not raise in a caller, whose arguments may not fit the text
            return True

    def _is_new(self, record: logging.LogRecord) -> bool:
        name, now = _name_of(record), self._clock()
        said = self._said.get(name)
        if said is None:
            if len(self._said) >= _MAX_NAMES:
                self._said.clear()
            self._said[name] = _WrittenLine(at=now)
            return True
        said.since += 1
        if now - said.at < self._every_s:
            return False
        record.msg, record.args = f"{record.getMessage()} ({said.since} times more in {now - said.at:.0f} s)", ()
        record.exc_info = None
        said.since, said.at = 0, now
        return True


@dataclass
class _WrittenLine:
    """Last time of a line, and the number of lines like it since."""

    at: float
    since: int = 0


def _name_of(record: logging.LogRecord) -> object:
    given = getattr(record, "same", None)
    if given is not None:
        return given
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return record.levelno, record.getMessage()
    tail = traceback.extract_tb(error.__traceback__)[-1:]
    return record.msg, type(error), tuple((frame.filename, frame.lineno) for frame in tail)


class JsonFormatter(logging.Formatter):
    """An object with time (seconds since 1970), process, level, logger, message and, for errors, traceback."""

    def __init__(self, *, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        fields: dict[str, str | float] = {
            "time": round(record.created, 3),
            "process": self._process,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = _traceback(self, record)
        return json.dumps(fields, ensure_ascii=False)


class UnhurriedHandler(logging.StreamHandler[TextIO]):
    """Writes lines to a stream, and never waits for its reader: a pager, a terminal on hold, a pipe that is full.

    What is not taken at once is written by a thread, when there is room. Beyond a limit a reader is waited for while it
    goes on reading; from one that has stopped lines are left out, and counted where they go on. A stream without a
    descriptor is written to as usual.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._descriptor = _descriptor_of(stream)
        self._is_terminal = self._descriptor is not None and os.isatty(self._descriptor)
        self._pending = bytearray()
        self._left_out = 0
        self._took_at = time.monotonic()
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Queues the record's line, and writes what is taken."""
        if self._descriptor is None:
            super().emit(record)
            return
        try:
            text = harmless(self.format(record)) if self._is_terminal else self.format(record)
            line = f"{text}\n".encode(errors="replace")
        except Exception:  # noqa: BLE001 - as the base class has it: a record that cannot be formatted ends nothing
            self.handleError(record)
            return
        self._add(line)
        while self._pending and self._is_writable(timeout_s=0.0):
            self._write_some()
        if self._pending and self._thread is None:
            self._thread = threading.Thread(target=self._write_later, name="log", daemon=True)
            self._thread.start()

    def flush(self) -> None:
        """Writes all, or as much as is taken in a second."""
        ends_at = time.monotonic() + _FLUSH_S
        with self.lock or threading.RLock():
            while self._pending and (left := ends_at - time.monotonic()) > 0:
                if self._is_writable(timeout_s=left):
                    self._write_some()
        if self._descriptor is None:
            super().flush()

    def _add(self, line: bytes) -> None:
        if not self._pending:
            self._took_at = time.monotonic()
        while len(self._pending) > _MAX_PENDING:
            left = self._took_at + _PATIENCE_S - time.monotonic()
            if not self._is_writable(timeout_s=max(0.0, left)):
                self._left_out += 1
                return
            self._write_some()
        self._pending += line

    def _write_some(self) -> None:
        size = self._pending.rfind(b"\n", 0, _NEVER_BLOCKS) + 1 or _NEVER_BLOCKS
        try:
            written = os.write(self._descriptor or 0, self._pending[:size])
        except BlockingIOError:
            return
        except OSError:  # the reader has left, or the terminal is gone
            written = len(self._pending)
        self._took_at = time.monotonic()
        del self._pending[:written]
        if not self._pending and self._left_out:
            self._pending += b"[%d lines are missing here: nobody read them]\n" % self._left_out
            self._left_out = 0

    def _write_later(self) -> None:
        while True:
            writable = self._is_writable(timeout_s=_FLUSH_S)
            with self.lock or threading.RLock():
                if writable and self._pending:
                    self._write_some()
                if not self._pending:
                    self._thread = None
                    return

    def _is_writable(self, *, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._descriptor or 0, select.POLLOUT)
        return bool(poll.poll(1000 * timeout_s))


def _descriptor_of(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (AttributeError, OSError):
        return None


def configure_logging(
    process: str, *, level: str = "info", format: Literal["text", "json"] = "text", stream: TextIO | None = None
) -> None:
    """Send every record of `level` and above to `stream` (stderr), libraries that chatter only from warnings on."""
    formatter = JsonFormatter(process=process) if format == "json" else TextFormatter(process=process)
    handler = UnhurriedHandler(stream or sys.stderr)
    handler.setFormatter(formatter)
    handler.addFilter(SaidBefore())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)


class Occasionally:
    """Asked before a complaint that may recur without end: says yes once, and again only `every_s` seconds later."""

    def __init__(self, *, every_s: float) -> None:
        self._every_s = every_s
        self._quiet_until = 0.0

    def __call__(self) -> bool:
        now = time.monotonic()
        if now < self._quiet_until:
            return False
        self._quiet_until = now + self._every_s
        return True
