"""Records of what training runs and tenants have done, for status, metrics and page, in room that does not grow.

Of runs the `MOST_RUNS` that did something last are kept, those of tenants that have left included; with the curve of
each that is some 20 MB at most. All of it belongs to the event loop. Curves and totals of runs outlive the learner
(`kept_curves`); the rest is of its present life.
"""

import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from learner.tenants.run_curves import RunCurve
from learner.tenants.work import Operation
from learner.training.client_operations import AdamStep, ForwardBackward

MOST_RUNS = 256
LATELY_S = 60.0
_BUCKETS = 12
_SHOWN_CHARS = 8
_MOST_PASSES = 1024
_LOSS = "loss:sum"
_SUMS = ("rows",)
_OF_THE_AXIS = frozenset({"step", "unix_s", "time_s", "lags"})
"""Names of columns that no number may have."""


def shown_name(owner: str, model_id: str) -> str:
    """The name by which a run is shown: its tenant's, and a hash that leads to no run."""
    return f"{owner}/{hashlib.sha256(model_id.encode()).hexdigest()[:_SHOWN_CHARS]}"


class RecentSum:
    """A sum over the last minute, to five seconds. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._parts: deque[tuple[int, float]] = deque()

    def add(self, amount: float) -> None:
        """Adds something of now."""
        part = self._part()
        if self._parts and self._parts[-1][0] == part:
            amount += self._parts.pop()[1]
        self._parts.append((part, amount))
        self._drop(part)

    def sum(self) -> float:
        """All that was added of late."""
        self._drop(self._part())
        return sum(amount for _, amount in self._parts)

    def per_s(self) -> float:
        """The rate of late; of something younger than a minute, since its beginning."""
        return self.sum() / max(1.0, min(LATELY_S, self._clock() - self._began))

    def _part(self) -> int:
        return int(self._clock() / (LATELY_S / _BUCKETS))

    def _drop(self, part: int) -> None:
        while self._parts and self._parts[0][0] <= part - _BUCKETS:
            self._parts.popleft()


@dataclass(eq=False)
class RunRecord:
    """A training run: what it has done so far, and its curve. `loss` is the newest sum of a pass, over its rows;
    `seq_id` the last operation that is in all of it.
    """

    name: str
    owner: str
    rows_lately: RecentSum
    tokens_lately: RecentSum
    rows: int = 0
    tokens: int = 0
    operations: int = 0
    failures: int = 0
    steps: int = 0
    seq_id: int = -1
    loss: float | None = None
    last_failure: str = ""
    curve: RunCurve = field(default_factory=RunCurve)
    passes: list[Mapping[str, float]] = field(default_factory=list)
    """Numbers of the passes since the last step, which the step's point has the means of."""


@dataclass(eq=False)
class TenantRecord:
    """Totals of a tenant in this life: operations that were done, and calls that were turned away."""

    rows_lately: RecentSum
    refused_lately: RecentSum
    rows: int = 0
    tokens: int = 0
    steps: int = 0
    refused: int = 0


@dataclass(frozen=True)
class TurnInHand:
    """Operations that the trainer has in hand since `began`."""

    operations: Sequence[Operation]
    began: float


class RunRecords:
    """The records by run and by tenant. `clock` is in seconds of any start, `wall` in seconds since 1970."""

    def __init__(
        self,
        *,
        most: int = MOST_RUNS,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.most, self.clock, self._wall = most, clock, wall
        self.runs: dict[str, RunRecord] = {}
        """By the id of the model, the one that did something last at the end."""
        self.tenants: dict[str, TenantRecord] = {}
        self.changed: set[str] = set()
        """Runs with something that is not on the disk yet."""
        self.turn: TurnInHand | None = None
        self.tokens_lately = RecentSum(clock)
        self.operations = 0

    def begin(self, operations: Sequence[Operation]) -> None:
        """The trainer takes these in hand."""
        self.turn = TurnInHand(tuple(operations), self.clock())

    def end(self) -> None:
        """The trainer has nothing in hand."""
        self.turn = None

    def refused(self, owner: str) -> None:
        """A call of the tenant was turned away, since it has too much under way."""
        record = self.of_tenant(owner)
        record.refused += 1
        record.refused_lately.add(1)

    def done(self, owner: str, operation: Operation, metrics: Mapping[str, float], failure: str = "") -> None:
        """An operation was done, with these numbers in its answer, or has failed. One that a former life had in its
        records, and that was done again after a start, changes nothing.
        """
        record = self.take_up(operation.model_id, owner)
        if operation.seq_id <= record.seq_id:
            return
        record.seq_id = operation.seq_id
        self.changed.add(operation.model_id)
        record.operations += 1
        self.operations += 1
        if failure:
            record.failures += 1
            record.last_failure = failure[:200]
        elif isinstance(operation.work, ForwardBackward):
            self._passed(record, operation.work, operation.tokens, metrics)
        elif isinstance(operation.work, AdamStep):
            self._stepped(record, metrics)

    def of_tenant(self, owner: str) -> TenantRecord:
        """The tenant's record; there are no more of them than names in the keys file."""
        if owner not in self.tenants:
            self.tenants[owner] = TenantRecord(RecentSum(self.clock), RecentSum(self.clock))
        return self.tenants[owner]

    def take_up(self, model_id: str, owner: str) -> RunRecord:
        """The record of a run, which is now the one that did something last; a new one if there is none."""
        record = self.runs.pop(model_id, None)
        if record is None:
            record = RunRecord(shown_name(owner, model_id), owner, RecentSum(self.clock), RecentSum(self.clock))
        self.runs[model_id] = record
        while len(self.runs) > self.most:
            del self.runs[next(iter(self.runs))]
        return record

    def _passed(self, record: RunRecord, work: ForwardBackward, tokens: int, metrics: Mapping[str, float]) -> None:
        rows, tenant = len(work.data), self.of_tenant(record.owner)
        for each in (record, tenant):
            each.rows += rows
            each.tokens += tokens
            each.rows_lately.add(rows)
        record.tokens_lately.add(tokens)
        self.tokens_lately.add(tokens)
        loss = metrics.get(_LOSS, math.nan) / max(1, rows)
        known = {"forward loss" if work.forward_only else "loss": loss} if math.isfinite(loss) else {}
        if work.forward_only:
            record.passes.append(known)
        else:
            record.loss = loss if known else None
            record.passes.append({**_numbers(metrics), **known, "rows": rows})
        del record.passes[:-_MOST_PASSES]

    def _stepped(self, record: RunRecord, metrics: Mapping[str, float]) -> None:
        record.steps += 1
        self.of_tenant(record.owner).steps += 1
        record.curve.add(record.steps, self._wall(), {**_means(record.passes), **_numbers(metrics)})
        record.passes.clear()


def _numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    """The numbers of an answer but for the loss, by names without the reduction: `accuracy` of `accuracy:mean`."""
    found = {name.partition(":")[0]: value for name, value in metrics.items() if name != _LOSS and math.isfinite(value)}
    return {name: value for name, value in found.items() if name and name not in _OF_THE_AXIS}


def _means(passes: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Of each number its mean over the passes that have it, weighted by their rows; rows are added up."""
    sums: dict[str, list[float]] = {}
    for numbers in passes:
        weight = numbers.get("rows", 1) or 1
        for name, value in numbers.items():
            own = sums.setdefault(name, [0.0, 0.0])
            own[0] += value if name in _SUMS else value * weight
            own[1] += weight
    return {name: total if name in _SUMS else total / weight for name, (total, weight) in sums.items()}
