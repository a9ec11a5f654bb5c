"""Files that may change while what was read of them is in use: read again without a start of anybody."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from services.secret_files import file_state

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
T = TypeVar("T")


class WatchedFiles(Generic[T]):
    """The newest value that `read` makes of files; it is read anew when one of them has changed.

    A change that cannot be used, of which `read` raises `fault`, is logged once for each reason after the words
    `refused`, and the value before it stays in force. The files are tried again at each look: a mode may be mended
    without a change of what they hold. `read` is given the value before, None at first; `changed` is called after each
    change with that and the new one.
    """

    def __init__(
        self,
        files: Sequence[Path],
        read: Callable[[T | None], T],
        *,
        fault: type[Exception],
        refused: str,
        changed: Callable[[T, T], None],
    ) -> None:
        """Raises `fault`."""
        self._files, self._read, self._fault = files, read, fault
        self._refused, self._changed = refused, changed
        self._seen = self._state()
        self._refused_for = ""
        self._value = read(None)
        self._look_at = time.monotonic() + LOOK_EVERY_S

    def current(self) -> T:
        """The value now; the files are looked at once a second at most."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            self.renew()
        return self._value

    def renew(self) -> None:
        """Looks at the files now."""
        state = self._state()
        if state == self._seen:
            self._refused_for = ""
            return
        before = self._value
        try:
            self._value = self._read(before)
        except self._fault as error:
            if str(error) != self._refused_for:
                logger.error("%s: %s", self._refused, error)
            self._refused_for = str(error)
            return
        self._seen, self._refused_for = state, ""
        self._changed(before, self._value)

    def _state(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(file_state, self._files))
