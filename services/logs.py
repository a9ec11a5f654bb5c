"""Logging of a process: one readable line, or one JSON object, for each record."""

import json
import logging
import sys
import time
from typing import Literal, TextIO

_NAME_WIDTH = len("reward-service")
_NOISY = ("uvicorn", "uvicorn.access", "uvicorn.error", "httpx", "httpcore", "asyncio")


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
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


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
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def configure_logging(
    process: str, *, level: str = "info", format: Literal["text", "json"] = "text", stream: TextIO | None = None
) -> None:
    """Send every record of `level` and above to `stream` (stderr), libraries that chatter only from warnings on."""
    formatter = JsonFormatter(process=process) if format == "json" else TextFormatter(process=process)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatter)
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
