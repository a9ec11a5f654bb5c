"""Results of a soak's measurements: slopes with intervals, resume times, and what must hold of the run's history."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.soak.measurements import Strike, SystemSample, is_resume
from benchmarks.soak.run_files import GROUPS_PER_STEP, MAX_LAG, TASKS
from benchmarks.soak.system import ARCHIVE, lives_of, run_folder
from tests.chaos.books import books_of
from tests.chaos.history import SystemHistory, read_history
from tests.chaos.invariants import RunTerms, books_balance, complaints

PER_STEPS = 10_000
WARM_STEPS = 200
"""So many steps after its start a process has loaded what it loads, and met its peers."""

FULL_STEPS = 2500
"""Steps from which lives are compared: a learner's memory of its steps is thinned from 2,048 on."""

LONG_STEPS = 2000
"""A life of so many steps is long. Its first half fills caches of fixed size: pydantic keeps the newest 16,384 strings
that it has read, a reward service its newest answers for 300 s. The second half tells."""

GROWS_MIB = 5.0
"""Per 10,000 steps: growth beyond this, by the whole of its interval, is a finding. A single group of this soak that
was kept at each step would be 20 MiB or more."""

SLOWS = 1.5
"""The last resumes' median over that of the first: more than this is a finding."""


@dataclass(frozen=True)
class Slope:
    """Growth per 10,000 steps, with half the width of its 95 % interval. NaN where there is too little to tell."""

    value: float
    half_width: float

    @property
    def grows(self) -> bool:
        """True if it is more than `GROWS_MIB` beyond its interval."""
        return self.value - self.half_width > GROWS_MIB


@dataclass(frozen=True)
class Growth:
    """Of one process: `within` the second halves of its long lives, the longest of which had `longest_steps`; `across`
    its lives, by the step of the run.
    """

    within: Slope
    across: Slope
    median_mib: float
    largest_mib: float
    longest_steps: int


def growth_of(samples: Sequence[SystemSample], name: str) -> Growth:
    """From the samples of a process that has been there for a while."""
    lives: dict[int, list[SystemSample]] = {}
    for one in samples:
        if is_warm(one, name):
            lives.setdefault(one.life[name], []).append(one)
    rss = [one.rss_mib[name] for life in lives.values() for one in life]
    ends = {number: _age(life[-1], name) for number, life in lives.items()}
    halves = [
        [(_age(one, name), one.rss_mib[name]) for one in lives[number] if 2 * _age(one, name) >= end]
        for number, end in ends.items()
        if end >= LONG_STEPS
    ]
    firsts = [life[0] for life in lives.values() if life[0].born[name] >= FULL_STEPS]
    return Growth(
        within=_slope([_centred(half) for half in halves], constants=len(halves)),
        across=_slope([_centred([(one.step, one.rss_mib[name]) for one in firsts])], constants=1),
        median_mib=float(np.median(rss)) if rss else math.nan,
        largest_mib=max(rss, default=math.nan),
        longest_steps=max(ends.values(), default=0),
    )


def _age(sample: SystemSample, name: str) -> int:
    """Steps since the process was started."""
    return sample.step - sample.born[name]


def is_warm(sample: SystemSample, name: str) -> bool:
    """True if the process lives, and has for a while."""
    return name in sample.born and _age(sample, name) >= WARM_STEPS


def _centred(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Less their mean, so that each row has a constant of its own."""
    if not points:
        return []
    x, y = np.mean(points, axis=0)
    return [(one - x, other - y) for one, other in points]


def _slope(rows: Iterable[Sequence[tuple[float, float]]], *, constants: int) -> Slope:
    """Per 10,000 steps: least squares through points that are centred by row, with errors taken as independent."""
    points = [(x / PER_STEPS, y) for row in rows for x, y in row]
    free = len(points) - constants - 1
    squares = sum(x * x for x, _ in points)
    if free < 1 or squares == 0:
        return Slope(math.nan, math.nan)
    value = sum(x * y for x, y in points) / squares
    rest = sum((y - value * x) ** 2 for x, y in points) / free
    return Slope(value, 1.96 * math.sqrt(rest / squares))


@dataclass(frozen=True)
class DiskGrowth:
    """Disk that a kind of file takes: bytes at the first and the last quarter's peak, and growth in bytes a step."""

    early: int
    late: int
    per_step: float


def disks_of(samples: Sequence[SystemSample]) -> dict[str, DiskGrowth]:
    """By kind. The peaks, since files that are rotated go up and down."""
    quarter = max(1, len(samples) // 4)
    kinds = sorted({kind for one in samples for kind in one.disk_bytes})
    return {kind: _disk(samples, kind, quarter=quarter) for kind in kinds}


def _disk(samples: Sequence[SystemSample], kind: str, *, quarter: int) -> DiskGrowth:
    early = max(one.disk_bytes.get(kind, 0) for one in samples[:quarter])
    late = max(one.disk_bytes.get(kind, 0) for one in samples[-quarter:])
    slope = _slope([_centred([(one.step, one.disk_bytes.get(kind, 0)) for one in samples])], constants=1)
    return DiskGrowth(early, late, slope.value / PER_STEPS)


@dataclass(frozen=True)
class Resumes:
    """Seconds from the learner's start to its next step: the medians of the first and the last tenth, and all."""

    count: int
    first_s: float
    last_s: float
    median_s: float

    @property
    def slower(self) -> bool:
        """True if the last took more than `SLOWS` times as long."""
        return self.last_s > SLOWS * self.first_s


def resumes_of(strikes: Sequence[Strike]) -> Resumes:
    """Of all faults after which the learner resumed its run."""
    times = [one.next_step_s for one in strikes if is_resume(one)]
    tenth = max(3, math.ceil(len(times) / 10))
    if not times:
        return Resumes(0, math.nan, math.nan, math.nan)
    return Resumes(
        len(times), *(float(np.median(part)) for part in (times[:tenth], times[-tenth:], times))
    )  # fmt: skip


def broken(folder: Path, *, steps: int) -> list[str]:
    """Complaints of all checks from outside, over the whole history that a soak of so many steps has left."""
    run = run_folder(folder)
    history = read_history(run, archive=folder / ARCHIVE, starts=lives_of(folder))
    terms = RunTerms(steps=steps, groups_per_step=GROUPS_PER_STEP, max_lag=MAX_LAG, tasks=None)
    found = complaints(history, terms) + books_balance(books_of(run), history, terms)
    return found + tasks_once_an_epoch(history, tasks=TASKS)


def tasks_once_an_epoch(history: SystemHistory, *, tasks: int) -> list[str]:
    """A lease's number tells its epoch: in each of them a task is trained once at most, and left out if excused.

    The leases of the last epoch are not all granted, and the last few granted ones are not trained.
    """
    excused = {one.lease_id for one in history.filtered} | history.dead_lettered
    trained = {lease_id for batch in history.batches for lease_id in batch.lease_ids}
    task_of = {group.key.lease_id: group.task_index for group in history.groups}
    counts = Counter((lease_id // tasks, task_of[lease_id]) for lease_id in trained)
    found = [f"epoch {epoch}: task {task} was trained {n} times" for (epoch, task), n in counts.items() if n > 1]
    for epoch in range(max(trained, default=0) // tasks):
        left = set(range(epoch * tasks, (epoch + 1) * tasks)) - trained - excused
        if left and epoch + 1 < max(trained) // tasks:
            found.append(f"epoch {epoch}: leases {sorted(left)} were never trained")
    return found
