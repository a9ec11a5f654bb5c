"""vLLM's weight transfer backend `headway`: buckets received over a private process group, staged beside the weights
that serve.

It lives in the worker process. The worker's RPC loop is serial, so whatever waits for the network runs in a thread of
its own: joining a group, and receiving into the staging buffers. Only a load touches the model, and it runs within one
call, so that no step can see half of it.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, materialize_layer

from generator.weights.group import BroadcastRanks
from generator.weights.hashes import update_digest, verify_bucket
from generator.weights.held_base import HeldBase, check_factors, view_of
from generator.weights.plan import WeightSyncError
from generator.weights.policy_adapter import PolicyAdapter
from generator.weights.slices import ReadTrace, check_reads, is_sliced, whole_tensors, worth_sending
from protocol.fleet import BucketSpec, JoinGroup, Prepare, TensorSpec, is_factor
from services.process import DaemonThreads

logger = logging.getLogger(__name__)

BACKEND = "headway"


@dataclass
class GroupInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """vLLM's init call: the JoinGroup, as JSON."""

    spec: str


@dataclass
class PlanInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """vLLM's update call. Empty: the plan is given to `stage` before."""


class BucketMissing(WeightSyncError):
    """A bucket that was to come within the pause did not, or was damaged."""


class HeadwayTransferEngine(WeightTransferEngine[GroupInfo, PlanInfo]):  # type: ignore[misc]
    """Joins, receives and loads. One operation of the network runs at a time; a failed one throws the group away."""

    init_info_cls = GroupInfo
    update_info_cls = PlanInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._threads = DaemonThreads(name="headway-weights")
        self._group: BroadcastRanks | None = None
        self._operation: Future[None] | None = None
        self._plan: Prepare | None = None
        self._staged: list[torch.Tensor] | None = None
        self._from_files = False
        self._loaded = ""
        self._fingerprint = ""
        self._spare: list[torch.Tensor] = []
        self._lock = threading.Lock()
        """Of what is staged, and of spare buffers: an operation that was overtaken by another one runs beside it."""
        self._deadline = float("inf")
        self.wait_s = 0.0
        """Seconds of the last load in which it waited for buckets that were not staged."""
        self.touched = False
        self._parameters = _loaded_parameters(model)
        self._written: set[torch.nn.Module] = set()
        self._worker = vllm_config.parallel_config.rank
        self._trace: ReadTrace | None = None
        """Of the load that is under way, if it is watched."""
        self._takes_slices = int(vllm_config.parallel_config.tensor_parallel_size) > 1
        self._watched: Sequence[Sequence[TensorSpec]] = ()
        """Slices, bucket for bucket, whose load was watched: another load of the same ones reads what that one did."""
        self._placed: dict[int, Sequence[tuple[str, torch.Tensor]]] = {}
        """Tensors of slices that are in their places already, by the id of their buffer."""
        self.slices = ""
        """WorkerSlices as JSON, of the last load of whole tensors; empty if they save nothing."""
        self._layers: PolicyAdapter | None = None
        self._in_layers = False
        self._base = ""
        """Digest of the base weights that the model has, while its layers hold an adapter."""
        self._held = HeldBase()
        self._is_merged = False
        self._merged: list[tuple[BucketSpec, torch.Tensor]] | None = None
        self._for_layers: list[tuple[BucketSpec, torch.Tensor]] = []

    def take_layers(self, layers: PolicyAdapter) -> None:
        """The model has LoRA layers, which adapters are held in from now on, and not added to its weights."""
        self._layers, self._in_layers = layers, True
        with layers.away():
            self._parameters = _loaded_parameters(self.model)

    def _take(self, plan: Prepare) -> None:
        """This plan is to be staged. Raises WeightSyncError if it could not be loaded, before any of it comes."""
        self._forget_staged()
        self._for_layers = []
        if plan.adapter is not None:
            self._check_layers(plan)
            held = self._base if self._in_layers else self._held.digest
            if not plan.brings_base and held != plan.adapter.base:
                raise WeightSyncError(f"an adapter to base weights {plan.adapter.base} came, held are {held or 'none'}")
            base = [bucket for bucket in plan.buckets if not _has_factors(bucket)]
            if base or not self._in_layers:
                check_factors(plan, base or [bucket for bucket, _ in self._held.buckets])
        self._plan = plan

    def _check_layers(self, plan: Prepare) -> None:
        """Turns to adding adapters to the weights, from the first one on that LoRA layers cannot hold."""
        assert plan.adapter is not None
        if self._layers is None or not self._in_layers:
            return
        names = [tensor.name for bucket in plan.buckets for tensor in bucket.tensors if is_factor(tensor.name)]
        if fault := self._layers.fault(names, plan.adapter):
            logger.warning("the learner's adapter is added to the weights here: %s", fault)
            self._in_layers = False

    def _merges(self, plan: Prepare) -> bool:
        return plan.adapter is not None and not self._in_layers

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        """Begin to join a group; `progress` says when that is done. A group held before is dropped."""
        self.abandon()
        spec = JoinGroup.model_validate_json(init_info.spec)
        self._run(lambda operation: self._join(operation, spec))

    def stage(self, plan: Prepare) -> None:
        """Begin to receive every bucket of `plan`; `progress` says when all are here and verified."""
        group = self._joined()
        self._take(plan)
        self._run(lambda _: self._receive_all(group, plan))

    def stage_files(self, plan: Prepare, paths: Sequence[str]) -> None:
        """Begin to read every bucket of `plan` from a local file each; `progress` as for `stage`."""
        self._take(plan)
        self._run(lambda _: self._read_all(plan, paths))

    def expect(self, plan: Prepare) -> None:
        """Take note of a plan whose buckets will be received during the load itself."""
        self._joined()
        self._take(plan)

    def progress(self) -> bool:
        """True if the last operation has ended well. Raises WeightSyncError if it failed."""
        if self._operation is None:
            raise WeightSyncError("no operation was begun: the group was abandoned")
        if not self._operation.done():
            return False
        self._operation.result()
        return True

    def abandon(self) -> None:
        """Drop the group, and what was staged. A thread that still waits in it ends by its own timeout, unheard."""
        self._group = None
        self._operation = None
        self._forget_staged()

    def _forget_staged(self) -> None:
        with self._lock:
            self._plan = None
            self._staged = self._merged = None
            self._placed = {}

    def start_weight_update(self) -> None:
        self.touched = True
        self._base = ""
        _forget_half_loaded_layers(self.model)
        _pack_experts_with_the_load(self.model)
        initialize_layerwise_reload(self.model)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within it, a load; what it reads is noted, where slices may be sent. Raises WeightSyncError for slices that
        were too small.
        """
        plan = self._plan
        assert plan is not None, "nothing was staged"
        self.slices = ""
        if plan.adapter is not None or not (plan.slices or self._takes_slices):
            yield
            return
        trace = None if self._was_watched(plan) else ReadTrace()
        with self._refusing_slices_after_a_fault(plan):
            self._trace = trace
            try:
                with trace or nullcontext():
                    yield
            finally:
                self._trace = None
            if plan.slices and trace is not None:
                check_reads(trace, plan.arriving(self._worker))
                self._watched = [bucket.tensors for bucket in plan.arriving(self._worker)]
        if trace is not None and not plan.slices:
            self.slices = worth_sending(trace, plan.buckets)

    @contextmanager
    def _refusing_slices_after_a_fault(self, plan: Prepare) -> Iterator[None]:
        """A load of slices that fails for another reason than buckets that do not arrive would fail each time."""
        is_faulty = bool(plan.slices)
        try:
            yield
            is_faulty = False
        except BucketMissing:
            is_faulty = False
            raise
        finally:
            if is_faulty:
                logger.warning("a load of slices failed: this worker takes whole tensors from now on")
                self._takes_slices = False

    def _was_watched(self, plan: Prepare) -> bool:
        return bool(plan.slices) and [bucket.tensors for bucket in plan.arriving(self._worker)] == self._watched

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load every bucket of the plan. Unlike the base class it does not ask for an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def receive_weights(self, update_info: PlanInfo) -> None:
        plan = self._plan
        assert plan is not None, "nothing was staged"
        loaded: set[str] = set()
        for bucket, buffer in self._whole(plan):
            loaded |= self._load(bucket, buffer)
        missing = sorted(self._parameters - loaded)
        if missing:
            raise WeightSyncError(f"the plan has no value for {len(missing)} parameters: {', '.join(missing[:5])}")

    def _load(self, bucket: BucketSpec, buffer: torch.Tensor) -> set[str]:
        """The names of the parameters that a bucket has values for.

        A reload gathers what comes by parameters' loaders. What a model writes into its parameters itself, as gpt-oss
        does with experts and sinks, is lost on its placeholders: such layers get memory, and the bucket once more.
        """
        tensors = self._tensors_of(bucket, buffer)
        loaded: set[str] = self.model.load_weights(iter(tensors))
        written = {
            self.model.get_submodule(name.rpartition(".")[0])
            for name in loaded & self._parameters
            if self.model.get_parameter(name).is_meta
        }
        # A loader may have been called that copies nothing, as that of embeddings does whose rows others have.
        written = {layer for layer in written if not get_layerwise_info(layer).loaded_weights}
        if written:
            for layer in written:
                materialize_layer(layer, get_layerwise_info(layer))
            self._written |= written
            with _loaders_at_rest(self.model):
                self.model.load_weights(iter(tensors))
        return loaded

    def _tensors_of(self, bucket: BucketSpec, buffer: torch.Tensor) -> Sequence[tuple[str, torch.Tensor]]:
        """The tensors of a bucket: slices within whole shapes, on the host as long as they are watched."""
        on_host = self._trace is not None
        where = torch.device("cpu") if on_host else self.device
        placed = self._placed.get(id(buffer)) or list(whole_tensors(bucket, buffer, device=where))
        if self._trace is not None and is_sliced(bucket):
            self._trace.watch_whole(placed)
        elif self._trace is not None:
            self._trace.watch(buffer, bucket.tensors)
        return placed

    def finish_weight_update(self) -> None:
        for layer in self._written:
            _layerwise_process(layer, get_layerwise_info(layer))
        self._written = set()
        finalize_layerwise_reload(self.model, self.model_config)
        _pack_heads_again(self.model)
        plan = self._plan
        assert plan is not None, "nothing was staged"
        base = [bucket for bucket, _ in self._held.buckets] if self._merges(plan) else plan.buckets
        factors = plan.buckets if self._merges(plan) else ()
        self._is_merged = self._merges(plan)
        hashes = [bucket.xxh3 for bucket in base if not _has_factors(bucket)]
        self._loaded = "".join([*hashes, *(bucket.xxh3 for bucket in factors if _has_factors(bucket))])

    @property
    def reloads(self) -> bool:
        """False if all that is to be loaded is an adapter into LoRA layers."""
        return self._plan is None or self._plan.brings_base or self._merges(self._plan)

    def without_layers(self) -> AbstractContextManager[None]:
        """Within it the model takes weights by the names that it has without LoRA layers."""
        return nullcontext() if self._layers is None else self._layers.away()

    def finish_load(self) -> None:
        """Ends a load: LoRA layers hold the plan's adapter from now on, or zeros."""
        plan = self._plan
        assert plan is not None, "nothing was staged"
        if self._layers is not None:
            buffers = self._for_layers if self.reloads else list(self._buffers(plan))
            self.touched = True
            if buffers and plan.adapter is not None:
                self._layers.load(_factors(buffers), plan.adapter)
                self._base = plan.adapter.base
            elif self.reloads:
                self._layers.clear()
        self.touched = False
        staged = [] if self._from_files or self._staged is None else self._staged
        self._spare = staged if self._merged is None else [buffer for _, buffer in self._merged]
        self._staged = self._merged = None
        self._placed = {}
        self._for_layers = []
        self._plan = None

    def first_bucket(self, *, ttl_s: float) -> None:
        """Without staging, wait for the first bucket: until it is here and verified, the old weights are whole.

        The load that follows may not wait for a bucket later than `ttl_s` from now.
        """
        self._deadline = time.monotonic() + ttl_s
        self.wait_s = 0.0
        plan = self._plan
        if plan is None:
            raise WeightSyncError("there is nothing to load: stage a plan first")
        if self._staged is None:
            self._staged = [self._waited_for(self._receiving(plan, 0))]
            self._from_files = False

    def begin_fingerprint(self) -> None:
        """Begin to hash the loaded parameters, while they serve; `progress` says when `fingerprint` is that of them."""
        self._run(lambda _: self._hash())

    def fingerprint(self) -> str:
        """A hash over the loaded parameters of this worker, by name. Equal weights on equal devices give equal ones."""
        return self._fingerprint

    def _hash(self) -> None:
        """On a CPU vLLM packs linear layers and keeps no other copy: for those stand the hashes of what was loaded."""
        digest = xxhash.xxh3_64()
        hidden = False
        for name, parameter in self.model.named_parameters():
            digest.update(name.encode())
            update_digest(digest, parameter.detach())
            hidden = hidden or parameter.numel() == 0
        if hidden or self._is_merged:  # a merge may round away what an adapter has moved by
            digest.update(self._loaded.encode())
        if self._layers is not None:
            self._layers.update(digest)
        self._fingerprint = str(digest.hexdigest())

    def shutdown(self) -> None:
        self.abandon()

    def _run(self, work: Callable[[Future[None]], None]) -> None:
        operation: Future[None] = Future()
        self._operation = operation

        def target() -> None:
            try:
                work(operation)
            except Exception as error:  # noqa: BLE001 - or whoever waits for the operation would wait for its deadline
                if self._operation is operation:
                    self._group = None
                operation.set_exception(_as_sync_error(error))
            else:
                operation.set_result(None)

        self._threads.start(target)

    def _joined(self) -> BroadcastRanks:
        if self._group is None:
            raise WeightSyncError("this worker is in no group: the last one failed or was abandoned; join a new one")
        return self._group

    def _join(self, operation: Future[None], spec: JoinGroup) -> None:
        group = BroadcastRanks(spec=spec, worker_rank=self.parallel_config.rank, device=self.device)
        if self._operation is operation:
            self._group = group

    def _receive_all(self, group: BroadcastRanks, plan: Prepare) -> None:
        staged: dict[int, torch.Tensor] = {}
        places = list(enumerate(plan.arriving(self._worker)))
        senders = sorted({bucket.sender for _, bucket in places})
        if len(senders) == 1 or not group.at_once:
            self._receive_in_order(group, places, staged)
        else:
            with ThreadPoolExecutor(len(senders), thread_name_prefix="headway-receive") as threads:
                shares = [[place for place in places if place[1].sender == sender] for sender in senders]
                for done in [threads.submit(self._receive_in_order, group, share, staged) for share in shares]:
                    done.result()
        self._all_are_here(plan, [staged[index] for index, _ in places], from_files=False)

    def _receive_in_order(
        self, group: BroadcastRanks, places: Sequence[tuple[int, BucketSpec]], staged: dict[int, torch.Tensor]
    ) -> None:
        """Each bucket is verified beside the arrival of the next one: the sender would wait for it."""
        with ThreadPoolExecutor(1, thread_name_prefix="headway-verify") as beside:
            checked: Future[None] | None = None
            for index, bucket in places:
                staged[index] = self._to_host(group=group, bucket=bucket, index=index)
                if checked is not None:
                    checked.result()
                checked = beside.submit(verify_bucket, staged[index], bucket=bucket, index=index)
            if checked is not None:
                checked.result()

    def _read_all(self, plan: Prepare, paths: Sequence[str]) -> None:
        if len(paths) != len(plan.buckets):
            raise WeightSyncError(f"the plan has {len(plan.buckets)} buckets, there are {len(paths)} files")
        staged = []
        for index, (bucket, path) in enumerate(zip(plan.buckets, paths, strict=True)):
            # Mapped, not copied: the file may be removed, and goes with the last use of its bytes.
            raw = torch.from_file(path, size=bucket.nbytes, dtype=torch.uint8)
            verify_bucket(raw, bucket=bucket, index=index)
            staged.append(raw)
        self._all_are_here(plan, staged, from_files=True)

    def _all_are_here(self, plan: Prepare, staged: list[torch.Tensor], *, from_files: bool) -> None:
        if self._plan is not plan:
            return
        merged = self._merge(plan, list(zip(plan.buckets, staged, strict=True))) if self._merges(plan) else None
        placed = self._put_in_place(plan, staged)
        with self._lock:
            if self._plan is plan:  # another one may have come while this one was merged
                self._staged, self._merged, self._from_files = staged, merged, from_files
                self._placed = placed

    def _put_in_place(
        self, plan: Prepare, staged: Sequence[torch.Tensor]
    ) -> dict[int, Sequence[tuple[str, torch.Tensor]]]:
        """Slices where they lie in the whole, beside what serves; on a GPU that is done as they are loaded, but for
        those that are watched.
        """
        if not plan.slices or (self.device.type != "cpu" and self._was_watched(plan)):
            return {}
        host = torch.device("cpu")
        pairs = zip(plan.arriving(self._worker), staged, strict=True)
        return {id(buffer): list(whole_tensors(bucket, buffer, device=host)) for bucket, buffer in pairs}

    def _merge(
        self, plan: Prepare, received: Sequence[tuple[BucketSpec, torch.Tensor]]
    ) -> list[tuple[BucketSpec, torch.Tensor]]:
        """Beside what serves, where there is staging: a load then takes as long as that of whole weights."""
        assert plan.adapter is not None
        with self._lock:
            if plan.brings_base and self._plan is plan:
                self._held.keep(plan.adapter.base, [each for each in received if not _has_factors(each[0])])
        return list(self._held.merged(_factors(received), plan.adapter, room=self._buffer))

    def _receive(self, *, group: BroadcastRanks, bucket: BucketSpec, index: int) -> torch.Tensor:
        """The bucket where the group puts it, for a load at once."""
        buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=group.device)
        group.receive(buffer=buffer, index=index, sender=bucket.sender)
        verify_bucket(buffer, bucket=bucket, index=index)
        return buffer

    def _to_host(self, *, group: BroadcastRanks, bucket: BucketSpec, index: int) -> torch.Tensor:
        """The bucket in host memory, not yet verified. Beside weights and cache a GPU has no room for a whole model.

        A loader copies to the device what this worker holds of each tensor, and no more.
        """
        host = self._buffer(bucket.nbytes)
        if group.device.type == "cpu":
            group.receive(buffer=host, index=index, sender=bucket.sender)
        else:
            landed = torch.empty(bucket.nbytes, dtype=torch.uint8, device=group.device)
            group.receive(buffer=landed, index=index, sender=bucket.sender)
            host.copy_(landed)
        return host

    def _buffer(self, nbytes: int) -> torch.Tensor:
        """Host memory, of the last update if that has the size: fresh memory costs a page fault for each page."""
        with self._lock:
            for i, buffer in enumerate(self._spare):
                if buffer.numel() == nbytes:
                    return self._spare.pop(i)
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.device.type != "cpu")

    def _whole(self, plan: Prepare) -> Iterator[tuple[BucketSpec, torch.Tensor]]:
        """Weights under the model's own names, adapters merged unless layers hold them."""
        if not self._merges(plan):
            buffers = self._buffers(plan)
            weights = [bucket for bucket in plan.arriving(self._worker) if not _has_factors(bucket)]
            yield from itertools.islice(buffers, len(weights))
            self._for_layers = list(buffers)  # the factors come last
            return
        if self._merged is None:
            self._merged = self._merge(plan, [(bucket, buffer.cpu()) for bucket, buffer in self._buffers(plan)])
        yield from self._merged or ()

    def _buffers(self, plan: Prepare) -> Iterator[tuple[BucketSpec, torch.Tensor]]:
        """The staged buckets, and then the rest as it arrives: each is received and verified beside the load of the one
        before.
        """
        staged, buckets = self._staged or [], plan.arriving(self._worker)
        left = range(len(staged), len(buckets))
        coming = self._receiving(plan, left[0]) if left else None
        yield from zip(buckets, staged, strict=False)
        for index in left:
            assert coming is not None, "there is one more"
            buffer = self._waited_for(coming)
            if time.monotonic() > self._deadline:
                raise BucketMissing(f"the pause outlived its time to live at bucket {index} of {len(buckets)}")
            coming = self._receiving(plan, index + 1) if index + 1 < len(buckets) else None
            yield buckets[index], buffer

    def _receiving(self, plan: Prepare, index: int) -> "Future[torch.Tensor]":
        """Begins to receive a bucket and to verify it, in a thread."""
        group, bucket = self._joined(), plan.arriving(self._worker)[index]
        future: Future[torch.Tensor] = Future()

        def target() -> None:
            try:
                future.set_result(self._receive(group=group, bucket=bucket, index=index))
            except Exception as error:  # noqa: BLE001 - or the load, and with it the engine, would wait for ever
                future.set_exception(_as_sync_error(error))

        self._threads.start(target)
        return future

    def _waited_for(self, coming: "Future[torch.Tensor]") -> torch.Tensor:
        start = time.perf_counter()
        try:
            return coming.result()
        except WeightSyncError as error:
            raise BucketMissing(error.reason) from error
        finally:
            self.wait_s += time.perf_counter() - start


