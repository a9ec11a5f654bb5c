"""The service of tenants: what is accepted, in which order it is done, and what is on the disk before it is answered.

| loop | takes | waits for | is woken by |
|---|---|---|---|
| a request's handler | its body | the journal's sync | the journal |
| turns | operations whose turn has come | the trainer's thread | `_accept`, a resume |
| sweeps | what is old | a timer | time |

All state belongs to the event loop; the trainer's thread gets operations and gives outcomes. After a start the
journal's operations that no snapshot covers are in the queues again, with futures that nobody has retrieved.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import JsonValue

from learner.tenants.catalog import LossEntry, ModelEntry, SamplingEntry, SessionEntry
from learner.tenants.checkpoints import CheckpointFacts, CheckpointPath, TenantCheckpoints, checkpoint_path
from learner.tenants.custom_losses import CustomLosses
from learner.tenants.fairness import RoundBudget
from learner.tenants.futures import Payload, RequestReused, ResultFuture, ResultFutures
from learner.tenants.kept_curves import KeptCurves
from learner.tenants.keys import Tenant, TenantKeys
from learner.tenants.models import TrainingModels
from learner.tenants.operations import LoggedOperation, OperationLog
from learner.tenants.provenance import SequenceRecords
from learner.tenants.refusals import QueueFull, not_durable, unfit, unknown
from learner.tenants.run_records import RunRecords
from learner.tenants.sampling import AcceptedSample, Sampler, SamplingQueue
from learner.tenants.sessions import TenantSessions
from learner.tenants.snapshots import ModelSnapshots
from learner.tenants.targets import SamplingTargets, sampling_entry
from learner.tenants.tensor_files import TensorsDamaged
from learner.tenants.trainer import TenantTrainer
from learner.tenants.training_loop import TrainingLoop
from learner.tenants.turns import TrainerTurns
from learner.tenants.work import (
    ALL_WEIGHTS,
    LOAD_WEIGHTS,
    Operation,
    Work,
    WorkReader,
    digest_of_json,
    identify,
    shape_of,
    size_of,
)
from learner.training.client_operations import AdapterShape, OperationError
from protocol.tinker.bodies import (
    CopyWeights,
    CreateCustomLoss,
    CreateModel,
    CreateSamplingSession,
    FinishSession,
    LoadWeights,
    SampleBody,
    TinkerOptimizer,
)
from protocol.tinker.sampling import read_sample
from protocol.tinker.tensors import TinkerWireError
from services.http.refusals import RequestRefused

if TYPE_CHECKING:
    from learner.algorithms.client_graphs import LossGraph

logger = logging.getLogger(__name__)

_OFF_LOOP_BYTES = 1 << 20
"""A larger body is parsed in a thread."""
_SWEEP_S = 10.0
T = TypeVar("T")


@dataclass(frozen=True)
class ServedBase:
    """The base model that is served: its name is where clients look for its tokenizer."""

    name: str
    context_length: int
    architecture: str = ""


@dataclass(frozen=True)
class TenantSettings:
    """Bounds of the service. `snapshot_every`: operations between two snapshots of a model. `shared_tokens`: of an
    operation that may share passes with those of other models. `all_weights`: one model at a time, of all weights of
    the base model, in place of adapters.
    """

    snapshot_every: int = 64
    max_resident: int = 256
    round_tokens: int = 1 << 16
    round_s: float = 0.1
    shared_tokens: int = 1024
    retain_targets_s: float = 86_400.0
    all_weights: bool = False


class TenantService:
    """Everything behind the routes. Methods raise RequestRefused; those that write refuse when the disk does."""

    def __init__(
        self,
        *,
        folder: Path,
        keys: TenantKeys,
        base: ServedBase,
        trainer: TenantTrainer,
        sampler: Sampler,
        parse_graph: Callable[[CreateCustomLoss], "LossGraph"],
        settings: TenantSettings | None = None,
    ) -> None:
        """Reads what former lives left in the folder. Raises JournalDamaged, OSError."""
        self.keys, self.base, self._parse_graph = keys, base, parse_graph
        self._settings = settings or TenantSettings()
        self.log = OperationLog(folder / "journal")
        self.checkpoints = TenantCheckpoints(folder / "checkpoints")
        self._snapshots = ModelSnapshots(folder / "models")
        self.futures, self.models = ResultFutures(), TrainingModels()
        self.records = RunRecords()
        self._curves = KeptCurves(folder / "curves", self.records)
        self._curves.read()
        self.sessions = TenantSessions(self.log)
        recovered = self.log.recovered
        self.life = recovered.life
        self._sequences = SequenceRecords(folder / "sequences")
        self.samples = SamplingQueue(sampler=sampler, sequences=self._sequences, life=self.life, lost=recovered.samples)
        self._losses = CustomLosses(self.log, self.models)
        self._reader = WorkReader(
            losses=self.log.catalog.losses,
            parse_graph=self._graph_of,
            loss_used=self._losses.used,
            check=trainer.check,
            check_claims=self._sequences.check,
            sampled_versions=self._sequences.versions,
        )
        self._targets = SamplingTargets(checkpoints=self.checkpoints, log=self.log, sampler=sampler)
        self.training = self._training_loop(trainer)
        self._accepting: dict[str, asyncio.Task[None]] = {}
        self._making: dict[str, ModelEntry] = {}
        """Models on their way to the trainer and the disk: they count as there."""
        self.log.samples_awaited = self.samples.awaited
        self._resume()

    def _training_loop(self, trainer: TenantTrainer) -> TrainingLoop:
        return TrainingLoop(
            turns=TrainerTurns(
                trainer=trainer,
                checkpoints=self.checkpoints,
                snapshots=self._snapshots,
                shared_tokens=self._settings.shared_tokens,
            ),
            models=self.models,
            futures=self.futures,
            log=self.log,
            tenants=lambda: self.keys.by_name,
            serve=self._targets.serve,
            records=self.records,
            snapshot_every=self._settings.snapshot_every,
            max_resident=self._settings.max_resident,
            budget=RoundBudget(seconds=self._settings.round_s, most=self._settings.round_tokens),
        )

    # Requests.

    async def create_model(self, tenant: Tenant, body: CreateModel) -> str:
        """The name of the request; the model is there when it is answered."""
        session = self.sessions.get(body.session_id, owner=tenant.name)
        if body.base_model != self.base.name:
            raise unfit(f"base_model: {body.base_model!r}; this server trains {self.base.name!r}")
        _refuse_optimizer(body.optimizer_config)
        self._refuse_kind("lora_config", body.lora_config.rank if body.lora_config else None)
        model_id = f"{session.session_id}:train:{body.model_seq_id}"
        if model_id not in self.models.by_id:
            shape = ALL_WEIGHTS
            if body.lora_config is not None and body.lora_config.rank:
                shape = shape_of(body.lora_config, seed=secrets.randbits(62))
            entry = self._model_entry(session, model_id, shape, user_metadata=body.user_metadata)
            await self._make_model(tenant, entry)
        return f"{model_id}:create"

    async def load_into_new(self, tenant: Tenant, body: LoadWeights) -> str:
        """The name of the request that makes a model of a checkpoint."""
        if body.session_id is None or body.model_seq_id is None:
            raise unfit("load_weights: names neither a model with its seq_id nor a session with a model_seq_id")
        session = self.sessions.get(body.session_id, owner=tenant.name)
        facts = self.checkpoints.find(body.path, reader=tenant.name)
        if facts is None or facts.kind != "training":
            raise unknown("training checkpoint", body.path)
        if facts.base_model != self.base.name:
            raise unfit(f"path: {body.path} is of {facts.base_model!r}; this server trains {self.base.name!r}")
        if body.base_model not in (None, self.base.name):
            raise unfit(f"base_model: {body.base_model!r}; this server trains {self.base.name!r}")
        _refuse_optimizer(body.optimizer_config)
        self._refuse_kind("path", facts.shape.rank)
        model_id = f"{session.session_id}:train:{body.model_seq_id}"
        if model_id not in self.models.by_id:
            entry = self._model_entry(session, model_id, facts.shape, user_metadata=body.user_metadata, loads=body.path)
            await self._make_model(tenant, entry)
        whole = body.model_copy(update={"model_id": model_id, "seq_id": 0, "user_metadata": None})
        return await self.submit(tenant, LOAD_WEIGHTS, whole.model_dump_json().encode())

    async def submit(self, tenant: Tenant, kind: str, body: bytes) -> str:
        """Accept an operation of a model, and return the name of its request; sent again it is the same one."""
        logged = await self._off_loop(len(body), lambda: identify(kind, body))
        model = self.models.find(logged.model_id, owner=tenant.name)
        if model is None:
            raise unknown("model", logged.model_id)
        if model.damage:
            raise unfit(model.damage)
        request_id = f"{logged.model_id}:{logged.seq_id}"
        known = self.futures.get(request_id, owner=tenant.name)
        again = known is not None and known.given_up and known.digest == logged.digest
        if known is None and logged.seq_id < model.next_seq:
            return request_id  # done long ago, and its result was retrieved
        awaited = model.idle and logged.seq_id == model.next_seq  # those that wait may wait for it
        if (known is None or again) and not awaited:
            self._refuse_flood(tenant, len(logged.body))
        if known is None or again:
            self._refuse_hoard(tenant)
        if again:
            self.futures.forget(request_id)  # its client came back: what it sends again is done in its turn
        future, new = self._open(request_id, tenant.name, logged.digest, kind)
        if new or request_id in self._accepting:
            await self._once(request_id, lambda: self._accept(tenant, logged, future))
        return request_id

    async def _accept(self, tenant: Tenant, logged: LoggedOperation, future: ResultFuture) -> None:
        model = self.models.by_id[logged.model_id]
        model.accepting += 1  # before it is read: what it needs must stay from there on
        try:
            logged, work = await self._off_loop(
                len(logged.body), lambda: self._reader.accept(logged, owner=tenant.name)
            )
            await self._durably(self.log.operation(logged))
            self._enqueue(logged, work, future)
        except BaseException:  # of a request that was not accepted nobody must be told that it was
            self.futures.forget(future.request_id)
            raise
        finally:
            model.accepting -= 1

    async def unload_model(self, tenant: Tenant, model_id: str) -> None:
        """Give back what a model takes; its checkpoints stay."""
        model = self.models.find(model_id, owner=tenant.name)
        if model is None:
            raise unknown("model", model_id)
        entry = model.entry.model_copy(update={"unloaded": True})
        await self._durably(self.log.entry(entry))
        model.entry = entry
        self.models.drop_all(model)
        await self.training.remove(model)

    async def create_custom_loss(self, tenant: Tenant, body: CreateCustomLoss) -> str:
        """The name of the request; its answer names the loss."""
        session = self.sessions.get(body.session_id, owner=tenant.name)
        loss_id = f"{session.session_id}:loss:{body.custom_loss_seq_id}"
        if loss_id not in self.log.catalog.losses:
            try:
                self._parse_graph(body)
            except ValueError as error:
                future, _ = self._open(loss_id, tenant.name, "", "create_custom_loss")
                future.finish({"error": str(error), "category": "user"})
                return loss_id
            entry = LossEntry(
                owner=tenant.name, session_id=session.session_id, created_at=time.time(), loss_id=loss_id, body=body
            )
            await self._durably(self.log.entry(entry))
        self._losses.made(loss_id)
        return loss_id

    async def create_sampling_session(self, tenant: Tenant, body: CreateSamplingSession) -> str:
        """The name of the sampling session."""
        session = self.sessions.get(body.session_id, owner=tenant.name)
        name = f"{session.session_id}:sample:{body.sampling_session_seq_id}"
        if name in self.log.catalog.samplings:
            return name
        target_id = None
        if body.model_path is not None:
            facts = self.checkpoints.find(body.model_path, reader=tenant.name)
            if facts is None or facts.kind == "target":
                raise unknown("checkpoint", body.model_path)
            target_id = facts.path
        elif body.base_model != self.base.name:
            raise unfit(f"base_model: {body.base_model!r}; this server samples from {self.base.name!r}")
        entry = sampling_entry(
            tenant.name, name, base_model=self.base.name, target_id=target_id, model_path=body.model_path
        )
        await self._durably(self.log.entry(entry))
        return name

    async def join_sampling_session(self, tenant: Tenant, name: str) -> int:
        """The number of one more client of the sampling session."""
        entry = self.sampling(tenant, name)
        joined = entry.model_copy(update={"clones": entry.clones + 1})
        self.log.catalog.put(joined)  # at once: two that join together must not get the same number
        await self._durably(self.log.entry(joined))
        return joined.clones

    async def sample(self, tenant: Tenant, body: SampleBody) -> str:
        """Accept a sample, and return the name of its request."""
        entry = self.sampling(tenant, body.sampling_session_id)
        request_id = f"{entry.sampling_session_id}:{body.seq_id}"
        try:
            request = read_sample(body)
        except TinkerWireError as error:
            raise unfit(str(error)) from error
        room = self.base.context_length - len(request.prompt)
        if room < 1:
            raise unfit(f"prompt: {len(request.prompt)} tokens; the model has room for {self.base.context_length}")
        request = replace(request, max_tokens=min(room, request.max_tokens))
        digest = digest_of_json("asample", body.model_dump_json().encode())
        if self.futures.get(request_id, owner=tenant.name) is None and self.samples.full(tenant):
            what = f"{tenant.max_samples} samples of yours are under way, as many as you may have at once"
            raise self._full(tenant, what)
        if self.futures.get(request_id, owner=tenant.name) is None:
            self._refuse_hoard(tenant)
        weights = self._targets.weights_of(entry)
        future, new = self._open(request_id, tenant.name, digest, "asample")
        sample = AcceptedSample(future, entry, weights, body, request)
        if new:
            self.samples.count_in(sample)  # at once: others that come meanwhile must not find room that is taken
        if new or request_id in self._accepting:
            await self._once(request_id, lambda: self._accept_sample(sample))
        return request_id

    async def _accept_sample(self, sample: AcceptedSample) -> None:
        try:
            await self._durably(self.log.sample(sample.entry.sampling_session_id, sample.future.request_id))
        except BaseException:
            self.futures.forget(sample.future.request_id)
            self.samples.count_out(sample)
            raise
        self.samples.start(sample)

    def sampling(self, tenant: Tenant, name: str) -> SamplingEntry:
        """The tenant's sampling session. Raises RequestRefused."""
        entry = self.log.catalog.samplings.get(name)
        if entry is None or entry.owner != tenant.name:
            raise unknown("sampling session", name)
        return entry

    async def copy_weights(self, tenant: Tenant, body: CopyWeights, *, key: str) -> str:
        """The path of a copy of a checkpoint, which is a run of its own, and where the client names no session in a
        session of its own, by the `key` of the request.
        """
        facts = self.checkpoints.find(body.source_path, reader=tenant.name)
        source = CheckpointPath.parse(body.source_path)
        if facts is None or source is None:
            raise unknown("checkpoint", body.source_path)
        if body.destination_project_id is not None:
            raise unfit("destination_project_id: projects are not served; leave it out")
        if (body.session_id is None) != (body.model_seq_id is None):
            raise unfit("copy_weights: a session_id goes with a model_seq_id; name both, or neither")
        number = body.model_seq_id or 0
        if body.session_id is None:
            session = await self._session_of_request(tenant, key)
        else:
            session = self.sessions.get(body.session_id, owner=tenant.name)
        run_id = f"{session.session_id}:train:{number}"
        path = checkpoint_path(run_id, source.folder, source.name)
        run = self.models.by_id.get(run_id)
        former = self.checkpoints.former(path)
        is_other = former is not None and not former.deleted and former.copied_from != facts.path
        if is_other or run_id in self._making or (run is not None and not run.entry.unloaded):
            raise unfit(f"model_seq_id: {number} is taken by {run_id}; a copy is a run of its own: count up")
        now = time.time()
        copy = facts.model_copy(
            update={
                "path": path, "run_id": run_id, "owner": tenant.name, "created_at": now, "public": False, "seq_id": 0,
                "expires_at": None if body.ttl_seconds is None else now + body.ttl_seconds, "copied_from": facts.path,
            }
        )  # fmt: skip
        entry = self._model_entry(session, run_id, facts.shape, unloaded=True)
        await self._once(path, lambda: self._copy(facts, copy, entry))
        return path

    async def _session_of_request(self, tenant: Tenant, key: str) -> SessionEntry:
        try:
            return await self.sessions.of_request(tenant.name, key)
        except OSError as error:
            raise not_durable(error) from error

    async def _copy(self, source: CheckpointFacts, copy: CheckpointFacts, entry: ModelEntry) -> None:
        """The run first, without which nobody would find the copy that a death or a full disk has left."""
        if entry.model_id not in self.models.by_id:
            await self._durably(self.log.entry(entry))
            self.models.add_model(entry, covered=None)
        former = self.checkpoints.former(copy.path)
        try:
            if former is None or former.deleted:
                await self._durably(asyncio.to_thread(self.checkpoints.copy, source, copy))
        except TensorsDamaged as error:
            raise unfit(f"source_path: {error}") from error

    def derived(self, tenant: Tenant, request_id: str) -> Payload | None:
        """The answer to a request whose result is what the catalog says; None if it says nothing."""
        model_id, _, last = request_id.rpartition(":")
        model = self.models.find(model_id, owner=tenant.name)
        if model is not None and last == "create":
            return {"model_id": model_id, "type": "create_model"}
        loss = self.log.catalog.losses.get(request_id)
        if loss is not None and loss.owner == tenant.name:
            return {"loss_id": request_id, "type": "create_custom_loss"}
        return None

    def queue_reason(self, future: ResultFuture) -> str:
        """The reason why a request has no result yet; empty if it is simply not done."""
        model_id, _, last = future.request_id.rpartition(":")
        model = self.models.by_id.get(model_id)
        if model is not None and last.isdigit() and int(last) in model.early:
            return f"waiting for operation {model.next_seq} of the model, which has not come"
        return ""

    # Loops.

    async def run(self) -> None:
        """Do what was accepted, until cancelled."""
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self.training.run())
            loops.create_task(self._run_sweeps())

    async def close(self) -> None:
        """End what is under way in this process; all that was accepted is on the disk."""
        await self.samples.close()
        await self.training.close()
        await _swept(self._curves.write(now=True))
        await self.log.close()

    async def _run_sweeps(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            await self.sweep()

    async def sweep(self) -> None:
        """Park what the dead have left, and drop what is old. What the disk refuses is left to the next sweep."""
        await _swept(self._end_removed())
        await _swept(self.sessions.tidy())
        self.futures.sweep()
        self._drop_hoards()
        await _swept(asyncio.to_thread(self.checkpoints.expire))
        dead = set(self.sessions.dead())
        left = [model for model in self.models.by_id.values() if model.entry.session_id in dead]
        for model in left:
            self.models.drop_early(
                model,
                f"operation {model.next_seq} of the model has not come, and its session was silent for too long; "
                "send that one, and this one again",
            )
        await _swept(self.training.park(left))
        old = {each for each in dead if self.sessions.silent_s(each) > self._settings.retain_targets_s}
        self.futures.forget_results(old)
        for entry in [each for each in self.log.catalog.samplings.values() if each.session_id in old]:
            self.samples.forget(entry.sampling_session_id)
            await _swept(self._targets.drop(entry))
        await _swept(self._losses.drop(old))
        await _swept(self._curves.write())
        await _swept(self.training.tidy())

    def _drop_hoards(self) -> None:
        """Drop results that the clients of dead sessions have not fetched, of tenants with too many of them."""
        dead = set(self.sessions.dead())
        for owner, tenant in self.keys.by_name.items():
            if self.futures.unfetched_bytes(owner) > tenant.max_result_bytes:
                self.futures.forget_results(dead, owner=owner)
                self.futures.sweep()  # counts them again

    async def _end_removed(self) -> None:
        """End the sessions of tenants that the keys file no longer has. Operations that were accepted are still done;
        samples are stopped.
        """
        known = self.keys.by_name
        for owner in {each.owner for each in self.samples.waiting.values()} - known.keys():
            self.samples.cancel_all(owner)
        for entry in [each for each in self.sessions.living() if each.owner not in known]:
            logger.info("the key of %s was removed: %s is ended", entry.owner, entry.session_id)
            await self.sessions.finish(entry.session_id, FinishSession(status="key_removed"), owner=entry.owner)

    # Parts.

    def _resume(self) -> None:
        catalog, recovered = self.log.catalog, self.log.recovered
        for entry in catalog.models.values():
            if entry.unloaded:
                self._snapshots.remove(entry.model_id)
            facts = self._snapshots.covered.get(entry.model_id)
            known = self.models.add_model(entry, covered=None if facts is None else facts.seq_id)
            known.damage = self._snapshots.damage(entry.model_id)
            if facts is not None:
                self._resume_results(entry)
        for (model_id, seq_id), logged in sorted(recovered.operations.items()):
            model = self.models.by_id.get(model_id)
            if model is None or model.entry.unloaded or seq_id <= model.snapshot_seq:
                continue
            future, _ = self.futures.open(
                f"{model_id}:{seq_id}", owner=model.entry.owner, digest=logged.digest, kind=logged.kind
            )
            if model.damage:
                future.given_up = True
                future.finish({"error": model.damage, "category": "server"})
                continue
            work = self._reader.read(logged.kind, logged.body, owner=model.entry.owner)
            self._enqueue(logged, work, future)
        recovered.operations.clear()

    def _resume_results(self, entry: ModelEntry) -> None:
        for result in self._snapshots.results(entry.model_id):
            future, _ = self.futures.open(result.request_id, owner=entry.owner, digest=result.digest, kind=result.kind)
            future.finish(result.payload)
            if result.retrieved:
                self.futures.retrieved(future)

    def _graph_of(self, loss: LossEntry) -> "LossGraph":
        return self._parse_graph(loss.body)

    def _model_entry(
        self,
        session: SessionEntry,
        model_id: str,
        shape: AdapterShape,
        *,
        user_metadata: dict[str, JsonValue] | None = None,
        loads: str | None = None,
        unloaded: bool = False,
    ) -> ModelEntry:
        return ModelEntry(
            owner=session.owner,
            session_id=session.session_id,
            created_at=time.time(),
            model_id=model_id,
            base_model=self.base.name,
            shape=shape,
            user_metadata=user_metadata,
            loads=loads,
            unloaded=unloaded,
        )

    async def _make_model(self, tenant: Tenant, entry: ModelEntry) -> None:
        if entry.model_id not in self._accepting:
            self._refuse_more_models(tenant)
            self._making[entry.model_id] = entry
        await self._once(entry.model_id, lambda: self._add_model(entry))

    async def _add_model(self, entry: ModelEntry) -> None:
        try:
            await self._add_made_model(entry)
        finally:
            self._making.pop(entry.model_id, None)

    async def _add_made_model(self, entry: ModelEntry) -> None:
        """Make it on the trainer first, so that a shape which the base cannot have is refused and not accepted."""
        if entry.loads is None:
            try:
                await self.training.create(entry)
            except OperationError as error:
                raise unfit(f"lora_config: {error}") from error
        try:
            await self._durably(self.log.entry(entry))
        except RequestRefused:
            await self.training.discard(entry)  # a retry has another seed
            raise
        if entry.model_id not in self.models.by_id:
            self.models.add_model(entry, covered=None).resident = entry.loads is None

    def _enqueue(self, logged: LoggedOperation, work: Work, future: ResultFuture) -> None:
        size = size_of(logged.body, work)
        operation = Operation(logged.model_id, logged.seq_id, logged.kind, work, future, size)
        self.models.enqueue(operation)
        self.training.wake()

    def _open(self, request_id: str, owner: str, digest: str, kind: str) -> tuple[ResultFuture, bool]:
        try:
            return self.futures.open(request_id, owner=owner, digest=digest, kind=kind)
        except RequestReused as error:
            raise unfit(str(error)) from error

    async def _durably(self, written: Awaitable[None]) -> None:
        """Wait for a write. Raises RequestRefused if it fails, by which the client sends it again."""
        try:
            await written
        except OSError as error:
            raise not_durable(error) from error

    async def _once(self, name: str, accept: Callable[[], Coroutine[None, None, None]]) -> None:
        """Accept a request. It goes on if its client leaves: what is in the journal must be in the queue, too.

        A retry that comes meanwhile waits for the same, since it must not be told more than is on the disk.
        """
        if name not in self._accepting:
            self._accepting[name] = asyncio.create_task(accept())
            self._accepting[name].add_done_callback(lambda _: self._accepting.pop(name))
        await asyncio.shield(self._accepting[name])

    async def _off_loop(self, size: int, work: Callable[[], T]) -> T:
        try:
            return work() if size < _OFF_LOOP_BYTES else await asyncio.to_thread(work)
        except (TinkerWireError, ValueError) as error:
            raise unfit(str(error)) from error

    def _refuse_kind(self, field: str, rank: int | None) -> None:
        """Raises RequestRefused for an adapter where all weights are trained, and for all weights elsewhere."""
        if not rank and not self._settings.all_weights:
            got = "missing" if rank is None else "of rank 0"
            raise unfit(
                f"{field}: {got}, which asks for all weights of the model; this server trains adapters alone: send a "
                "rank of at least 1, as create_lora_training_client does, or have tinker.all_weights set"
            )
        if rank and self._settings.all_weights:
            raise unfit(
                f"{field}: of rank {rank}; this server trains all weights of the model (tinker.all_weights), and no "
                "adapters beside them: send rank 0, or ask a server of adapters"
            )

    def _refuse_more_models(self, tenant: Tenant) -> None:
        there = [each.entry for each in self.models.by_id.values() if not each.entry.unloaded]
        there += [entry for model_id, entry in self._making.items() if model_id not in self.models.by_id]
        mine = [entry.model_id for entry in there if entry.owner == tenant.name]
        if self._settings.all_weights and there:
            whose = f"your model {mine[0]}" if mine else "another tenant's model"
            raise unfit(
                f"all weights are trained by {whose}, and there is room for one such model alone: unload that one "
                "first; what it has saved stays"
            )
        if len(mine) >= tenant.max_models:
            raise unfit(f"{len(mine)} training models are yours, as many as you may have; unload one first")

    def _refuse_flood(self, tenant: Tenant, size: int) -> None:
        queued = self.models.queue_length(tenant.name)
        if queued.operations >= tenant.max_queued_operations or queued.size + size > tenant.max_queued_bytes:
            what = f"{queued.operations} operations of yours with {queued.size} bytes wait, as many as may at once"
            raise self._full(tenant, what)

    def _refuse_hoard(self, tenant: Tenant) -> None:
        kept = self.futures.unfetched_bytes(tenant.name)
        if kept > tenant.max_result_bytes:
            what = f"{kept} bytes of results of yours wait to be retrieved, more than you may leave here; retrieve them"
            raise self._full(tenant, what)

    def _full(self, tenant: Tenant, message: str) -> QueueFull:
        self.records.refused(tenant.name)
        return QueueFull(message)


def _refuse_optimizer(config: TinkerOptimizer | None) -> None:
    if config is not None and config.type != "adamw":
        raise unfit(f"optimizer_config.type: {config.type!r}; this server has adamw alone")


async def _swept(part: Awaitable[object]) -> None:
    try:
        await part
    except OSError as error:
        logger.warning("a part of a sweep failed, and is tried again at the next one: %s", error)
