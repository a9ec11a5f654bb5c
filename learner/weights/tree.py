"""Published weights as files for generators that pull: what changed since the version before, and now and then all.

    a packed version ─┬▶ against the one before it, slice by slice ─▶ objects/<sha256> ─▶ newest.json
                      └▶ as it is (an anchor), for late comers: every `anchor_every` versions, and alone where buckets
                         were laid out otherwise before

What no late comer can need any more is deleted: all before the anchor before the last. The folder is this start's
alone. Weights are read in a thread, beside broadcasts and training. See `protocol.weight_tree`.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from fastapi import FastAPI, Response
from fastapi import Path as PathParameter
from pydantic import SecretStr

from learner.weights.process_group import Bucket, in_thread
from learner.weights.published import PackedWeights
from learner.weights.senders import own_buckets
from protocol.fleet import TensorSpec
from protocol.weight_deltas import SLICE_BYTES, Bytes, EncodedSlice, encoded
from protocol.weight_tree import (
    NEWEST_FILE,
    OBJECTS,
    TREE_ROUTE,
    LayoutBucket,
    ManifestRef,
    ObjectName,
    TreeLayout,
    TreePart,
    VersionManifest,
    name_of,
    parts_bytes,
)
from services.http.refusals import RequestRefused
from services.process import DaemonThreads

TREE_FOLDER = "weight-tree"
"""In the run's folder."""
_OBJECT_BYTES = 1 << 20
"""Frames of one bucket share an object until it has so many bytes."""
_ANCHORS_KEPT = 2


@dataclass(frozen=True)
class DeltaReport:
    """A version as it was written: its bytes as they are, those of what has changed, those of an anchor; which share of
    its elements has changed; and the seconds that it took.
    """

    version: int
    whole_bytes: int
    changes_bytes: int
    anchor_bytes: int
    changed_share: float
    seconds: float


@dataclass(frozen=True)
class _TreeVersion:
    """A version in the tree, and the names of the objects that are its own."""

    packed: PackedWeights
    ref: ManifestRef
    is_anchor: bool
    objects: frozenset[str]
    report: DeltaReport


@dataclass
class _Contents:
    """Parts of a version while they are written."""

    parts: list[TreePart] = field(default_factory=list)
    changed: int = 0
    elements: int = 0


def add_tree_routes(app: FastAPI, *, folder: Path) -> None:
    """`GET` of the files of a tree, below TREE_ROUTE; 404 for those that are not there."""

    @app.get(f"{TREE_ROUTE}/{OBJECTS}/{{name}}")
    async def tree_object(name: Annotated[ObjectName, PathParameter()]) -> Response:
        """An object of the tree of weights, by the SHA-256 of its bytes."""
        return _file(folder / OBJECTS / name)

    @app.get(f"{TREE_ROUTE}/{NEWEST_FILE}")
    async def newest() -> Response:
        """The newest version of the tree of weights, and the name of its manifest."""
        return _file(folder / NEWEST_FILE)


def tree_readers(token: SecretStr | None) -> Mapping[str, SecretStr]:
    """The `readers` of an application whose tree may be read with a token of its own."""
    return {} if token is None else {f"{TREE_ROUTE}/": token}


def _file(path: Path) -> Response:
    try:
        return Response(path.read_bytes(), media_type="application/octet-stream")
    except FileNotFoundError:
        raise RequestRefused(404, "not_kept", f"{path.name} is not in the tree of weights, or not any more") from None