def _as_sync_error(error: Exception) -> Exception:
    """Keeps an error that is expected; of any other the kind says more than its text."""
    if isinstance(error, WeightSyncError | RuntimeError | OSError):
        return error
    return WeightSyncError(f"{type(error).__name__}: {error}")


def _has_factors(bucket: BucketSpec) -> bool:
    return is_factor(bucket.tensors[0].name)


def _factors(received: Sequence[tuple[BucketSpec, torch.Tensor]]) -> dict[str, torch.Tensor]:
    buckets = [(bucket, buffer) for bucket, buffer in received if _has_factors(bucket)]
    return {spec.name: view_of(buffer, spec) for bucket, buffer in buckets for spec in bucket.tensors}


def _loaded_parameters(model: torch.nn.Module) -> frozenset[str]:
    return frozenset(name for name, _ in model.named_parameters() if _is_loaded(model, name))


def _pack_heads_again(model: torch.nn.Module) -> None:
    """A tied head gets no weight of its own in a reload, so its packed copy would keep the old embedding."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _pack_experts_with_the_load(model: torch.nn.Module) -> None:
    """On a CPU vLLM packs a layer's experts only as it makes their kernel: without one, the load makes a new one."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and method.unquantized_backend is UnquantizedMoeBackend.CPU:
            method.moe_kernel = None


def _is_loaded(model: torch.nn.Module, name: str) -> bool:
    """False for a parameter that a layer has made of others, such as those of latent attention."""
    layer, _, own = name.rpartition(".")
    parameters, _ = get_layerwise_info(model.get_submodule(layer)).restore_metadata
    return own in parameters or own in SKIP_TENSORS


@contextmanager
def _loaders_at_rest(model: torch.nn.Module) -> Iterator[None]:
    """Within it a reload takes nothing from parameters' loaders."""
    infos = [info for info in map(get_layerwise_info, model.modules()) if info.can_load()]
    totals = [info.load_numel_total for info in infos]
    try:
        for info in infos:
            info.load_numel_total = None
        yield
    finally:
        for info, total in zip(infos, totals, strict=True):
            info.load_numel_total = total


def _forget_half_loaded_layers(model: torch.nn.Module) -> None:
    """After a load that failed midway, the next would finish a layer too early that still counts what it got."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0


def register() -> None:
    """Make the backend known to vLLM in this process. Safe to call more than once."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, HeadwayTransferEngine)


def timed(call: Callable[[], None]) -> float:
    """Seconds that `call` takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
