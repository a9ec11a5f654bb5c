"""The adapters that this generator's engine holds: fetched when a request needs them, replaced when they are offered.

    sample ─▶ held, and new enough? ─ no ─▶ fetch, verify ─▶ a free slot, or the one idle longest ─▶ load ─▶ sample
    offer  ─▶ held? ─ yes ─▶ fetch, verify ─▶ load in its place, between two steps of what runs

A slot is emptied before it is used for another target, and one whose adapter is sampled from is never: so the number
of targets that are sampled from at once is bounded by the slots, and others wait.
"""

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pydantic import SecretStr
from vllm.lora.request import LoRARequest

from generator.engine.adapter_stamps import versioned
from generator.engine.engine import AdapterUnfit, Engine
from generator.weights.plan import WeightSyncError
from protocol.adapters import ADAPTER_FILES, MAX_ADAPTER_BYTES, OfferedAdapter, adapter_name
from services.http.client import HttpClient, ServiceError
from services.http.metrics import Metrics
from services.http.refusals import RequestRefused
from services.http.tls import TlsContext
from services.model_folder import SLOWEST_BYTES_PER_S

logger = logging.getLogger(__name__)

_FETCH_S = 60.0
_SECONDS = (0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)

Fetch = Callable[[str], Awaitable[Sequence[bytes]]]
"""From the name of an adapter its files, in the order of ADAPTER_FILES. Raises RequestRefused."""


class AdapterMetrics:
    """Counters of loads and evictions, and how long a load took with its fetch."""

    def __init__(self, metrics: Metrics, *, held: Callable[[], int]) -> None:
        self.evicted = metrics.counter("adapter_evictions", "Adapters that made room for another one.")
        self.load = metrics.histogram(
            "adapter_load_seconds", "Fetch and load of an adapter, or of its next version.", buckets=_SECONDS
        )
        metrics.gauge("adapters", "Adapters that the engine holds.").set_function(held)


@dataclass
class _HeldAdapter:
    """The content of a slot. `users`: requests that sample with it."""

    offered: OfferedAdapter
    request: LoRARequest
    folder: Path
    users: int = 0


