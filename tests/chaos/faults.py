"""Faults of a running process from the outside: signals, a smaller file size limit, a clock that jumps."""

import contextlib
import os
import resource
import signal
from collections.abc import Iterable
from pathlib import Path

from generator.engine.options import ENGINE_NAME
from services.local_processes import each_process, fields_of


def tree(pid: int) -> list[int]:
    """The process and all its living descendants, parents before children."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found = [pid]
    for one in found:  # it grows while it is walked
        found.extend(children.get(one, ()))
    return found


def engine_core(pid: int) -> int | None:
    """The process in which a generator's vLLM computes; None if it has none now."""
    return next((child for child in tree(pid)[1:] if is_engine(child)), None)


def is_engine(pid: int) -> bool:
    """True for a process in which vLLM computes, or is about to."""
    with contextlib.suppress(OSError):
        name = Path(f"/proc/{pid}/comm").read_text(encoding="ascii", errors="replace").strip()
        return name == ENGINE_NAME or name.startswith("VLLM::Engine")
    return False


def send(number: signal.Signals, pids: Iterable[int]) -> None:
    """Sends a signal to those of the processes that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def limit_file_size(pid: int, largest_bytes: int | None) -> None:
    """No file of the process can grow beyond so many bytes: writes fail, as on a full disk. None lifts the limit.

    Python ignores SIGXFSZ, so that the write raises EFBIG.
    """
    hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if largest_bytes is None else largest_bytes, hard))


def _parents() -> Iterable[tuple[int, int]]:
    for pid, stat in each_process("stat"):
        yield pid, int(fields_of(stat)[1])
