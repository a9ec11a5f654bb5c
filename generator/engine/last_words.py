"""Cause of an engine's death, from the process in which it died to the one that owns it.

vLLM writes the traceback into its log, and tells its owner no more than that there was one. A file in memory, which the
processes of an engine open as one of their owner's, takes the errors that they log, a sentence each; it needs no name
on a disk and is gone with its owner.
"""

import logging
import os
import re
from contextlib import suppress
from typing import Any

_POINTS_ELSEWHERE = re.compile(r"root cause|stack trace|EngineDeadError", re.IGNORECASE)
_LONGEST = 500
_MAX_BYTES = 1 << 16


class LastWords:
    """The owner's side."""

    def __init__(self) -> None:
        self._file = os.memfd_create("headway-last-words")

    @property
    def path(self) -> str:
        """Path by which the processes of the engine, on this machine and of this user, open the file."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def said(self) -> str:
        """The last error that names its own cause; empty if there was none."""
        size = os.fstat(self._file).st_size
        data = os.pread(self._file, _MAX_BYTES, max(0, size - _MAX_BYTES))
        lines = [line for line in data.decode(errors="replace").splitlines() if line]
        return next((line for line in reversed(lines) if not _POINTS_ELSEWHERE.search(line)), "")

    def close(self) -> None:
        os.close(self._file)


def note_errors(path: str) -> None:
    """Has this process, one of an engine's, note the errors that vLLM logs here.

    Where records are made, and not as a handler: vLLM configures its loggers anew in each process, without it.
    """
    made = logging.getLogRecordFactory()

    def noted(name: str, level: int, *args: Any, **values: Any) -> logging.LogRecord:
        record = made(name, level, *args, **values)
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and level >= logging.ERROR and name.partition(".")[0] == "vllm":
            with (
                suppress(OSError),
                open(path, "a", encoding="utf-8", errors="replace") as file,
            ):  # the owner may be gone
                file.write(root_sentence(error) + "\n")
        return record

    logging.setLogRecordFactory(noted)


def root_sentence(error: BaseException) -> str:
    """The error at the bottom of the causes of this one, in a line."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())[:_LONGEST]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
