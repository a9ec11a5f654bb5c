"""Downloads a version from a tree of published weights: what changed since the one that is held, from wherever it is.

    manifest ─▶ back to the version that is held, or to an anchor ─▶ parts, applied in turn ─▶ hashes of all buckets
                                                                                                    │
                        the learner's own buckets, whole ◀── no copy of an object, or a wrong hash ─┘

Nothing that came from elsewhere is used before its name, which is its SHA-256, was found to be that of its bytes; and
no bucket is staged before its own hash is right. Files of the version that is held are never changed in place: a worker
may have them mapped.
"""

import asyncio
import logging
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import xxhash
from pydantic import BaseModel, ValidationError

from generator.weights.plan import WeightSyncError
from protocol.fleet import PULLED_EPOCH, BucketSpec, Prepare
from protocol.weight_deltas import Bytes, DeltaDamaged, apply_frames
from protocol.weight_tree import OBJECTS, TreeLayout, TreePart, VersionManifest, name_of, parts_bytes
from services.http.client import HttpClient, ServiceError, ServiceRefused

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)

_OBJECT_TIMEOUT_S = 15.0
_SLOWEST_BYTES_PER_S = 100e3
_AT_ONCE = 4
_PAUSE_S = 0.3
_LATER_S = 30.0
_LONGEST_CHAIN = 10_000
_ROUNDS_WITHOUT = 3


class ObjectMissing(WeightSyncError):
    """No source has an object, or all that they have under its name is damaged."""


@dataclass
class _Source:
    """A copy of the tree. One that failed is not asked until `again_at`, unless there is no other."""

    url: str
    client: HttpClient
    again_at: float = 0.0


class TreeSources:
    """Copies of the tree: relays, and the learner itself, which is asked where no relay has helped for `patience_s`.

    So a relay's short absence is waited out, and the learner's link has the bytes but once.
    """

    def __init__(
        self,
        *,
        relays: Sequence[str],
        relay_client: HttpClient,
        learner: str,
        client: HttpClient,
        patience_s: float,
        received: Callable[[str, int], None] = lambda source, nbytes: None,
    ) -> None:
        self.received_bytes = 0
        """From all sources together, so far."""
        self._relays = [_Source(url.rstrip("/"), relay_client) for url in relays]
        self._learner = _Source(learner.rstrip("/"), client)
        self._patience_s = patience_s
        self._tell_received = received
        self._failing_since: float | None = None

    async def fetch(self, name: str) -> bytes:
        """An object, whose bytes are those that its name says. Raises ObjectMissing."""
        why = ""
        for _ in range(_ROUNDS_WITHOUT):
            content = await self._from_relays(name)
            if content is not None:
                return content
            content, why = await self._ask(self._learner, name)
            if content is not None:
                self._received("learner", len(content))
                return content
            await asyncio.sleep(_PAUSE_S)
        raise ObjectMissing(f"nobody has object {name} of the weights' tree: {why}")

    def _received(self, source: str, nbytes: int) -> None:
        self.received_bytes += nbytes
        self._tell_received(source, nbytes)

    async def _from_relays(self, name: str) -> bytes | None:
        """None if it is the learner's turn."""
        while self._relays:
            for relay in self._relays:
                if relay.again_at > time.monotonic():
                    continue
                content, why = await self._ask(relay, name)
                if content is not None:
                    self._failing_since = None
                    self._received("relay", len(content))
                    return content
                logger.info("relay %s: %s", relay.url, why)
            now = time.monotonic()
            self._failing_since = self._failing_since or now
            if now - self._failing_since >= self._patience_s:
                for relay in self._relays:
                    relay.again_at = relay.again_at if relay.again_at > now else now + _LATER_S
                return None
            await asyncio.sleep(_PAUSE_S)
        return None

    async def _ask(self, source: _Source, name: str) -> tuple[bytes | None, str]:
        url = f"{source.url}/{OBJECTS}/{name}"
        try:
            content, _ = await source.client.download(
                url, deadline_s=_OBJECT_TIMEOUT_S, bytes_per_s=_SLOWEST_BYTES_PER_S
            )
        except ServiceRefused as error:
            return None, str(error)
        except ServiceError as error:
            return None, str(error)
        if name_of(content) != name:
            logger.warning("%s arrived damaged, %d bytes: asking again", url, len(content))
            return None, "it arrived damaged"
        return content, ""


@dataclass(frozen=True)
class _HeldWeights:
    """Verified weights in files, one for each bucket, and the manifest that they are of."""

    name: str
    manifest: VersionManifest
    folder: Path

    def path(self, index: int) -> Path:
        return self.folder / f"{index}.bucket"

    @property
    def paths(self) -> list[str]:
        return [str(self.path(index)) for index in range(len(self.manifest.hashes))]