class WeightTree:
    """The tree of one start of the learner. One version at a time is added.

    `may_write` is called before anything is written or deleted, and raises once the folder is another process's.
    """

    def __init__(
        self,
        folder: Path,
        *,
        anchor_every: int,
        threads: DaemonThreads,
        may_write: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder = folder
        self._may_write = may_write
        self._anchor_every = anchor_every
        self._threads = threads
        self._grown: list[_TreeVersion] = []
        self._is_ours = False
        self._is_let_go = False
        self.is_broken = False
        """True while the last version could not be written."""

    @property
    def newest(self) -> PackedWeights | None:
        """The version that was added last; None if there is none whose numbers are held."""
        return self._grown[-1].packed if self._grown and not self._is_let_go else None

    def manifest(self, packed: PackedWeights) -> str | None:
        """The name of a version's manifest; None if the tree has it not, or not any more."""
        return next((one.ref.manifest for one in self._grown if one.packed.version == packed.version), None)

    async def add(self, packed: PackedWeights) -> DeltaReport:
        """Writes a version. Raises OSError; the tree is then as it was. And what `may_write` does."""
        try:
            grown = await in_thread(partial(self._write, packed), threads=self._threads)
        except OSError:
            self.is_broken = True
            raise
        self.is_broken = self._is_let_go = False
        # Of former versions the numbers are not needed any more, and their room is the trainer's.
        self._grown = [*(_without_numbers(one) for one in self._kept(grown)), grown]
        await in_thread(self._clear, threads=self._threads)
        return grown.report

    def let_go(self) -> None:
        """Holds no version's numbers any more, as nobody pulls: the next version is an anchor."""
        if self._grown:
            self._grown[-1] = _without_numbers(self._grown[-1])
            self._is_let_go = True

    def file(self, name: str) -> Path:
        """The file of an object, which may be there or not."""
        return self.folder / OBJECTS / name

    def _kept(self, grown: _TreeVersion) -> Sequence[_TreeVersion]:
        anchors = [i for i, one in enumerate(self._grown) if one.is_anchor]
        first = anchors[-(_ANCHORS_KEPT - grown.is_anchor)] if len(anchors) >= _ANCHORS_KEPT - grown.is_anchor else 0
        return self._grown[first:]

    def _write(self, packed: PackedWeights) -> _TreeVersion:
        began = time.monotonic()
        self._may_write()
        if not self._is_ours:
            shutil.rmtree(self.folder, ignore_errors=True)
            (self.folder / OBJECTS).mkdir(parents=True)
            self._is_ours = True
        layout = TreeLayout(
            buckets=tuple(LayoutBucket(nbytes=b.spec.nbytes, tensors=b.spec.tensors) for b in packed.buckets)
        )
        base = self._base(layout)
        changes = _Contents() if base is None else self._contents(packed, base.packed)
        is_anchor = base is None or self._is_anchor_due()
        whole = self._contents(packed, None) if is_anchor else _Contents()
        manifest = VersionManifest(
            version=str(packed.version),
            layout=self._put(layout.model_dump_json().encode()),
            hashes=tuple(bucket.spec.xxh3 for bucket in packed.buckets),
            base=None if base is None else base.ref,
            parts=tuple(changes.parts),
            whole=tuple(whole.parts),
        )
        self._may_write()  # the work above takes long enough to lose the folder meanwhile
        ref = ManifestRef(version=manifest.version, manifest=self._put(manifest.model_dump_json().encode()))
        _replace(self.folder / NEWEST_FILE, ref.model_dump_json().encode())
        report = DeltaReport(
            version=packed.version.number,
            whole_bytes=layout.nbytes,
            changes_bytes=parts_bytes(manifest.parts),
            anchor_bytes=parts_bytes(manifest.whole),
            changed_share=changes.changed / max(1, changes.elements),
            seconds=time.monotonic() - began,
        )
        names = {ref.manifest, manifest.layout, *(part.name for part in (*manifest.parts, *manifest.whole))}
        return _TreeVersion(packed=packed, ref=ref, is_anchor=is_anchor, objects=frozenset(names), report=report)

    def _base(self, layout: TreeLayout) -> _TreeVersion | None:
        """The version that changes are told of; None if there is none with this layout."""
        if not self._grown:
            return None
        former = self._grown[-1]
        same = [(b.spec.nbytes, b.spec.tensors) for b in former.packed.buckets]
        return former if same == [(b.nbytes, b.tensors) for b in layout.buckets] else None

    def _is_anchor_due(self) -> bool:
        since = next((i for i, one in enumerate(reversed(self._grown), 1) if one.is_anchor), self._anchor_every)
        return since >= self._anchor_every

    def _contents(self, packed: PackedWeights, base: PackedWeights | None) -> _Contents:
        contents = _Contents()
        formers = () if base is None else own_buckets(base.buckets)
        for index, bucket in enumerate(own_buckets(packed.buckets)):
            frames: list[bytes] = []
            raw_bytes = 0
            former = None if base is None else formers[index]
            for piece, nbytes, itemsize in _slices(bucket, former):
                frames.append(piece.frame)
                raw_bytes += nbytes
                contents.changed += piece.changed
                contents.elements += nbytes // itemsize
                if sum(map(len, frames)) >= _OBJECT_BYTES:
                    contents.parts.append(self._part(frames, raw_bytes))
                    frames, raw_bytes = [], 0
            if frames:
                contents.parts.append(self._part(frames, raw_bytes))
        return contents

    def _part(self, frames: Sequence[bytes], raw_bytes: int) -> TreePart:
        content = b"".join(frames)
        return TreePart(name=self._put(content), nbytes=len(content), raw_bytes=raw_bytes)

    def _put(self, content: bytes) -> str:
        name = name_of(content)
        if not self.file(name).exists():
            _replace(self.file(name), content)
        return name

    def _clear(self) -> None:
        """Deletes what no version names that is kept."""
        self._may_write()
        kept = frozenset[str]().union(*(one.objects for one in self._grown))
        for path in (self.folder / OBJECTS).iterdir():
            if path.name not in kept:
                path.unlink(missing_ok=True)


def _slices(bucket: Bucket, former: Bucket | None) -> Iterator[tuple[EncodedSlice, int, int]]:
    """Each slice of a bucket against its former bytes; with its number of bytes, and those of an element."""
    new, old = bucket.data.numpy(), None if former is None else former.data.numpy()
    for start, end, itemsize in _runs(bucket.spec.tensors, bucket.spec.nbytes):
        for at in range(start, end, SLICE_BYTES):
            until = min(at + SLICE_BYTES, end)
            yield _encoded(new[at:until], None if old is None else old[at:until], itemsize), until - at, itemsize


def _encoded(new: Bytes, old: Bytes | None, itemsize: int) -> EncodedSlice:
    return encoded(np.ascontiguousarray(new), old, itemsize=itemsize)


def _runs(tensors: Sequence[TensorSpec], nbytes: int) -> list[tuple[int, int, int]]:
    """Stretches of a bucket whose elements are of one size: start, end, and that size."""
    ordered = sorted(tensors, key=lambda tensor: tensor.offset)
    runs: list[tuple[int, int, int]] = []
    for tensor, after in zip(ordered, [*ordered[1:], None], strict=True):
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        end = nbytes if after is None else after.offset
        start = 0 if not runs else runs[-1][1]
        if runs and runs[-1][2] == dtype.itemsize:
            start = runs.pop()[0]
        runs.append((start, end, dtype.itemsize))
    return runs


def _without_numbers(grown: _TreeVersion) -> _TreeVersion:
    return _TreeVersion(
        packed=PackedWeights(grown.packed.version, buckets=(), digest=grown.packed.digest, probe=grown.packed.probe),
        ref=grown.ref, is_anchor=grown.is_anchor, objects=grown.objects, report=grown.report,
    )  # fmt: skip


def _replace(path: Path, content: bytes) -> None:
    """Whole or not at all, for whoever reads it meanwhile."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(content)
    beside.replace(path)
