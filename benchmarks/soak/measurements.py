"""Measurements from outside while the soak goes on: memory of processes, and disk of the run's folder, by kind."""

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.soak.system import LEARNER, SoakSystem
from tests.chaos.faults import tree

MIB = 1 << 20
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class SystemSample:
    """The whole system at one moment. `rss_mib` is of a process and its children; a life began at `born`, a step."""

    kind: Literal["sample"]
    at_s: float
    step: int
    rss_mib: Mapping[str, float]
    life: Mapping[str, int]
    born: Mapping[str, int]
    age_s: Mapping[str, float]
    disk_bytes: Mapping[str, int]


@dataclass(frozen=True)
class Strike:
    """A fault at `step`. `next_step_s` is from its end, the new start if there is one, until the next step."""

    kind: Literal["fault"]
    at_s: float
    step: int
    process: str
    how: str
    lasted_s: float
    next_step_s: float


@dataclass(frozen=True)
class ProcessEnd:
    """A process that ended though nothing was done to it."""

    kind: Literal["ended"]
    at_s: float
    step: int
    text: str


def sample_of(system: SoakSystem, *, at_s: float, now: float) -> SystemSample:
    """Of this moment; `now` by the monotonic clock."""
    processes = [process for process in system.processes.values() if process.alive]
    return SystemSample(
        kind="sample",
        at_s=round(at_s, 1),
        step=system.progress.read(),
        rss_mib={one.name: round(rss_bytes(one.now.pid) / MIB, 2) for one in processes},
        life={one.name: one.starts for one in processes},
        born={one.name: one.started_step for one in processes},
        age_s={one.name: round(now - one.started_at, 1) for one in processes},
        disk_bytes=disk_bytes(system.run),
    )


def rss_bytes(pid: int) -> int:
    """Resident memory of a process and its children; 0 of one that has gone."""
    found = 0
    for one in tree(pid):
        with contextlib.suppress(OSError):
            found += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * _PAGE
    return found


def disk_bytes(run: Path) -> dict[str, int]:
    """Bytes of the files of a run's folder, by kind. Files that go meanwhile are left out."""
    found: Counter[str] = Counter()
    for path in _files(run):
        with contextlib.suppress(OSError):
            found[_kind(path.relative_to(run))] += path.stat().st_size
    return dict(found)


def _files(folder: Path) -> Iterable[Path]:
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            yield from _files(path) if path.is_dir() else [path]


def _kind(path: Path) -> str:
    if path.name == "ledger.json":
        return "ledger.json"
    top = path.parts[0]
    if top.startswith("checkpoint"):
        return "checkpoints"
    return top if top in ("journal", "metrics.jsonl", "samples.jsonl", "trajectories") else "others"


def is_resume(strike: Strike) -> bool:
    """True if the learner resumed its run after it."""
    return strike.process == LEARNER and strike.how != "hung"
