"""What the measurements come to: slopes with intervals, resume times, and what must hold of the run's history."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.soak.measures import Sample, Strike, is_resume
from benchmarks.soak.run_files import GROUPS_PER_STEP, MAX_LAG, TASKS
from benchmarks.soak.system import ARCHIVE, lives_of, run_folder
from tests.chaos.books import books_of
from tests.chaos.history import History, read_history
from tests.chaos.invariants import Terms, books_balance, complaints

PER_STEPS = 10_000
WARM_STEPS = 100
"""So many steps after its start a process has loaded what it loads, and met its peers."""

GROWS_MIB = 1.0
"""Per 10,000 steps: growth beyond this, by the whole of its interval, is a finding."""

SLOWS = 1.5
"""The last resumes' median over that of the first: more than this is a finding."""


@dataclass(frozen=True)
class Slope:
    """Growth per 10,000 steps, with half the width of its 95 % interval. NaN where there is too little to tell."""

    value: float
    half_width: float

    @property
    def grows(self) -> bool:
        """Whether it is more than `GROWS_MIB` beyond its interval."""
        return self.value - self.half_width > GROWS_MIB


@dataclass(frozen=True)
class Growth:
    """Of one process: `within` a life, by the steps since its start; `across` lives, by the step of the run."""

    within: Slope
    across: Slope
    median_mib: float
    largest_mib: float
    samples: int


def growth_of(samples: Sequence[Sample], name: str) -> Growth:
    """RSS = constant of its life + within * steps in the life, and the medians of the lives = constant + across * step.

    Samples of a process that has just started are left out.
    """
    warm = [one for one in samples if is_warm(one, name)]
    rss = [one.rss_mib[name] for one in warm]
    lives: dict[int, list[tuple[float, float]]] = {}
    for one in warm:
        lives.setdefault(one.life[name], []).append(((one.step - one.born[name]) / PER_STEPS, one.rss_mib[name]))
    firsts = [(one.step / PER_STEPS, one.rss_mib[name]) for one in _first_of_each_life(warm, name)]
    return Growth(
        within=_slope([_centred(life) for life in lives.values()], constants=len(lives)),
        across=_slope([_centred(firsts)], constants=1),
        median_mib=float(np.median(rss)) if rss else math.nan,
        largest_mib=max(rss, default=math.nan),
        samples=len(rss),
    )


def is_warm(sample: Sample, name: str) -> bool:
    """Whether the process lives, and has for a while."""
    return name in sample.born and sample.step - sample.born[name] >= WARM_STEPS


def _first_of_each_life(warm: Iterable[Sample], name: str) -> list[Sample]:
    """At about equal age."""
    found: dict[int, Sample] = {}
    for one in warm:
        found.setdefault(one.life[name], one)
    return list(found.values())


def _centred(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Less their mean, so that each row has a constant of its own."""
    if not points:
        return []
    x, y = np.mean(points, axis=0)
    return [(one - x, other - y) for one, other in points]


def _slope(rows: Iterable[Sequence[tuple[float, float]]], *, constants: int) -> Slope:
    """Least squares through points that are centred by row; normal errors, which neighbours are taken to share not."""
    points = [point for row in rows for point in row]
    free = len(points) - constants - 1
    squares = sum(x * x for x, _ in points)
    if free < 1 or squares == 0:
        return Slope(math.nan, math.nan)
    value = sum(x * y for x, y in points) / squares
    rest = sum((y - value * x) ** 2 for x, y in points) / free
    return Slope(value, 1.96 * math.sqrt(rest / squares))


@dataclass(frozen=True)
class Disk:
    """One kind of file: bytes at the first quarter's and the last quarter's peak, and growth in bytes a step."""

    early: int
    late: int
    per_step: float


def disks_of(samples: Sequence[Sample]) -> dict[str, Disk]:
    """By kind. The peaks, since files that are rotated go up and down."""
    quarter = max(1, len(samples) // 4)
    kinds = sorted({kind for one in samples for kind in one.disk_bytes})
    return {kind: _disk(samples, kind, quarter=quarter) for kind in kinds}


def _disk(samples: Sequence[Sample], kind: str, *, quarter: int) -> Disk:
    early = max(one.disk_bytes.get(kind, 0) for one in samples[:quarter])
    late = max(one.disk_bytes.get(kind, 0) for one in samples[-quarter:])
    slope = _slope([_centred([(one.step, one.disk_bytes.get(kind, 0)) for one in samples])], constants=1)
    return Disk(early, late, slope.value)


@dataclass(frozen=True)
class Resumes:
    """Seconds from the learner's start to its next step: the medians of the first and the last tenth, and all."""

    count: int
    first_s: float
    last_s: float
    median_s: float

    @property
    def slower(self) -> bool:
        """Whether the last took more than `SLOWS` times as long."""
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
    terms = Terms(steps=steps, groups_per_step=GROUPS_PER_STEP, max_lag=MAX_LAG, tasks=None)
    found = complaints(history, terms) + books_balance(books_of(run), history, terms)
    return found + tasks_once_an_epoch(history, tasks=TASKS)


def tasks_once_an_epoch(history: History, *, tasks: int) -> list[str]:
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
