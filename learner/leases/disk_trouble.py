"""A disk that does not take something: said once, however often it is asked."""

import logging


class DiskTrouble:
    """Says once that the disk does not take something, and once that it does again, `over`."""

    def __init__(self, logger: logging.Logger, *, over: str) -> None:
        self._logger = logger
        self._over = over
        self._lasts = False

    def goes_on(self, text: str, *values: object) -> None:
        """It was not taken; `text` and `values` as in logging."""
        if not self._lasts:
            self._logger.warning(text, *values)
        self._lasts = True

    def is_over(self) -> None:
        """It was taken."""
        if self._lasts:
            self._logger.info(self._over)
        self._lasts = False