@dataclass(frozen=True)
class _Chain:
    """Work to be applied in order: the whole weights of an anchor, if there is one; the changes of the steps."""

    steps: tuple[VersionManifest, ...]
    anchor: VersionManifest | None = None

    @property
    def from_held(self) -> bool:
        return self.anchor is None


class TreeDownloads:
    """Downloads one version at a time, each against the one before it, whose files it keeps below `folder`.

    `dense` brings a bucket of a version from the learner as it is: version, number, path, bytes.
    """

    def __init__(
        self,
        *,
        sources: TreeSources,
        folder: Path,
        dense: Callable[[str, int, str, int], Awaitable[None]],
        healed: Callable[[], None] = lambda: None,
    ) -> None:
        self._healed = healed
        self._sources = sources
        self._folder = folder
        self._dense = dense
        self._held: _HeldWeights | None = None
        self._layouts: dict[str, TreeLayout] = {}
        self._healed_bytes = 0

    async def download(self, version: str, name: str) -> tuple[Prepare, Sequence[str], int]:
        """The plan of a version whose manifest has this name; a file for each of its buckets, which are right; and how
        many bytes came.

        Raises ObjectMissing if there is no manifest, WeightSyncError, OSError.
        """
        before = self._sources.received_bytes + self._healed_bytes
        manifest = await self._manifest(name)
        if manifest.version != version:
            raise WeightSyncError(f"manifest {name} is of version {manifest.version}, and {version} was asked for")
        specs = await self._specs(manifest)
        made = _HeldWeights(name, manifest, Path(tempfile.mkdtemp(dir=self._folder)))
        try:
            await self._fill(made, specs)
            wrong = await asyncio.to_thread(_wrong_buckets, made.paths, specs)
            for index in wrong:
                await self._heal(made, specs, index)
        except BaseException:
            shutil.rmtree(made.folder, ignore_errors=True)
            raise
        former, self._held = self._held, made
        if former is not None:
            shutil.rmtree(former.folder, ignore_errors=True)
        received = self._sources.received_bytes + self._healed_bytes - before
        return Prepare(version=version, epoch=PULLED_EPOCH, buckets=specs), made.paths, received

    async def _fill(self, made: _HeldWeights, specs: Sequence[BucketSpec]) -> None:
        """With right bytes, as far as the tree has them."""
        try:
            chain = await self._chain(made)
            changed = await asyncio.to_thread(_begin, made, specs, self._held if chain.from_held else None)
            if chain.anchor is not None:
                await self._apply(chain.anchor.whole, made, specs, changed=changed)
            for step in chain.steps:
                await self._apply(step.parts, made, specs, changed=changed)
        except (ObjectMissing, DeltaDamaged) as error:
            logger.warning("version %s cannot be made of the weights' tree: %s", made.manifest.version, error)
            held = self._held
            is_alike = held is not None and held.manifest.layout == made.manifest.layout
            await asyncio.to_thread(_begin, made, specs, held if is_alike else None)

    async def _heal(self, made: _HeldWeights, specs: Sequence[BucketSpec], index: int) -> None:
        version = made.manifest.version
        logger.warning("bucket %d of version %s is not what it should be: downloading it whole", index, version)
        made.path(index).unlink()  # it may be a link to what is held
        await self._dense(version, index, made.paths[index], specs[index].nbytes)
        self._healed_bytes += specs[index].nbytes
        self._healed()
        if await asyncio.to_thread(_wrong_buckets, made.paths[index : index + 1], specs[index : index + 1]):
            raise WeightSyncError(f"bucket {index} of version {version} is not what its hash says, though whole")

    async def _chain(self, made: _HeldWeights) -> _Chain:
        """The way to a version that has the fewest bytes: from what is held, or from the last anchor."""
        steps: list[VersionManifest] = []
        name, step = made.name, made.manifest
        from_anchor: _Chain | None = None
        while not self._holds(name, step):
            if from_anchor is None and step.whole:
                from_anchor = _Chain(tuple(steps), anchor=step)
            steps.insert(0, step)
            former = None if from_anchor is not None and self._is_nearer(from_anchor, steps) else step.base
            if former is None:
                break
            name = former.manifest
            if self._held is not None and self._held.name == name:
                return _Chain(tuple(steps))
            found = await self._former(name, layout=step.layout)
            if found is None or len(steps) > _LONGEST_CHAIN:
                break
            step = found
        else:
            return _Chain(tuple(steps))
        if from_anchor is None:
            raise ObjectMissing(f"version {made.manifest.version} leads back to no anchor, nor to what is held")
        return from_anchor

    def _is_nearer(self, anchor: _Chain, steps: Sequence[VersionManifest]) -> bool:
        """True if there is no way from what is held that has fewer bytes."""
        assert anchor.anchor is not None, "one from an anchor"
        whole = parts_bytes(anchor.anchor.whole) + sum(parts_bytes(step.parts) for step in anchor.steps)
        return self._held is None or sum(parts_bytes(step.parts) for step in steps) > whole

    async def _former(self, name: str, *, layout: str) -> VersionManifest | None:
        """None where the tree has it not any more, or weights were laid out otherwise in it."""
        try:
            found = await self._manifest(name)
        except ObjectMissing:
            return None
        return found if found.layout == layout else None

    def _holds(self, name: str, manifest: VersionManifest) -> bool:
        """True also for equal weights of another life of the learner."""
        held = self._held
        if held is None:
            return False
        is_equal = (held.manifest.layout, held.manifest.hashes) == (manifest.layout, manifest.hashes)
        return held.name == name or is_equal

    async def _apply(
        self, parts: Sequence[TreePart], made: _HeldWeights, specs: Sequence[BucketSpec], *, changed: frozenset[int]
    ) -> None:
        """Applies the parts of one manifest to files, as they come."""
        places = list(_places(parts, specs))
        wanted = [(part, index, start) for part, index, start in places if index in changed]
        async with aclosing(self._fetched([part for part, _, _ in wanted])) as contents:
            at = 0
            async for content in contents:
                part, index, start = wanted[at]
                await asyncio.to_thread(_apply_to_file, content, made.paths[index], start, part.raw_bytes)
                at += 1

    async def _fetched(self, parts: Sequence[TreePart]) -> AsyncGenerator[bytes, None]:
        """The objects in order, of which a few are on their way at once."""
        coming: deque[asyncio.Task[bytes]] = deque()
        rest = deque(parts)
        try:
            while rest or coming:
                while rest and len(coming) < _AT_ONCE:
                    coming.append(asyncio.create_task(self._sources.fetch(rest.popleft().name)))
                yield await coming[0]
                coming.popleft()
        finally:
            for task in coming:
                task.cancel()
            await asyncio.gather(*coming, return_exceptions=True)

    async def _specs(self, manifest: VersionManifest) -> tuple[BucketSpec, ...]:
        layout = self._layouts.get(manifest.layout)
        if layout is None:
            layout = _parsed(await self._sources.fetch(manifest.layout), TreeLayout, manifest.layout)
            self._layouts = {manifest.layout: layout}
        try:
            return layout.specs(manifest.hashes)
        except ValueError as error:
            raise WeightSyncError(f"version {manifest.version} has hashes of another layout: {error}") from error

    async def _manifest(self, name: str) -> VersionManifest:
        return _parsed(await self._sources.fetch(name), VersionManifest, name)


