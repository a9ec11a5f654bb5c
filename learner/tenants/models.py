"""Training models: their operations in strict order of seq_id, those that come early held until their turn."""

import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from learner.tenants.catalog import ModelEntry
from learner.tenants.fairness import Backlog
from learner.tenants.keys import Tenant
from learner.tenants.work import Operation

_UNLOADED = "its model was unloaded"


@dataclass(eq=False)
class TrainingModel:
    """A training model. `next_seq`: the operation whose turn is next to come; `early`: those that came before it.

    `ready` are operations in turn, `done_seq` is the last one that was done, `snapshot_seq` the last one in the
    snapshot on the disk; -1 is none. `resident`: the trainer holds its adapter. `accepting` counts operations that are
    read or may be in the journal, and are not in its queue yet. `waits_since`: the time from which on what it has in
    its queue has waited, None if that is nothing; it begins anew with each turn of it. `damage`: the problem with a
    snapshot of which not even the last operation can be read: the model does none then.
    """

    entry: ModelEntry
    next_seq: int
    done_seq: int = -1
    snapshot_seq: int = -1
    resident: bool = False
    accepting: int = 0
    early: dict[int, Operation] = field(default_factory=dict)
    ready: deque[Operation] = field(default_factory=deque)
    last_used: float = 0.0
    waits_since: float | None = None
    damage: str = ""

    def add(self, operation: Operation) -> None:
        """Hold the operation until its turn; those whose turn has come with it become ready."""
        self.early[operation.seq_id] = operation
        while self.next_seq in self.early:
            self.ready.append(self.early.pop(self.next_seq))
            self.next_seq += 1

    def runnable(self) -> Iterator[Operation]:
        """Operations that one round may take: passes up to the next step or save, and that."""
        for operation in self.ready:
            yield operation
            if not operation.is_pass:
                return

    @property
    def queued(self) -> Iterator[Operation]:
        """All that wait."""
        yield from self.ready
        yield from self.early.values()

    @property
    def covered_seq(self) -> int:
        """The last operation that no start has to do again.

        That is all of an unloaded model, and of one whose snapshot is of all that it did while nothing more of it is
        under way: what else the journal has of it was given up. With a copy of a damaged snapshot it is all wanted.
        """
        if self.damage and not self.entry.unloaded:
            return -1
        untouched = self.next_seq == (0 if self.entry.loads else 1)
        settled = untouched or self.snapshot_seq == self.done_seq == self.next_seq - 1
        waiting = self.accepting or self.early or self.ready
        return sys.maxsize if self.entry.unloaded or (settled and not waiting) else self.snapshot_seq

    @property
    def idle(self) -> bool:
        """Nothing of it waits for the trainer."""
        return not self.ready


@dataclass(frozen=True)
class QueueLength:
    """Operations of a tenant that wait, and the bytes of their bodies."""

    operations: int
    size: int


class TrainingModels:
    """All training models by name. `clock` is in seconds."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.by_id: dict[str, TrainingModel] = {}
        self._queued: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    def add_model(self, entry: ModelEntry, *, covered: int | None) -> TrainingModel:
        """A model whose snapshot covers operations up to a number, or that has none."""
        first = 0 if entry.loads else 1
        model = TrainingModel(entry, next_seq=first if covered is None else covered + 1)
        if covered is not None:
            model.done_seq = model.snapshot_seq = covered
        model.last_used = self._clock()
        self.by_id[entry.model_id] = model
        return model

    def used_at(self, model: TrainingModel) -> float:
        """Time of its last request, in seconds since 1970."""
        return time.time() - (self._clock() - model.last_used)

    def find(self, model_id: str, *, owner: str) -> TrainingModel | None:
        """The model, if it is the owner's."""
        model = self.by_id.get(model_id)
        return None if model is None or model.entry.owner != owner or model.entry.unloaded else model

    def enqueue(self, operation: Operation) -> None:
        """Put an operation into its model's queue."""
        model = self.by_id[operation.model_id]
        model.add(operation)
        model.last_used = self._clock()
        if model.waits_since is None:
            model.waits_since = model.last_used
        counted = self._queued[model.entry.owner]
        counted[0], counted[1] = counted[0] + 1, counted[1] + operation.size
        if model.entry.unloaded:
            self.drop_all(model)  # it was unloaded while the operation was accepted

    def queue_length(self, owner: str) -> QueueLength:
        """Count what waits of a tenant."""
        return QueueLength(*self._queued[owner])

    def backlogs(self, tenants: Mapping[str, Tenant]) -> list[Backlog[Operation]]:
        """Operations of each tenant that could be done now."""
        queues: dict[str, list[deque[Operation]]] = defaultdict(list)
        for model in self.by_id.values():
            if model.ready and not model.entry.unloaded:
                queues[model.entry.owner].append(deque(model.runnable()))
        weights = {name: tenant.weight for name, tenant in tenants.items()}
        return [Backlog(owner, weights.get(owner, 1.0), each) for owner, each in queues.items()]

    def take(self, operations: Iterable[Operation]) -> None:
        """Take operations that run now out of their queues."""
        for operation in operations:
            model = self.by_id[operation.model_id]
            first = model.ready.popleft()
            assert first is operation, (first.seq_id, operation.seq_id)
            self._uncount(operation)
            model.waits_since = self._clock() if model.ready or model.early else None

    def drop_early(self, model: TrainingModel, reason: str) -> None:
        """Give up operations behind a hole that nobody will fill any more; their clients are told."""
        dropped = list(model.early.values())
        model.early.clear()
        model.waits_since = model.waits_since if model.ready else None
        self._give_up(dropped, reason)

    def drop_all(self, model: TrainingModel) -> None:
        """Give up all that wait for an unloaded model; their clients are told."""
        dropped = list(model.ready)
        model.ready.clear()
        self._give_up(dropped, _UNLOADED)
        self.drop_early(model, _UNLOADED)

    def _give_up(self, operations: Iterable[Operation], reason: str) -> None:
        for operation in operations:
            self._uncount(operation)
            operation.future.given_up = True
            operation.future.finish(
                {"error": f"operation {operation.seq_id} was not done: {reason}", "category": "user"}
            )

    def idle_s(self, model: TrainingModel) -> float:
        """Seconds since its last request."""
        return self._clock() - model.last_used

    def waited_s(self, model: TrainingModel) -> float:
        """Seconds for which what it has in its queue has waited; 0 if that is nothing."""
        return 0.0 if model.waits_since is None else self._clock() - model.waits_since

    def to_park(self, *, room: int, needed: Iterable[str]) -> list[TrainingModel]:
        """Models that must leave the trainer so that those needed have room: the least recently used ones."""
        staying = set(needed)
        resident = [model for model in self.by_id.values() if model.resident]
        more = sum(model_id not in self.by_id or not self.by_id[model_id].resident for model_id in staying)
        idle = sorted(
            (model for model in resident if model.entry.model_id not in staying), key=lambda model: model.last_used
        )
        return idle[: max(0, len(resident) + more - room)]

    def _uncount(self, operation: Operation) -> None:
        counted = self._queued[self.by_id[operation.model_id].entry.owner]
        counted[0], counted[1] = counted[0] - 1, counted[1] - operation.size
