"""Standard output of a command: a reader that leaves early, a letter that the terminal lacks, a disk that is full."""

import errno
import io
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

_CONTROLS = {code: "?" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}
READER_LEFT = 128 + signal.SIGPIPE
"""Exit code of a command whose output nobody reads any more, as shells have it of commands that a SIGPIPE ends."""


@contextmanager
def standard_output() -> Iterator[None]:
    """Runs a command, and writes what it has printed; as a decorator, too.

    Ends without a word if whoever read its standard output has left, as in `headway status run.toml | head -1`, and
    with a sentence if it cannot be written. What its encoding has no bytes for is written as an escape.
    """
    if sys.stdout is None:  # closed, as `>&-` does: there is nobody to print for
        sys.stdout = io.StringIO()
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    code: object = 0
    try:
        yield
    except SystemExit as ended:
        code = ended.code
        _write_out(ended.code)
        raise
    except BrokenPipeError:
        if not _has_lost_its_reader(sys.stdout) and not _has_lost_its_reader(sys.stderr):
            raise
        _leave_unread(code)
    else:
        _write_out(code)


def harmless(text: str) -> str:
    """A text without the controls that a terminal obeys: a sampled text in a failure may hold any of them."""
    return text.translate(_CONTROLS)


def show(text: str = "") -> None:
    """Prints what work has come to, as far as somebody takes it: it has been done, whether that is read or not."""
    with suppress(OSError):
        sys.stdout.write(text)
        sys.stdout.flush()


def _write_out(code: object) -> None:
    try:
        sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.EPIPE and not code:
            sys.stderr.write(f"cannot write to standard output: {error.strerror}; what was printed is not whole\n")
            code = 1
        _leave_unread(code)


def _leave_unread(code: object) -> None:
    """Exits; the code of a command that has failed stays. What is still unwritten goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with suppress(OSError, ValueError):
        os.dup2(nowhere, sys.stdout.fileno())
    sys.exit(code if code else READER_LEFT)  # type: ignore[arg-type]


def _has_lost_its_reader(stream: TextIO) -> bool:
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