def _parsed(content: bytes, model: type[M], name: str) -> M:
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        raise WeightSyncError(f"object {name} of the weights' tree is no {model.__name__}: {error}") from error


def _places(parts: Sequence[TreePart], specs: Sequence[BucketSpec]) -> Iterator[tuple[TreePart, int, int]]:
    """Each part, its bucket, and where in it it begins. Raises DeltaDamaged for parts that do not fit the buckets."""
    index, start = 0, 0
    for part in parts:
        if index >= len(specs) or start + part.raw_bytes > specs[index].nbytes:
            raise DeltaDamaged(f"part {part.name} goes beyond its bucket")
        yield part, index, start
        start += part.raw_bytes
        if start == specs[index].nbytes:
            index, start = index + 1, 0


def _begin(made: _HeldWeights, specs: Sequence[BucketSpec], base: _HeldWeights | None) -> frozenset[int]:
    """Files with the bytes of the base, or with none; and which of them are not right yet."""
    changed = set()
    for index, spec in enumerate(specs):
        path = made.path(index)
        path.unlink(missing_ok=True)
        if base is None:
            with path.open("wb") as file:
                file.truncate(spec.nbytes)
            changed.add(index)
        elif base.manifest.hashes[index] == spec.xxh3:
            os.link(base.path(index), path)
        else:
            shutil.copyfile(base.path(index), path)
            changed.add(index)
    return frozenset(changed)


def _apply_to_file(frames: bytes, path: str, start: int, nbytes: int) -> None:
    mapped: Bytes = np.memmap(path, np.uint8, "r+", offset=start, shape=(nbytes,))
    apply_frames(frames, mapped)


def _wrong_buckets(paths: Sequence[str], specs: Sequence[BucketSpec]) -> list[int]:
    return [index for index, (path, spec) in enumerate(zip(paths, specs, strict=True)) if not _is_right(path, spec)]


def _is_right(path: str, spec: BucketSpec) -> bool:
    mapped = np.memmap(path, np.uint8, "r", shape=(spec.nbytes,))
    return bool(xxhash.xxh3_64_hexdigest(mapped.data) == spec.xxh3)
