"""What is remembered of generators' processes: they come and go as long as a run lasts, and most never come back."""

from typing import Generic, TypeVar

T = TypeVar("T")

MOST_PROCESSES = 4096


class Remembered(Generic[T]):
    """A value for each of the newest processes, named by its instance, with or without the generator's id.

    Of more than `most` the one that was set longest ago is forgotten, as if nothing had ever been known of it.
    """

    def __init__(self, *, most: int = MOST_PROCESSES) -> None:
        self._most = most
        self._values: dict[tuple[str, ...], T] = {}

    def __contains__(self, process: tuple[str, ...]) -> bool:
        return process in self._values

    def __setitem__(self, process: tuple[str, ...], value: T) -> None:
        self._values.pop(process, None)
        self._values[process] = value
        if len(self._values) > self._most:
            del self._values[next(iter(self._values))]

    def get(self, process: tuple[str, ...]) -> T | None:
        """The value of a process; None if nothing is known of it."""
        return self._values.get(process)

    def forget(self, process: tuple[str, ...]) -> None:
        """Nothing is known of it from here on."""
        self._values.pop(process, None)
