"""Secrets in files that may change while they are used, so that a token is exchanged without a start of anybody.

A file has a token in each line: the first is shown to others, and of callers each is accepted. While all have files
with both the former token and the new one, whoever comes first with the new one is understood.
"""

import hmac
import logging
import time
from functools import cache
from pathlib import Path

from pydantic import SecretStr

from services.secret_files import SecretFileError, file_state, read_secret_lines

logger = logging.getLogger(__name__)

SHORTEST_TOKEN = 16
"""Characters of a token that callers on other machines show."""
_LOOK_EVERY_S = 1.0


class RotatingSecret(SecretStr):
    """The first line of a secret's file, which is read again once it has changed.

    A change that cannot be used is logged once for each reason, and what was read before stays in force. The file is
    tried again at each look: its mode may be mended, or files be free again, without a change of what it holds.
    """

    def __init__(self, path: Path) -> None:
        """Raises SecretFileError."""
        self.path = path
        self._seen = file_state(path)
        self._lines = read_secret_lines(path)
        self._refused_for = ""
        self._look_at = time.monotonic() + _LOOK_EVERY_S
        super().__init__(self._lines[0])

    def get_secret_value(self) -> str:
        """The line to show."""
        return self.lines()[0]

    def lines(self) -> tuple[str, ...]:
        """All lines, the one to show first."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOOK_EVERY_S
            self.renew()
        return self._lines

    def renew(self) -> None:
        """Looks at the file now."""
        state = file_state(self.path)
        if state == self._seen:
            self._refused_for = ""
            return
        try:
            lines = read_secret_lines(self.path)
            self._refuse_shorter(lines)
        except SecretFileError as error:
            if str(error) != self._refused_for:
                logger.error("a changed secret cannot be used, what was read before stays in force: %s", error)
            self._refused_for = str(error)
            return
        self._seen, self._refused_for = state, ""
        if lines != self._lines:
            self._lines, self._secret_value = lines, lines[0]
            more = f"; the first of its {len(lines)} lines is shown, each is accepted" if len(lines) > 1 else ""
            logger.info("%s has changed, and is in use%s", self.path, more)

    def _refuse_shorter(self, lines: tuple[str, ...]) -> None:
        """Nobody was told of a weaker token at the start, where one is refused."""
        least = min(SHORTEST_TOKEN, *map(len, self._lines))
        if min(map(len, lines)) < least:
            raise SecretFileError(f"{self.path} has a line of fewer than {least} characters, which can be guessed")

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
