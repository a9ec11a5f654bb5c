"""Weights of releases on the disk: written whole or not at all, hashed file by file, and mapped when they are sent.

    releases/1.40/   0.bucket, 1.bucket ...  the bytes that are sent, as they are sent
                     release.json            plan, digest, probe, scores by held-out task, what made it
                     manifest.json           size and hash of each file, signed where checkpoints are

Base weights, to which adapters are added, are the same in all releases of a run, and are linked, not copied.
"""

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from learner.journal.files import anyone, sync_tree, unused
from learner.journal.manifest import Signer, manifest_fault, write_manifest
from learner.weights.probe import Probe
from learner.weights.process_group import Bucket
from learner.weights.published import PackedWeights
from learner.weights.senders import own_buckets
from protocol.fleet import BucketSpec, LowRank
from protocol.model import PolicyVersion
from services.append_file import make_folder, sync_folder

logger = logging.getLogger(__name__)

FOLDER = "releases"
_RECORD = "release.json"
_DRAFT = "draft-"


class ReleaseDamaged(RuntimeError):
    """The files of a release are not those that were written; the text names the file."""


class TaskScores(BaseModel):
    """Mean reward and share of solved samples of each held-out task, by its index; and a hash of its prompt, by which
    another task of that number is known.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    reward: dict[int, float] = {}
    accuracy: dict[int, float] = {}
    prompts: dict[int, str] = {}

    def by(self, metric: str) -> Mapping[int, float]:
        """The scores of a metric."""
        return self.reward if metric == "reward" else self.accuracy

    def other_prompts(self, other: "TaskScores") -> int:
        """Number of tasks that have another prompt there, of those of which both know it."""
        common = self.prompts.keys() & other.prompts.keys()
        return sum(self.prompts[task] != other.prompts[task] for task in common)


class ReleaseRecord(BaseModel):
    """A release without its bytes. `made` is what it came of, in words and numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str
    digest: str
    buckets: tuple[BucketSpec, ...]
    base: tuple[BucketSpec, ...] = ()
    adapter: LowRank | None = None
    texts: tuple[tuple[int, ...], ...] = ()
    logprobs: tuple[float, ...] = ()
    scores: TaskScores
    time: float
    made: dict[str, Any] = {}


class KeptWeights:
    """The releases in a run's folder, by version. Its methods wait for the disk."""

    def __init__(self, run: Path, *, signer: Signer | None = None, may_write: Callable[[], None] = anyone) -> None:
        self.folder = run / FOLDER
        self._signer = signer
        self._may_write = may_write

    def write(self, packed: PackedWeights, *, scores: TaskScores, made: Mapping[str, Any]) -> ReleaseRecord:
        """Keeps a version, all of which rank 0 has. Raises OSError, and then there is no such release."""
        assert not packed.links, "brought here by the caller"
        self._may_write()
        make_folder(self.folder)
        self._remove_drafts()
        draft = unused(self.folder / f"{_DRAFT}{packed.version}")
        record = ReleaseRecord(
            version=str(packed.version),
            digest=packed.digest,
            buckets=tuple(bucket.spec for bucket in packed.buckets),
            base=tuple(bucket.spec for bucket in packed.base),
            adapter=packed.adapter,
            texts=packed.probe.texts,
            logprobs=packed.probe.logprobs,
            scores=scores,
            time=time.time(),
            made=dict(made),
        )
        try:
            draft.mkdir()
            for index, bucket in enumerate(own_buckets(packed.buckets)):
                _write(draft / f"{index}.bucket", bucket)
            for bucket in own_buckets(packed.base):
                self._link_or_write(draft / f"base-{bucket.spec.xxh3}.bucket", bucket)
            (draft / _RECORD).write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
            write_manifest(draft, version=packed.version.number, journal="", signer=self._signer)
            sync_tree(draft)
            self._may_write()
            final = self.folder / record.version
            if final.exists():
                self._set_aside(final)
            draft.rename(final)
            sync_folder(self.folder)
        except OSError:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return record

    def _link_or_write(self, path: Path, bucket: Bucket) -> None:
        for other in self.folder.glob(f"[0-9]*/{path.name}"):
            with contextlib.suppress(OSError):
                if _holds(other, bucket.spec):
                    os.link(other, path)
                    return
        _write(path, bucket)

    def record(self, version: str) -> ReleaseRecord:
        """The record alone. Raises ReleaseDamaged."""
        path = self.folder / version / _RECORD
        try:
            return ReleaseRecord.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise ReleaseDamaged(f"{path} cannot be read: {str(error).splitlines()[0]}") from error

    def load(self, version: str) -> PackedWeights:
        """The weights, to be sent: every byte is read and compared with its hash first. Raises ReleaseDamaged."""
        folder = self.folder / version
        fault = manifest_fault(folder, signer=self._signer)
        if fault is not None:
            raise ReleaseDamaged(fault)
        record = self.record(version)
        if record.version != version:
            raise ReleaseDamaged(f"{folder} holds version {record.version}, expected {version}: was it copied there?")
        return PackedWeights(
            version=PolicyVersion.parse(record.version),
            buckets=[_mapped(folder / f"{index}.bucket", spec) for index, spec in enumerate(record.buckets)],
            digest=record.digest,
            # Without logprobs of the version before: releases do not follow each other step by step.
            probe=Probe(texts=record.texts, logprobs=record.logprobs),
            adapter=record.adapter,
            base=[_mapped(folder / f"base-{spec.xxh3}.bucket", spec) for spec in record.base],
        )

    def versions(self) -> list[str]:
        """The versions that are kept, whole or not, the oldest first."""
        found = [path.name for path in self.folder.glob("[0-9]*.[0-9]*") if path.is_dir()]
        return sorted(found, key=PolicyVersion.parse)

    def keep_only(self, versions: Collection[str]) -> list[str]:
        """Removes the others; returns their names. What cannot be removed stays for the next time."""
        self._may_write()
        gone = [version for version in self.versions() if version not in versions]
        for version in gone:
            try:
                self._set_aside(self.folder / version)
            except OSError as error:
                logger.warning("release %s cannot be removed: %s", version, error)
        self._remove_drafts()
        return gone

    def _set_aside(self, path: Path) -> None:
        """Takes the name away first, so that no crash leaves a part under it."""
        path.rename(unused(self.folder / f"{_DRAFT}removed"))

    def _remove_drafts(self) -> None:
        for draft in self.folder.glob(f"{_DRAFT}*"):
            shutil.rmtree(draft, ignore_errors=True)


def _write(path: Path, bucket: Bucket) -> None:
    with path.open("wb") as file:
        file.write(bucket.data.numpy().data)


def _holds(path: Path, spec: BucketSpec) -> bool:
    """True for a file whose bytes are still those of the bucket."""
    if path.stat().st_size != spec.nbytes:
        return False
    return bool(xxhash.xxh3_64_hexdigest(_mapped(path, spec).data.numpy().data) == spec.xxh3)


def _mapped(path: Path, spec: BucketSpec) -> Bucket:
    """Pages come from the file when they are sent, so that a release costs no memory of its own."""
    return Bucket(spec=spec, data=torch.from_file(str(path), shared=False, size=spec.nbytes, dtype=torch.uint8))
