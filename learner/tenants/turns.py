"""Turns of the trainer's thread: the passes of a turn, then its steps, saves and loads.

    passes of a turn   a1 a2 b1 c1 c2 ─▶ round a1 b1 c1 ─▶ round a2 c2 ─▶ steps and the rest

Operations of different models share a round, those of one model never do. The gradient of a sum is rounded in another
way than the sum of gradients, and what waits together is a matter of chance, at a replay above all: an operation by
itself comes out the same, bit by bit, whenever it is done.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue

from learner.tenants.catalog import ModelEntry
from learner.tenants.checkpoints import CheckpointFacts, CheckpointKind, TenantCheckpoints, checkpoint_path
from learner.tenants.futures import Payload
from learner.tenants.snapshots import ModelSnapshots, SnapshotFacts, StoredResult
from learner.tenants.trainer import TenantTrainer
from learner.tenants.work import FailedOperation, Operation, UnfitOperation
from learner.training.client_operations import (
    AdamStep,
    ForwardBackward,
    OperationError,
    OperationFault,
    OperationResult,
)
from protocol.tinker.bodies import LoadWeights, SaveWeights, SaveWeightsExternal, SaveWeightsForSampler
from protocol.tinker.training import write_forward_backward
from services.process import StartAgain

logger = logging.getLogger(__name__)

BASE_TARGET = "base"
_INFLIGHT = "inflight://"
_JUDGED_BY_THEMSELVES = (AdamStep, UnfitOperation, FailedOperation)
"""Fail alike at each start. Others are refused by what stands on the disk, which may be something else by then."""


@dataclass(frozen=True)
class TargetWeights:
    """Weights that a sampling session samples from: the files of an adapter in peft's format, None for the base model.

    An inflight target keeps its name over its versions. `seq_id`: the operation that saved them.
    """

    target_id: str
    version: int = 0
    folder: Path | None = None
    seq_id: int = 0

    @property
    def is_inflight(self) -> bool:
        """True if later weights take their place."""
        return self.target_id.startswith(_INFLIGHT)

    @property
    def model_id(self) -> str:
        """The training model whose weights they are, empty for the base model."""
        return self.target_id.partition("://")[2].partition("/")[0]


@dataclass(frozen=True)
class OperationOutcome:
    """The result of an operation. `target`: weights that it gave to a sampling session named `sampling_session_id`.
    `metrics`: the numbers in its answer, by name.

    `needs_snapshot`: its model must be on the disk before it is answered, since what it did cannot be done again.
    `is_fault`: the learner could not do it. Next time it might, and must not: its client has gone on without it.
    """

    operation: Operation
    payload: Payload
    target: TargetWeights | None = None
    sampling_session_id: str = ""
    needs_snapshot: bool = False
    is_fault: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class TrainerTurns:
    """Runs operations. All but making it is for the trainer's thread. `clock` is in seconds since 1970.

    `shared_tokens`: see `rounds_of`. `rounds` counts the trainer's rounds.
    """

    def __init__(
        self,
        *,
        trainer: TenantTrainer,
        checkpoints: TenantCheckpoints,
        snapshots: ModelSnapshots,
        shared_tokens: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._trainer, self._checkpoints, self._snapshots, self._clock = trainer, checkpoints, snapshots, clock
        self._shared_tokens = shared_tokens
        self._versions: dict[str, int] = {}
        self.rounds = 0

    def run(self, operations: Sequence[Operation], entries: Mapping[str, ModelEntry]) -> list[OperationOutcome]:
        """Do the operations, each model's in order; what fails is told in its outcome."""
        damaged = {model_id: problem for model_id in entries if (problem := self._bring(entries[model_id]))}
        outcomes = [
            _of_fault(operation, damaged[operation.model_id])
            for operation in operations
            if operation.model_id in damaged
        ]
        whole = [operation for operation in operations if operation.model_id not in damaged]
        passes = [operation for operation in whole if operation.is_pass]
        for together in rounds_of(passes, shared_tokens=self._shared_tokens):
            outcomes += self._passes(together)
        outcomes += [self._barrier(each, entries[each.model_id]) for each in whole if not each.is_pass]
        return outcomes

    def snapshot(self, entry: ModelEntry, seq_id: int, results: Sequence[StoredResult]) -> None:
        """Write the model's state after an operation to the disk. Raises OSError."""
        facts = SnapshotFacts(entry.model_id, seq_id, self._versions[entry.model_id])
        self._snapshots.write(facts, self._trainer.state(entry.model_id), results)

    def create(self, entry: ModelEntry) -> None:
        """Make a new model's adapter. Raises OperationError for a shape that the base model cannot have."""
        if entry.model_id not in self._versions:
            self._trainer.create(entry.model_id, entry.shape)
            self._versions[entry.model_id] = 0

    def holds(self, model_id: str) -> bool:
        """The trainer has the model; False for one that could not be loaded."""
        return model_id in self._versions

    def remove(self, model_id: str) -> None:
        """Give the model's memory back."""
        if self._versions.pop(model_id, None) is not None:
            self._trainer.remove(model_id)

    def forget(self, model_id: str) -> None:
        """Remove the model's snapshot. Raises OSError."""
        self._snapshots.remove(model_id)

    def _bring(self, entry: ModelEntry) -> str:
        """Give the trainer a model that it does not hold; what is wrong if that cannot be."""
        if entry.model_id in self._versions:
            return ""
        facts = self._snapshots.covered.get(entry.model_id)
        try:
            if facts is None:
                self._trainer.create(entry.model_id, entry.shape)
            else:
                self._trainer.restore(entry.model_id, entry.shape, self._snapshots.state(entry.model_id))
        except StartAgain:
            raise
        except Exception as error:
            logger.exception("%s cannot be loaded", entry.model_id)
            return f"the model cannot be loaded: {error}"
        self._versions[entry.model_id] = 0 if facts is None else facts.version
        return ""

    def _passes(self, operations: Sequence[Operation]) -> list[OperationOutcome]:
        works = [operation.work for operation in operations]
        passes = [work for work in works if isinstance(work, ForwardBackward)]
        self.rounds += 1
        try:
            results = self._trainer.run_round(passes)
        except StartAgain:
            raise  # the next life does them
        except Exception as error:  # noqa: BLE001 - one client's operation must end neither others' nor the process
            if len(operations) > 1:
                return [outcome for operation in operations for outcome in self._passes([operation])]
            return [_fault(operations[0], error)]
        return [_passed(each, result) for each, result in zip(operations, results, strict=True)]

    def _barrier(self, operation: Operation, entry: ModelEntry) -> OperationOutcome:
        try:
            return self._done(operation, entry)
        except OperationFault as error:
            return _of_fault(operation, str(error))
        except OperationError as error:
            return OperationOutcome(
                operation, _failure(str(error)), needs_snapshot=not isinstance(operation.work, _JUDGED_BY_THEMSELVES)
            )
        except StartAgain:
            raise
        except Exception as error:  # noqa: BLE001 - it is in the journal: it would end each life after this one, too
            return _fault(operation, error)

    def _done(self, operation: Operation, entry: ModelEntry) -> OperationOutcome:
        match operation.work:
            case AdamStep():
                metrics = self._trainer.step(operation.work)
                self._versions[entry.model_id] += 1
                return OperationOutcome(operation, {"metrics": dict(metrics), "type": "optim_step"}, metrics=metrics)
            case SaveWeights(path=name):
                facts = self._save(operation, entry, operation.work, "weights", name)
            case SaveWeightsExternal(path=name):
                if operation.work.age_encryption_recipients:
                    raise OperationError("age_encryption_recipients: this server does not encrypt; leave them out")
                facts = self._save(operation, entry, operation.work, "external_weights", name)
            case SaveWeightsForSampler(path=str() as name):
                facts = self._save(operation, entry, operation.work, "sampler_weights", name)
            case SaveWeightsForSampler():
                return self._sampling_session(operation, entry, operation.work)
            case LoadWeights():
                return self._load(operation, entry, operation.work)
            case UnfitOperation(message=message):
                raise OperationError(message)
            case FailedOperation(message=message):
                raise OperationFault(message)
            case _:
                raise AssertionError(operation.kind)
        return OperationOutcome(operation, {"path": facts.path, "size_bytes": facts.size_bytes, "type": operation.kind})

    def _save(
        self,
        operation: Operation,
        entry: ModelEntry,
        body: SaveWeights | SaveWeightsExternal | SaveWeightsForSampler,
        folder: str,
        name: str,
    ) -> CheckpointFacts:
        path = checkpoint_path(entry.model_id, folder, name)
        former = self._checkpoints.former(path)
        if former is not None and former.seq_id >= operation.seq_id:
            return former  # this operation, or a later one, has been done before the learner was started again
        if former is not None and not (former.deleted or getattr(body, "overwrite", False)):
            raise OperationError(f"path: {path} exists; choose another name, or overwrite it")
        kinds: dict[str, CheckpointKind] = {
            "weights": "training", "sampler_weights": "sampler", "external_weights": "external",
        }  # fmt: skip
        now = self._clock()
        facts = self._facts(operation, entry, path, name, kinds[folder]).model_copy(
            update={
                "expires_at": None if body.ttl_seconds is None else now + body.ttl_seconds,
                "user_metadata": getattr(body, "user_metadata", None),
            }
        )
        return self._write(facts, with_state=folder == "weights")

    def _sampling_session(
        self, operation: Operation, entry: ModelEntry, body: SaveWeightsForSampler
    ) -> OperationOutcome:
        if body.sampling_session_seq_id is None:
            raise OperationError("sampling_session_seq_id: missing; expected it where there is no path")
        name = f"{entry.session_id}:sample:{body.sampling_session_seq_id}"
        path = f"target://{entry.model_id}/{body.kind}/{operation.seq_id}"
        facts = self._checkpoints.former(path) or self._write(
            self._facts(operation, entry, path, body.kind, "target"), with_state=False
        )
        payload: dict[str, JsonValue] = {"sampling_session_id": name, "type": operation.kind}
        return OperationOutcome(operation, payload, target_of(facts, self._checkpoints), name)

    def _load(self, operation: Operation, entry: ModelEntry, body: LoadWeights) -> OperationOutcome:
        facts = self._checkpoints.find(body.path, reader=entry.owner)
        if facts is None or facts.kind != "training":
            raise OperationError(f"path: no training checkpoint {body.path}; save_weights makes one")
        if facts.shape.rank != entry.shape.rank or modules_of(facts) != _modules(entry):
            raise OperationError(
                f"path: {body.path} has rank {facts.shape.rank} and {modules_of(facts)}, the model rank "
                f"{entry.shape.rank} and {_modules(entry)}; make a new training client from the checkpoint"
            )
        if body.optimizer_config is not None and body.optimizer_config.type != "adamw":
            raise OperationError(f"optimizer_config.type: {body.optimizer_config.type!r}; this model has adamw")
        state = self._checkpoints.state(body.path)
        self._trainer.restore(entry.model_id, entry.shape, state, optimizer=body.optimizer)
        self._versions[entry.model_id] = facts.version if body.optimizer else 0
        payload: dict[str, JsonValue] = {"path": body.path, "model_id": entry.model_id, "type": "load_weights"}
        return OperationOutcome(operation, payload, needs_snapshot=True)

    def _facts(
        self, operation: Operation, entry: ModelEntry, path: str, name: str, kind: CheckpointKind
    ) -> CheckpointFacts:
        return CheckpointFacts(
            path=path,
            run_id=entry.model_id,
            name=name,
            kind=kind,
            owner=entry.owner,
            base_model=entry.base_model,
            shape=entry.shape,
            seq_id=operation.seq_id,
            version=self._versions[entry.model_id],
            created_at=self._clock(),
        )

    def _write(self, facts: CheckpointFacts, *, with_state: bool) -> CheckpointFacts:
        adapter, config = self._trainer.peft(facts.run_id)
        state = self._trainer.state(facts.run_id) if with_state else None
        self._checkpoints.save(facts, adapter=adapter, config=config, state=state)
        written = self._checkpoints.former(facts.path)
        assert written is not None
        return written