@dataclass
class _TargetTurns:
    """Loads of a target, one at a time; `waiting` for their turn, or at it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0


def fetching_client(*, token: SecretStr | None, tls: TlsContext | None) -> HttpClient:
    """A client for `fetching`: it takes answers as large as an adapter may be."""
    return HttpClient(token=token, tls=tls, max_answer_bytes=MAX_ADAPTER_BYTES)


def fetching(client: HttpClient, source: str, *, names: Sequence[str] = ADAPTER_FILES) -> Fetch:
    """Fetches from the learner at `source` the files of these names, and verifies."""

    async def file_of(name: str, file: str) -> bytes:
        url = f"{source.rstrip('/')}/v1/adapters/{name}/{file}"
        return (await client.download(url, deadline_s=_FETCH_S, bytes_per_s=SLOWEST_BYTES_PER_S))[0]

    async def fetch(name: str) -> Sequence[bytes]:
        try:
            files = [await file_of(name, file) for file in names]
        except ServiceError as error:
            raise RequestRefused(503, "adapter_not_fetched", f"adapter {name[:12]}: {error}") from error
        if adapter_name(files) != name:
            raise RequestRefused(
                503, "adapter_damaged", f"adapter {name[:12]}: other bytes came than its name stands for"
            )
        return files

    return fetch


class AdapterSlots:
    """Adapters by target, at most `slots` of them, of at most `max_rank`. Close it at the end."""

    def __init__(self, *, engine: Engine, fetch: Fetch, slots: int, max_rank: int, metrics: Metrics) -> None:
        self._engine, self._fetch, self._max_rank = engine, fetch, max_rank
        self._held: dict[str, _HeldAdapter] = {}  # the one that was used last at the end
        self._free = list(range(slots, 0, -1))
        self._turns: dict[str, _TargetTurns] = {}
        self._changed = asyncio.Event()
        self._folder = Path(tempfile.mkdtemp(prefix="headway-adapters-"))
        self._metrics = AdapterMetrics(metrics, held=lambda: len(self._held))

    @property
    def version(self) -> int:
        """Of the model's own weights, which stay; the engine says which adapter a token is of."""
        return 0

    def close(self) -> None:
        """Removes the files."""
        shutil.rmtree(self._folder, ignore_errors=True)

    async def offer(self, offered: OfferedAdapter) -> int | None:
        """Replaces a former version of the target, if one is held. The version that is held then.

        Raises RequestRefused.
        """
        async with self._alone(offered.target_id):
            held = self._held.get(offered.target_id)
            if held is not None and held.offered.version < offered.version:
                await self._load(offered, former=held)
        held = self._held.get(offered.target_id)
        return None if held is None else held.offered.version

    @asynccontextmanager
    async def using(self, offered: OfferedAdapter | None) -> AsyncIterator[LoRARequest | None]:
        """Holds the target at this version or a later one while the body runs; None for the base model.

        Raises RequestRefused.
        """
        if offered is None:
            yield None
            return
        self._check(offered)
        async with self._alone(offered.target_id):
            held = self._held.get(offered.target_id)
            if held is None or held.offered.version < offered.version:
                held = await self._load(offered, former=held)
            held.users += 1
        self._held[offered.target_id] = self._held.pop(offered.target_id)
        try:
            yield held.request
        finally:
            held.users -= 1
            self._changed.set()

    @asynccontextmanager
    async def _alone(self, target_id: str) -> AsyncIterator[None]:
        """Nobody else loads the target meanwhile. Nothing stays of a target that nobody waits for: each save is one."""
        turns = self._turns.setdefault(target_id, _TargetTurns())
        turns.waiting += 1
        try:
            async with turns.lock:
                yield
        finally:
            turns.waiting -= 1
            if not turns.waiting:
                del self._turns[target_id]
                self._changed.set()  # it is idle now, and somebody may wait for its slot

    def _check(self, offered: OfferedAdapter) -> None:
        if not offered.rank:
            raise RequestRefused(
                422, "whole_weights",
                "adapter.rank: 0, which is all weights; this generator takes adapters alone: set adapters.whole",
                field="adapter.rank", expected="at least 1", got=0,
            )  # fmt: skip
        if offered.rank > self._max_rank:
            raise RequestRefused(
                422, "rank_too_large",
                f"adapter.rank: {offered.rank}; this generator takes ranks up to {self._max_rank} (adapters.max_rank)",
                field="adapter.rank", expected=f"at most {self._max_rank}", got=offered.rank,
            )  # fmt: skip

    async def _load(self, offered: OfferedAdapter, *, former: _HeldAdapter | None) -> _HeldAdapter:
        """Under the target's lock."""
        with self._metrics.load.time():
            files = await self._fetch(offered.name)
            number = await self._slot() if former is None else former.request.lora_int_id
            folder = self._folder / f"{number}-{offered.name[:16]}-{offered.version}"
            try:
                request = await self._loaded(offered, files, number=number, folder=folder)
            except BaseException:  # a client that goes away, too, leaves no slot without an owner
                shutil.rmtree(folder, ignore_errors=True)
                if former is None:
                    self._give_back(number)
                raise
        if former is None:
            held = self._held[offered.target_id] = _HeldAdapter(offered, request, folder)
            return held
        shutil.rmtree(former.folder, ignore_errors=True)
        former.offered, former.request, former.folder = offered, request, folder
        return former

    async def _loaded(
        self, offered: OfferedAdapter, files: Sequence[bytes], *, number: int, folder: Path
    ) -> LoRARequest:
        """Request to sample with it, once the engine holds it."""
        request = partial(versioned, offered.target_id, number=number, version=offered.version, path=str(folder))
        try:
            await asyncio.to_thread(_write, folder, files)
            await self._engine.load_adapter(request(in_place=True))
        except (AdapterUnfit, WeightSyncError, OSError) as error:
            raise RequestRefused(503, "adapter_not_loaded", f"adapter of {offered.target_id}: {error}") from error
        return request()

    async def _slot(self) -> int:
        """A free one; waits for it while all are sampled from."""
        while not self._free:
            idle = next((target for target, held in self._held.items() if self._is_idle(target, held)), None)
            if idle is not None:
                await self._evict(idle)
            else:
                self._changed.clear()
                await self._changed.wait()
        return self._free.pop()

    def _is_idle(self, target_id: str, held: _HeldAdapter) -> bool:
        return held.users == 0 and target_id not in self._turns

    async def _evict(self, target_id: str) -> None:
        held = self._held.pop(target_id)
        number = held.request.lora_int_id
        self._metrics.evicted.inc()
        try:
            await self._engine.drop_adapter(number)
        except WeightSyncError as error:
            logger.warning("slot %d is not emptied: %s", number, error)
        finally:
            shutil.rmtree(held.folder, ignore_errors=True)
            self._give_back(number)

    def _give_back(self, number: int) -> None:
        self._free.append(number)
        self._changed.set()


def _write(folder: Path, files: Sequence[bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in zip(ADAPTER_FILES, files, strict=True):
        (folder / name).write_bytes(data)
