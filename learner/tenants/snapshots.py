"""Snapshots of training models: their whole state after an operation, and the results that their clients may ask for.

A resume takes a model's snapshot, and does its later operations again, in order. Between two of them the journal alone
knows what was done.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from learner.journal.records import JournalDamaged, framed, scan
from learner.tenants.futures import Payload, ResultFuture
from learner.tenants.tensor_files import (
    Tensors,
    TensorsDamaged,
    folder_facts,
    folder_files,
    read_tensor_file,
    remove_drafts,
    remove_folder,
    write_tensor_folder,
)
from services.append_file import make_folder

logger = logging.getLogger(__name__)

_JSON, _BYTES = 1, 2
_STATE, _RESULTS = "state", "results.log"
_RETRIEVED = "retrieved"


@dataclass(frozen=True)
class SnapshotFacts:
    """The model, the last operation in its snapshot, and how many steps it had made."""

    model_id: str
    seq_id: int
    version: int


@dataclass(frozen=True)
class StoredResult:
    """A result that was not retrieved, or not long ago."""

    request_id: str
    digest: str
    kind: str
    payload: Payload
    retrieved: bool = False


def result_of(future: ResultFuture, payload: Payload | None = None) -> StoredResult:
    """The future's result; `payload` for one that has none yet."""
    found = future.payload if payload is None else payload
    assert found is not None, future.request_id
    return StoredResult(future.request_id, future.digest, future.kind, found, retrieved=future.retrieved_at is not None)


class ModelSnapshots:
    """The newest snapshot of each model. A folder that cannot be read is left as it is, for its model's owner alone to
    be told of.
    """

    def __init__(self, folder: Path) -> None:
        make_folder(folder)
        remove_drafts(folder)
        self._folder = folder
        self.covered: dict[str, SnapshotFacts] = {}
        self._damaged: dict[str, str] = {}
        for each in folder.iterdir():
            try:
                found = _facts_in(each)
            except TensorsDamaged as error:
                logger.error("a model's snapshot is left out, and the model with it: %s", error)
                self._damaged[each.name] = str(error)
            else:
                self.covered[found.model_id] = found

    def damage(self, model_id: str) -> str:
        """Tells the model's owner that the facts of its snapshot cannot be read; empty if they can, or it has none."""
        damaged = self._damaged.get(self._path(model_id).name)
        if damaged is None:
            return ""
        return (
            f"the model cannot be loaded: {damaged}; make a new training client from a checkpoint, or have the server "
            "started again with a copy of that folder"
        )

    def write(self, facts: SnapshotFacts, state: Tensors, results: Sequence[StoredResult]) -> None:
        """Replace the model's snapshot; it is on the disk afterwards. Raises OSError."""
        write_tensor_folder(
            self._path(facts.model_id),
            tensors={_STATE: state},
            facts={
                "model_id": facts.model_id,
                "seq_id": facts.seq_id,
                "version": facts.version,
                _RETRIEVED: [each.request_id for each in results if each.retrieved],
            },
            files={_RESULTS: b"".join(map(_stored, results))},
        )
        self.covered[facts.model_id] = facts

    def state(self, model_id: str) -> dict[str, NDArray[np.generic]]:
        """The state. Raises TensorsDamaged."""
        return read_tensor_file(self._path(model_id), _STATE)

    def results(self, model_id: str) -> list[StoredResult]:
        """Results that were not retrieved, or not long before the snapshot was written; those before any damage."""
        folder = self._path(model_id)
        (path,) = (each for each in folder_files(folder) if each.name == _RESULTS)
        facts = folder_facts(folder)
        assert isinstance(facts, dict), folder
        named = facts.get(_RETRIEVED)  # those of former releases have none
        retrieved = {str(each) for each in named} if isinstance(named, list) else set()
        found = []
        try:
            for kind, payload, *_ in scan(path):
                found.append(_read(kind, payload))
        except (JournalDamaged, OSError) as error:
            logger.error("results of %s are lost, and nobody can retrieve them: %s", model_id, error)
        return [replace(each, retrieved=each.request_id in retrieved) for each in found]

    def remove(self, model_id: str) -> None:
        """Forget a model."""
        self.covered.pop(model_id, None)
        self._damaged.pop(self._path(model_id).name, None)
        remove_folder(self._path(model_id))

    def _path(self, model_id: str) -> Path:
        return self._folder / hashlib.sha256(model_id.encode()).hexdigest()[:32]


def _facts_in(folder: Path) -> SnapshotFacts:
    facts = folder_facts(folder)
    try:
        named = dict(facts) if isinstance(facts, dict) else {}
        return SnapshotFacts(str(named["model_id"]), int(str(named["seq_id"])), int(str(named["version"])))
    except (KeyError, ValueError) as error:
        raise TensorsDamaged(f"{folder}: its facts are not those of a model's snapshot: {error!r}") from error


def _stored(result: StoredResult) -> bytes:
    head = json.dumps([result.request_id, result.digest, result.kind]).encode() + b"\n"
    if isinstance(result.payload, bytes):
        return framed(_BYTES, head + result.payload)
    return framed(_JSON, head + json.dumps(result.payload).encode())


def _read(kind: int, payload: bytes) -> StoredResult:
    head, _, rest = payload.partition(b"\n")
    request_id, digest, name = json.loads(head)
    return StoredResult(request_id, digest, name, rest if kind == _BYTES else json.loads(rest))
