"""What the doctor finds before a start: a line each, with a remedy."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """With an error, the start will fail; with a warning, it may."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """What was looked at, what was found, and what is to be done about it; no remedy where all is well."""

    level: Level
    what: str
    found: str
    remedy: str = ""


def good(what: str, found: str) -> Finding:
    """All is well."""
    return Finding(Level.OK, what, found)


def doubtful(what: str, found: str, remedy: str) -> Finding:
    """It may go wrong."""
    return Finding(Level.WARNING, what, found, remedy)


def bad(what: str, found: str, remedy: str) -> Finding:
    """It will go wrong."""
    return Finding(Level.ERROR, what, found, remedy)
