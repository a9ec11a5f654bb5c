"""vLLM's weight transfer backend `headway`: buckets received over a private process group, staged beside the weights
that serve.

It lives in the worker process. The worker's RPC loop is serial, so whatever waits for the network runs in a thread of
its own: joining a group, and receiving into the staging buffers. Only a load touches the model, and it runs within one
call, so that no step can see half of it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
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

from generator.weights.group import BroadcastRank
from generator.weights.plan import WeightSyncError, tensor_bytes
from protocol.fleet import BucketSpec, JoinGroup, Prepare
from services.process import DaemonThreads

BACKEND = "headway"
DIGEST_CHUNK_BYTES = 64 << 20


@dataclass
class GroupInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """vLLM's init call: the JoinGroup, as JSON."""

    spec: str


@dataclass
class PlanInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """vLLM's update call. Empty: the plan is given to `stage` before."""


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
        self._group: BroadcastRank | None = None
        self._operation: Future[None] | None = None
        self._plan: Prepare | None = None
        self._staged: list[torch.Tensor] | None = None
        self._from_files = False
        self._loaded = ""
        self._fingerprint = ""
        self._spare: list[torch.Tensor] = []
        self._deadline = float("inf")
        self.touched = False
        self._parameters = frozenset(name for name, _ in model.named_parameters() if _is_loaded(model, name))
        self._written: set[torch.nn.Module] = set()

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        """Begin to join a group; `progress` says when that is done. A group held before is dropped."""
        self.abandon()
        spec = JoinGroup.model_validate_json(init_info.spec)
        self._run(lambda operation: self._join(operation, spec))

    def stage(self, plan: Prepare) -> None:
        """Begin to receive every bucket of `plan`; `progress` says when all are here and verified."""
        group = self._joined()
        self._staged = None
        self._plan = plan
        self._run(lambda _: self._receive_all(group, plan))

    def stage_files(self, plan: Prepare, paths: Sequence[str]) -> None:
        """Begin to read every bucket of `plan` from a local file each; `progress` as for `stage`."""
        self._staged = None
        self._plan = plan
        self._run(lambda _: self._read_all(plan, paths))

    def expect(self, plan: Prepare) -> None:
        """Take note of a plan whose buckets will be received during the load itself."""
        self._joined()
        self._staged = None
        self._plan = plan

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
        self._plan = None
        self._staged = None

    def start_weight_update(self) -> None:
        self.touched = True
        _forget_half_loaded_layers(self.model)
        _pack_experts_with_the_load(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load every bucket of the plan. Unlike the base class it does not ask for an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def receive_weights(self, update_info: PlanInfo) -> None:
        plan = self._plan
        assert plan is not None, "nothing was staged"
        loaded: set[str] = set()
        for bucket, buffer in self._buffers(plan):
            loaded |= self._load(bucket, buffer)
        missing = sorted(self._parameters - loaded)
        if missing:
            raise WeightSyncError(f"the plan has no value for {len(missing)} parameters: {', '.join(missing[:5])}")

    def _load(self, bucket: BucketSpec, buffer: torch.Tensor) -> set[str]:
        """The names of the parameters that a bucket has values for.

        A reload gathers what comes by parameters' loaders. What a model writes into its parameters itself, as gpt-oss
        does with experts and sinks, is lost on its placeholders: such layers get memory, and the bucket once more.
        """
        loaded: set[str] = self.model.load_weights(_views(bucket=bucket, buffer=buffer))
        written = {
            self.model.get_submodule(name.rpartition(".")[0])
            for name in loaded & self._parameters
            if self.model.get_parameter(name).is_meta
        }
        written = {layer for layer in written if get_layerwise_info(layer).load_numel == 0}
        if written:
            for layer in written:
                materialize_layer(layer, get_layerwise_info(layer))
            self._written |= written
            with _loaders_at_rest(self.model):
                self.model.load_weights(_views(bucket=bucket, buffer=buffer))
        return loaded

    def finish_weight_update(self) -> None:
        for layer in self._written:
            _layerwise_process(layer, get_layerwise_info(layer))
        self._written = set()
        finalize_layerwise_reload(self.model, self.model_config)
        _pack_heads_again(self.model)
        self.touched = False
        self._loaded = "".join(bucket.xxh3 for bucket in self._plan.buckets) if self._plan is not None else ""
        self._spare = [] if self._from_files else self._staged or []
        self._staged = None
        self._plan = None

    def first_bucket(self, *, ttl_s: float) -> None:
        """Without staging, wait for the first bucket: until it is here and verified, the old weights are whole.

        The load that follows may not wait for a bucket later than `ttl_s` from now.
        """
        self._deadline = time.monotonic() + ttl_s
        plan = self._plan
        if plan is None:
            raise WeightSyncError("there is nothing to load: stage a plan first")
        if self._staged is None and plan.buckets:
            self._staged = [self._receive(group=self._joined(), bucket=plan.buckets[0], index=0)]
            self._from_files = False

    def begin_fingerprint(self) -> None:
        """Begin to hash the loaded parameters, while they serve; `progress` says when `fingerprint` is that of them."""
        self._run(lambda _: self._hash())

    def fingerprint(self) -> str:
        """XXH3 over the loaded parameters of this worker, by name. Equal weights on equal devices give equal ones."""
        return self._fingerprint

    def _hash(self) -> None:
        """On a CPU vLLM packs linear layers and keeps no other copy: for those stand the hashes of what was loaded."""
        digest = xxhash.xxh3_64()
        hidden = False
        for name, parameter in self.model.named_parameters():
            digest.update(name.encode())
            _update_digest(digest, parameter.detach())
            hidden = hidden or parameter.numel() == 0
        if hidden:
            digest.update(self._loaded.encode())
        self._fingerprint = str(digest.hexdigest())

    def shutdown(self) -> None:
        self.abandon()

    def _run(self, work: Callable[[Future[None]], None]) -> None:
        operation: Future[None] = Future()
        self._operation = operation

        def target() -> None:
            try:
                work(operation)
            except (WeightSyncError, RuntimeError, OSError) as error:
                if self._operation is operation:
                    self._group = None
                operation.set_exception(error)
            else:
                operation.set_result(None)

        self._threads.start(target)

    def _joined(self) -> BroadcastRank:
        if self._group is None:
            raise WeightSyncError("this worker is in no group: the last one failed or was abandoned; join a new one")
        return self._group

    def _join(self, operation: Future[None], spec: JoinGroup) -> None:
        group = BroadcastRank(spec=spec, worker_rank=self.parallel_config.rank, device=self.device)
        if self._operation is operation:
            self._group = group

    def _receive_all(self, group: BroadcastRank, plan: Prepare) -> None:
        """Each bucket is verified beside the arrival of the next one: the sender would wait for it."""
        staged: list[torch.Tensor] = []
        with ThreadPoolExecutor(1, thread_name_prefix="headway-verify") as beside:
            checked: Future[None] | None = None
            for index, bucket in enumerate(plan.buckets):
                staged.append(self._to_host(group=group, bucket=bucket, index=index))
                if checked is not None:
                    checked.result()
                checked = beside.submit(_verify, staged[-1], bucket=bucket, index=index)
            if checked is not None:
                checked.result()
        if self._plan is plan:
            self._staged, self._from_files = staged, False

    def _read_all(self, plan: Prepare, paths: Sequence[str]) -> None:
        if len(paths) != len(plan.buckets):
            raise WeightSyncError(f"the plan has {len(plan.buckets)} buckets, there are {len(paths)} files")
        staged = []
        for index, (bucket, path) in enumerate(zip(plan.buckets, paths, strict=True)):
            # Mapped, not copied: the file may be removed, and goes with the last use of its bytes.
            raw = torch.from_file(path, size=bucket.nbytes, dtype=torch.uint8)
            _verify(raw, bucket=bucket, index=index)
            staged.append(raw)
        if self._plan is plan:
            self._staged, self._from_files = staged, True

    def _receive(self, *, group: BroadcastRank, bucket: BucketSpec, index: int) -> torch.Tensor:
        """The bucket where the group puts it, for a load at once."""
        buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=group.device)
        group.receive(buffer=buffer, index=index)
        _verify(buffer, bucket=bucket, index=index)
        return buffer

    def _to_host(self, *, group: BroadcastRank, bucket: BucketSpec, index: int) -> torch.Tensor:
        """The bucket in host memory, not yet verified. Beside weights and cache a GPU has no room for a whole model.

        A loader copies to the device what this worker holds of each tensor, and no more.
        """
        host = self._buffer(bucket.nbytes)
        if group.device.type == "cpu":
            group.receive(buffer=host, index=index)
        else:
            landed = torch.empty(bucket.nbytes, dtype=torch.uint8, device=group.device)
            group.receive(buffer=landed, index=index)
            host.copy_(landed)
        return host

    def _buffer(self, nbytes: int) -> torch.Tensor:
        """Host memory, of the last update if that has the size: fresh memory costs a page fault for each page."""
        for i, buffer in enumerate(self._spare):
            if buffer.numel() == nbytes:
                return self._spare.pop(i)
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.device.type != "cpu")

    def _buffers(self, plan: Prepare) -> Iterator[tuple[BucketSpec, torch.Tensor]]:
        """The staged buckets, and then the rest as it arrives."""
        staged = self._staged or []
        yield from zip(plan.buckets, staged, strict=False)
        for index in range(len(staged), len(plan.buckets)):
            if time.monotonic() > self._deadline:
                raise WeightSyncError(f"the pause outlived its time to live at bucket {index} of {len(plan.buckets)}")
            bucket = plan.buckets[index]
            yield bucket, self._receive(group=self._joined(), bucket=bucket, index=index)


def _verify(buffer: torch.Tensor, *, bucket: BucketSpec, index: int) -> None:
    found = xxhash.xxh3_64_hexdigest(_bytes(buffer))
    if found != bucket.xxh3:
        raise WeightSyncError(f"bucket {index} has hash {found}, its plan says {bucket.xxh3}")


def _views(*, bucket: BucketSpec, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for tensor in bucket.tensors:
        raw = buffer[tensor.offset : tensor.offset + tensor_bytes(tensor)]
        yield tensor.name, raw.view(getattr(torch, tensor.dtype)).view(tensor.shape)


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


def _update_digest(digest: xxhash.xxh3_64, tensor: torch.Tensor) -> None:
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    for start in range(0, raw.numel(), DIGEST_CHUNK_BYTES):
        digest.update(_bytes(raw[start : start + DIGEST_CHUNK_BYTES]))


def _bytes(raw: torch.Tensor) -> Any:
    """The bytes of a tensor of uint8, not copied if it is on the CPU."""
    return raw.cpu().numpy()


def register() -> None:
    """Make the backend known to vLLM in this process. Safe to call more than once."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, HeadwayTransferEngine)


def timed(call: Callable[[], None]) -> float:
    """Seconds that `call` takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
