"""Secrets in files that may change while they are used, so that a token is exchanged without a start of anybody.

A file has a token in each line: the first is shown to others, and of callers each is accepted. While all have files
with both the former token and the new one, whoever comes first with the new one is understood.
"""

import hmac
import logging
from functools import cache
from pathlib import Path

from pydantic import SecretStr

from services.secret_files import SecretFileError, read_secret_lines
from services.watched_files import WatchedFiles

logger = logging.getLogger(__name__)

SHORTEST_TOKEN = 16
"""Characters of a token that callers on other machines show."""


class RotatingSecret(SecretStr):
    """The first line of a secret's file, which is read again once it has changed.

    A change that cannot be used is logged, and what was read before stays in force.
    """

    def __init__(self, path: Path) -> None:
        """Raises SecretFileError."""
        self.path = path
        self._watched = WatchedFiles(
            (path,),
            self._read,
            fault=SecretFileError,
            refused="a changed secret cannot be used, what was read before stays in force",
            changed=self._note_change,
        )
        super().__init__(self._watched.current()[0])

    def get_secret_value(self) -> str:
        """The line to show."""
        return self.lines()[0]

    def lines(self) -> tuple[str, ...]:
        """All lines, the one to show first."""
        return self._watched.current()

    def renew(self) -> None:
        """Looks at the file now."""
        self._watched.renew()

    def _read(self, before: tuple[str, ...] | None) -> tuple[str, ...]:
        """Nobody was told of a weaker token at the start, where one is refused."""
        lines = read_secret_lines(self.path)
        least = 0 if before is None else min(SHORTEST_TOKEN, *map(len, before))
        if min(map(len, lines)) < least:
            raise SecretFileError(f"{self.path} has a line of fewer than {least} characters, which can be guessed")
        return lines

    def _note_change(self, before: tuple[str, ...], lines: tuple[str, ...]) -> None:
        if lines != before:
            self._secret_value = lines[0]
            more = f"; the first of its {len(lines)} lines is shown, each is accepted" if len(lines) > 1 else ""
            logger.info("%s has changed, and is in use%s", self.path, more)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SecretStr) and SecretStr(self.get_secret_value()) == SecretStr(
            other.get_secret_value()
        )

    __hash__ = SecretStr.__hash__


@cache
def secret_of(path: Path) -> RotatingSecret:
    """The same for all who name this file, so that those who come during a change have what was read before it.

    Raises SecretFileError, as long as it has never been read.
    """
    return RotatingSecret(path)


def accepted(secret: SecretStr) -> tuple[str, ...]:
    """The words that callers may show in place of the secret."""
    return secret.lines() if isinstance(secret, RotatingSecret) else (secret.get_secret_value(),)


def is_shown(shown: str | bytes, secret: SecretStr, *, prefix: str = "") -> bool:
    """True if `shown` is an accepted word after `prefix`; the time that it takes tells nothing of the words."""
    given = shown.encode() if isinstance(shown, str) else shown
    return sum(hmac.compare_digest(given, f"{prefix}{word}".encode()) for word in accepted(secret)) > 0