def rounds_of(passes: Sequence[Operation], *, shared_tokens: int) -> Iterator[list[Operation]]:
    """The operations that the trainer does together, in order: of each model one, and alone if it has more than
    `shared_tokens`, which gains little by company.
    """
    places: dict[str, int] = defaultdict(int)
    waves: dict[int, list[Operation]] = defaultdict(list)
    for operation in passes:
        waves[places[operation.model_id]].append(operation)
        places[operation.model_id] += 1
    for wave in waves.values():
        shared = [operation for operation in wave if operation.tokens <= shared_tokens]
        if shared:
            yield shared
        yield from ([operation] for operation in wave if operation.tokens > shared_tokens)


def target_of(facts: CheckpointFacts, checkpoints: TenantCheckpoints) -> TargetWeights:
    """The weights of a checkpoint for sampling; all that an inflight model saves for it have one name."""
    inflight = facts.kind == "target" and facts.name == "inflight"
    target_id = f"{_INFLIGHT}{facts.run_id}" if inflight else facts.path
    return TargetWeights(target_id, facts.version, checkpoints.folder(facts.path), facts.seq_id)


def modules_of(facts: CheckpointFacts) -> str:
    """The parts of the base model that a checkpoint's adapter is on."""
    return _named(facts.shape.attention, facts.shape.mlp, facts.shape.unembed)


