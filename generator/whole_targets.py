"""All weights of a target in this generator's engine, in place of the model's own: for a server whose one client trains
all of them.

    sample ─▶ held? ─ yes ─▶ sample
                    └ no ─▶ its turn ─▶ requests under the former ones have ended ─▶ fetch, verify, load ─▶ sample

One target is held at a time. Requests come to their turn in the order in which they came, so that those of one target
keep nobody waiting for ever, and a completion has the weights of one version from its first token to its last.
"""

import asyncio
import json
import logging
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor

from generator.adapters import AdapterMetrics, Fetch
from generator.engine.engine import Engine
from generator.serving import Serving
from generator.weights.plan import WeightSyncError
from protocol.adapters import OfferedAdapter
from protocol.fleet import BUCKET_ALIGNMENT, PULLED_EPOCH, BucketSpec, Prepare, TensorSpec
from services.http.metrics import Metrics
from services.http.refusals import RequestRefused

logger = logging.getLogger(__name__)

_BASE = ""
"""The name of the model's own weights."""
_BUCKET_BYTES = 256 << 20
_INDEX, _ONE_FILE = "model.safetensors.index.json", "model.safetensors"


class WholeTargets:
    """The weights of one target at a time; those of `base`, a model's folder, for requests without one."""

    def __init__(self, *, engine: Engine, fetch: Fetch, base: Path, serving: Serving, metrics: Metrics) -> None:
        self._engine, self._fetch, self._base, self._serving = engine, fetch, base, serving
        self._held: str | None = _BASE
        self._target = ""
        self.version = 0
        """Of the target that is held; it stays while one is used."""
        self._loads = 0
        self._users = 0
        self._turn = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()
        self._metrics = AdapterMetrics(metrics, held=lambda: int(self._held not in (None, _BASE)))

    def close(self) -> None:
        """Nothing stays on the disk."""

    async def offer(self, offered: OfferedAdapter) -> int | None:
        """The version of the target that is held; a later one is fetched by the next request that needs it."""
        return self.version if self._target == offered.target_id else None

    @asynccontextmanager
    async def using(self, offered: OfferedAdapter | None) -> AsyncIterator[None]:
        """Holds the target at this version, or the base model, while the body runs. Raises RequestRefused."""
        if offered is not None and offered.rank:
            raise RequestRefused(
                422, "no_adapters",
                f"adapter.rank: {offered.rank}; this generator takes all weights, and no adapters: set adapters.slots",
                field="adapter.rank", expected="0", got=offered.rank,
            )  # fmt: skip
        async with self._turn:
            name = _BASE if offered is None else offered.name
            if self._held != name and not self._holds_later(offered):
                await self._idle.wait()
                await self._load(name, offered)
            self._users += 1
            self._idle.clear()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._idle.set()

    def _holds_later(self, offered: OfferedAdapter | None) -> bool:
        return offered is not None and self._target == offered.target_id and self.version > offered.version

    async def _load(self, name: str, offered: OfferedAdapter | None) -> None:
        """Raises RequestRefused; the engine then has the model's own weights, if it had to let go of those before."""
        with self._metrics.load.time():
            files = () if offered is None else await self._fetch(name)
            former, served = (self._held, self._target, self.version), self._engine.version
            try:
                await self._commit(files)
            except (WeightSyncError, SafetensorError, OSError) as error:
                if isinstance(error, WeightSyncError) and error.unloaded:
                    await self._recover()
                elif self._engine.version == served:
                    self._now_holds(*former)
                what = "the model's own weights" if offered is None else f"the weights of {offered.target_id}"
                raise RequestRefused(503, "adapter_not_loaded", f"{what}: {error}") from error
        self._now_holds(name, *(("", 0) if offered is None else (offered.target_id, offered.version)))

    def _now_holds(self, name: str | None, target: str = "", version: int = 0) -> None:
        self._held, self._target, self.version = name, target, version

    async def _commit(self, files: Sequence[bytes]) -> None:
        """Has the engine take the weights of the files, or the model's own if there are none. Nobody knows which ones
        it has until this has ended: where the client goes away, the engine's commit goes on.
        """
        self._now_holds(None)
        self._loads += 1
        version = f"1.{self._loads}"
        with tempfile.TemporaryDirectory(prefix="headway-whole-") as folder:
            plan, paths = await asyncio.to_thread(self._plan, files, Path(folder), version)
            await self._engine.stage_files(plan, paths=paths)
            await self._engine.commit(version=version)
        self._serving.holds(version)

    async def _recover(self) -> None:
        """Has the engine, which holds nothing whole, take the model's own weights; without them it cannot serve."""
        try:
            await self._commit(())
        except (WeightSyncError, OSError) as error:
            logger.error("the model's own weights could not be loaded again: %s; restart this generator", error)
            self._serving.holds(None)
        else:
            self._now_holds(_BASE)

    def _plan(self, files: Sequence[bytes], folder: Path, version: str) -> tuple[Prepare, list[str]]:
        """The weights in buckets, as a weight sync has them, in files of the folder."""
        tensors = load(files[1]) if files else _own_weights(self._base)
        buckets, paths = [], []
        for number, group in enumerate(_groups(tensors)):
            path = folder / f"{number}.bucket"
            buckets.append(_write(path, group))
            paths.append(str(path))
        return Prepare(version=version, epoch=PULLED_EPOCH, buckets=tuple(buckets)), paths


def _own_weights(model: Path) -> dict[str, Tensor]:
    """Of a model's folder; several files have each a part of them. Others may hold the same in another format."""
    index, one = model / _INDEX, model / _ONE_FILE
    if index.exists():
        paths = {model / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    else:
        paths = {one} if one.exists() else set(model.glob("*.safetensors"))
    found: dict[str, Tensor] = {}
    for path in sorted(paths):
        found |= load_file(path)
    return found


def _groups(tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    group: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if group and size + tensor.nbytes > _BUCKET_BYTES:
            yield group
            group, size = {}, 0
        group[name] = tensor
        size += tensor.nbytes
    if group:
        yield group


def _write(path: Path, tensors: dict[str, Tensor]) -> BucketSpec:
    digest, specs, offset = xxhash.xxh3_64(), [], 0
    with path.open("wb") as file:
        for name, tensor in tensors.items():
            data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            data += bytes(-len(data) % BUCKET_ALIGNMENT)
            dtype = str(tensor.dtype).removeprefix("torch.")
            specs.append(TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape), offset=offset))
            digest.update(data)
            file.write(data)
            offset += len(data)
    return BucketSpec(nbytes=offset, xxh3=digest.hexdigest(), tensors=tuple(specs))
