"""CPU seconds of processes and threads, user and kernel time, as the operating system counts them; Linux."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def of_process(pid: int) -> float:
    """Of all its threads, and of its children that have ended; 0 if it is gone."""
    with suppress(OSError):
        return sum(_fields(Path(f"/proc/{pid}/stat"))[11:15]) / _TICKS
    return 0.0


def of_threads(pid: int) -> dict[int, float]:
    """Of each of its threads, by its id; empty if the process is gone."""
    return dict(_threads(pid))


def _threads(pid: int) -> Iterator[tuple[int, float]]:
    for folder in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):
            yield int(folder.name), sum(_fields(folder / "stat")[11:13]) / _TICKS


def _fields(stat: Path) -> list[int]:
    """The fields behind the name, which may hold anything; a 0 in place of the state, which is a letter."""
    return [0, *map(int, stat.read_text(encoding="utf-8").rpartition(")")[2].split()[1:])]