def _modules(entry: ModelEntry) -> str:
    return _named(entry.shape.attention, entry.shape.mlp, entry.shape.unembed)


def _named(attention: bool, mlp: bool, unembed: bool) -> str:
    names = (("attn", attention), ("mlp", mlp), ("unembed", unembed))
    return " + ".join(name for name, there in names if there) or "no modules"


def _fault(operation: Operation, error: Exception) -> OperationOutcome:
    logger.error("operation %d of %s failed", operation.seq_id, operation.model_id, exc_info=error)
    return _of_fault(operation, f"the learner failed: {type(error).__name__}: {error}")


def _of_fault(operation: Operation, message: str) -> OperationOutcome:
    known = isinstance(operation.work, FailedOperation)
    return OperationOutcome(operation, {"error": message, "category": "server"}, is_fault=not known)


def _passed(operation: Operation, result: OperationResult | OperationError) -> OperationOutcome:
    if isinstance(result, OperationFault):
        return _of_fault(operation, str(result))
    if isinstance(result, OperationError):
        return OperationOutcome(operation, _failure(str(result)))
    payload = write_forward_backward([output.arrays for output in result.outputs], result.metrics)
    return OperationOutcome(operation, payload, metrics=result.metrics)


def _failure(message: str) -> Payload:
    return {"error": message, "category": "user"}
