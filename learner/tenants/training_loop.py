"""The loop that gives the trainer's thread its turns, and puts models on the disk between them.

Turns, snapshots and parking exclude each other: a snapshot is of a model between two of its operations, and says which.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from learner.tenants.catalog import ModelEntry
from learner.tenants.fairness import DeficitRoundRobin, RoundBudget
from learner.tenants.futures import Payload, ResultFutures
from learner.tenants.keys import Tenant
from learner.tenants.models import TrainingModel, TrainingModels
from learner.tenants.operations import OperationLog
from learner.tenants.run_records import RunRecords
from learner.tenants.snapshots import result_of
from learner.tenants.turns import OperationOutcome, TrainerTurns
from learner.tenants.work import Operation, failed
from learner.training.client_operations import AdamStep
from learner.training.trainer_thread import TrainerThread

logger = logging.getLogger(__name__)

T = TypeVar("T")


class TrainingLoop:
    """Does the operations in the queues of `models`.

    `serve` takes note of weights that an operation gave to a sampling session, `records` of what was done. `passes`
    counts the operations that were in `rounds`.
    """

    def __init__(
        self,
        *,
        turns: TrainerTurns,
        models: TrainingModels,
        futures: ResultFutures,
        log: OperationLog,
        tenants: Callable[[], Mapping[str, Tenant]],
        serve: Callable[[ModelEntry, OperationOutcome], Awaitable[None]],
        records: RunRecords,
        snapshot_every: int,
        max_resident: int,
        budget: RoundBudget,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._turns, self._models, self._futures, self._log = turns, models, futures, log
        self._tenants, self._serve, self._records = tenants, serve, records
        self._snapshot_every, self._max_resident = snapshot_every, max_resident
        self._round_robin = DeficitRoundRobin[Operation](cost=lambda each: each.tokens)
        self._budget, self._clock = budget, clock
        self._thread = TrainerThread()
        self._thread.start()
        self._turn_lock, self._news = asyncio.Lock(), asyncio.Event()
        self.passes = 0

    @property
    def rounds(self) -> int:
        """Counts what the trainer did at once, for one operation or for several that share passes."""
        return self._turns.rounds

    def wake(self) -> None:
        """Operations have come."""
        self._news.set()

    async def run(self) -> None:
        """Give turns until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            while await self._next_turn():
                pass

    async def _next_turn(self) -> bool:
        """Chosen when the turn has come: what waits may be given up while something else has it. False if none did."""
        async with self._turn_lock:
            backlogs = self._models.backlogs(self._tenants())
            taken = self._round_robin.take(backlogs, round_tokens=self._budget.tokens())
            if taken:
                await self._turn(taken)
        return bool(taken)

    async def close(self) -> None:
        """Returns when the trainer's thread has ended, or is cut off: a lost rank may keep it for minutes."""
        await self._thread.close()

    async def create(self, entry: ModelEntry) -> None:
        """Make a new model's adapter. Raises OperationError for a shape that the base model cannot have."""
        async with self._turn_lock:
            await self._make_room([entry.model_id])
            await self._on_trainer(lambda: self._turns.create(entry), named=f"the making of {entry.model_id}")

    async def between_turns(self, work: Callable[[], T]) -> T:
        """Have the trainer's thread do something that leaves the models as they are."""
        async with self._turn_lock:
            return await self._on_trainer(work, named="work between turns")

    async def remove(self, model: TrainingModel) -> None:
        """Give a model's memory back; nothing of it is kept."""
        async with self._turn_lock:
            await self._leave(model)
            try:
                await self._on_trainer(
                    lambda: self._turns.forget(model.entry.model_id), named=f"the removal of {model.entry.model_id}"
                )
            except OSError as error:
                logger.warning("the snapshot of %s stays until the next start: %s", model.entry.model_id, error)

    async def discard(self, entry: ModelEntry) -> None:
        """Take back what `create` did, for a model that could not be accepted."""
        async with self._turn_lock:
            await self._on_trainer(lambda: self._turns.remove(entry.model_id), named=f"the removal of {entry.model_id}")

    async def park(self, models: Iterable[TrainingModel]) -> None:
        """Leave models that have nothing to do on the disk alone; they come back with their next operation."""
        for model in models:
            async with self._turn_lock:
                if model.resident and model.idle:
                    await self._park(model)

    async def tidy(self) -> None:
        """Write snapshots of models for whose operations alone the journal's oldest file is kept, and trim it."""
        for model_id in sorted(self._log.holding()):
            model = self._models.by_id.get(model_id)
            async with self._turn_lock:
                if model is not None and model.resident and model.snapshot_seq < model.done_seq:
                    await self._write_snapshot(model)
        self._trim()

    async def _turn(self, operations: Sequence[Operation]) -> None:
        self._models.take(operations)
        self._records.begin(operations)
        try:
            for together in _with_room(operations, most=self._max_resident):
                for part in _parts_of(together):
                    await self._taken_part(part)
        finally:
            self._records.end()

    async def _taken_part(self, operations: Sequence[Operation]) -> None:
        models = {operation.model_id: self._models.by_id[operation.model_id] for operation in operations}
        began = self._clock()  # others wait for the parking of models, too
        await self._make_room(models)
        entries = {model_id: model.entry for model_id, model in models.items()}
        kinds = ", ".join(sorted({f"{operation.kind} of {operation.model_id}" for operation in operations}))
        outcomes = await self._on_trainer(
            lambda: self._turns.run(operations, entries), named=kinds, kept="its operations"
        )
        self._budget.learn(sum(operation.tokens for operation in operations), self._clock() - began)
        self.passes += sum(operation.is_pass for operation in operations)
        for model in models.values():
            model.resident = self._turns.holds(model.entry.model_id)
        for operation in operations:
            models[operation.model_id].done_seq = max(operation.seq_id, models[operation.model_id].done_seq)
        await self._settle(outcomes)
        await self._snapshot_due(models.values())

    async def _settle(self, outcomes: Iterable[OperationOutcome]) -> None:
        for outcome in outcomes:
            model = self._models.by_id[outcome.operation.model_id]
            payload = outcome.payload
            try:
                if outcome.target is not None:
                    await self._serve(model.entry, outcome)
                if outcome.needs_snapshot:
                    await self._put_on_disk(model, outcome)
                if outcome.is_fault:
                    await self._log.operation(failed(outcome.operation, _error_in(payload)))
            except OSError as error:
                payload = {"error": f"the learner's disk: {error}", "category": "server"}
            outcome.operation.future.finish(payload)
            failure = _error_in(payload)
            self._records.done(model.entry.owner, outcome.operation, outcome.metrics, failure)

    async def _snapshot_due(self, models: Iterable[TrainingModel]) -> None:
        there = (model for model in models if model.resident)
        due = [model for model in there if model.done_seq - model.snapshot_seq >= self._snapshot_every]
        for model in due:
            await self._write_snapshot(model)
        if due:
            self._trim()

    def _trim(self) -> None:
        try:
            self._log.trim({model_id: model.covered_seq for model_id, model in self._models.by_id.items()})
        except OSError as error:
            logger.warning("a file of the journal cannot be removed, and is tried again later: %s", error)

    async def _write_snapshot(self, model: TrainingModel) -> None:
        try:
            await self._put_on_disk(model)
        except OSError as error:
            logger.warning("no snapshot of %s: %s; its journal is kept instead", model.entry.model_id, error)

    async def _put_on_disk(self, model: TrainingModel, outcome: OperationOutcome | None = None) -> None:
        """Write a snapshot, with the result of an operation that nobody has been told yet. Raises OSError.

        Results that were retrieved are kept while their futures are: the answers may have been lost on their way.
        """
        seq_id = model.done_seq
        told = [each for each in self._futures.results(f"{model.entry.model_id}:") if not each.given_up]
        results = [result_of(each) for each in told]
        if outcome is not None:
            results.append(result_of(outcome.operation.future, outcome.payload))
        await self._on_trainer(
            lambda: self._turns.snapshot(model.entry, seq_id, results), named=f"a snapshot of {model.entry.model_id}"
        )
        model.snapshot_seq = seq_id

    async def _make_room(self, needed: Iterable[str]) -> None:
        for model in self._models.to_park(room=self._max_resident, needed=needed):
            await self._park(model)

    async def _park(self, model: TrainingModel) -> None:
        if model.snapshot_seq < model.done_seq:
            await self._write_snapshot(model)
        if model.snapshot_seq == model.done_seq:
            await self._leave(model)

    async def _leave(self, model: TrainingModel) -> None:
        model_id = model.entry.model_id
        await self._on_trainer(lambda: self._turns.remove(model_id), named=f"the parking of {model_id}")
        model.resident = False

    async def _on_trainer(self, work: Callable[[], T], *, named: str, kept: str = "") -> T:
        return await self._thread.run(work, named=named, kept=kept)


def _with_room(operations: Sequence[Operation], *, most: int) -> Iterator[list[Operation]]:
    """The operations of so many models at a time, as have room on the trainer."""
    models = list(dict.fromkeys(operation.model_id for operation in operations))
    for start in range(0, len(models), most):
        some = set(models[start : start + most])
        yield [operation for operation in operations if operation.model_id in some]


def _error_in(payload: Payload) -> str:
    return str(payload.get("error", "")) if isinstance(payload, dict) else ""


def _parts_of(operations: Sequence[Operation]) -> list[list[Operation]]:
    """Parts of a turn, each of which is answered before the next one begins: optimizer steps whose passes former turns
    have done, passes, and the rest.

    A step is short, and its client waits for nothing else; behind the passes of others it would wait for the longest
    part of a turn, and a client that is answered late sends its next pass when that turn's are done.
    """
    passed = {operation.model_id for operation in operations if operation.is_pass}
    parts: tuple[list[Operation], ...] = [], [], []
    for operation in operations:
        alone = isinstance(operation.work, AdamStep) and operation.model_id not in passed
        parts[1 if operation.is_pass else 0 if alone else 2].append(operation)
    return [part for part in parts if part]
