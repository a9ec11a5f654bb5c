"""Checkpoints of training models, by `tinker://RUN/{weights|sampler_weights|external_weights}/NAME`.

Each is a folder with the adapter in peft's format, which transformers and vLLM load, or with all weights as
transformers keeps a model; those under `weights` have the whole state beside it. Targets of sampling sessions are
checkpoints without a path that a client could name.
"""

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from learner.tenants.tensor_files import (
    Tensors,
    TensorsDamaged,
    folder_facts,
    folder_files,
    read_tensor_file,
    remove_drafts,
    remove_folder,
    replace_facts,
    write_tensor_folder,
)
from learner.training.client_operations import AdapterShape
from services.append_file import make_folder

CheckpointKind = Literal["training", "sampler", "external", "target"]
_FOLDERS: dict[str, CheckpointKind] = {
    "weights": "training", "sampler_weights": "sampler", "external_weights": "external",
}  # fmt: skip
_PATH = re.compile(r"tinker://([^/]+)/(weights|sampler_weights|external_weights)/([^/]+)")
ADAPTER, STATE = "adapter_model", "state"
_WHOLE = "model"
_ADAPTER_CONFIG, _WHOLE_CONFIG = "adapter_config.json", "config.json"


class CheckpointFacts(BaseModel):
    """Facts of a checkpoint. `version` counts the model's steps; `seq_id` is the operation that saved it.

    A `deleted` one has no files any more, but is remembered: the operation that saved it may be done again.
    `copied_from`: the path of the one that it is a copy of.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    run_id: str
    name: str
    kind: CheckpointKind
    owner: str
    base_model: str
    shape: AdapterShape
    seq_id: int
    version: int
    created_at: float
    expires_at: float | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    size_bytes: int = 0
    deleted: bool = False
    copied_from: str | None = None


@dataclass(frozen=True)
class CheckpointPath:
    """The three parts of a path that a client names."""

    run_id: str
    folder: str
    name: str

    @classmethod
    def parse(cls, path: str) -> "CheckpointPath | None":
        """None if it is no such path."""
        found = _PATH.fullmatch(path)
        return None if found is None else cls(*found.groups())

    @property
    def kind(self) -> CheckpointKind:
        """The kind of checkpoints in the folder of the path."""
        return _FOLDERS[self.folder]


def checkpoint_path(run_id: str, folder: str, name: str) -> str:
    """The path of a checkpoint."""
    return f"tinker://{run_id}/{folder}/{name}"


class TenantCheckpoints:
    """All checkpoints on the disk. `clock` is in seconds since 1970."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        make_folder(folder)
        remove_drafts(folder)
        self._folder, self._clock = folder, clock
        self._facts = {facts.path: facts for facts in _all_facts(folder)}
        self._lock = threading.RLock()
        """Held while one is written, changed or deleted: the trainer's thread saves, and others do the rest."""
        for facts in self._facts.values():
            if facts.deleted:
                self._remove_files(facts)  # a life may have ended before it had done so

    def find(self, path: str, *, reader: str) -> CheckpointFacts | None:
        """The checkpoint, if the reader owns it or it is public, and it has not expired."""
        facts = self._facts.get(path)
        if facts is None or facts.deleted or (facts.expires_at is not None and facts.expires_at <= self._clock()):
            return None
        return facts if facts.owner == reader or facts.public else None

    def former(self, path: str) -> CheckpointFacts | None:
        """The one that stands or stood under the path, whoever owns it."""
        return self._facts.get(path)

    def of(self, owner: str, run_id: str | None = None) -> list[CheckpointFacts]:
        """Checkpoints that clients may see, the oldest first."""
        found = (
            facts
            for facts in list(self._facts.values())  # other threads save and delete
            if facts.kind != "target" and run_id in (None, facts.run_id) and self.find(facts.path, reader=owner)
        )
        return sorted((each for each in found if each.owner == owner), key=lambda each: each.created_at)

    def save(
        self, facts: CheckpointFacts, *, adapter: Tensors, config: Mapping[str, object], state: Tensors | None
    ) -> None:
        """Write a checkpoint, in the place of one that has its path. Raises OSError."""
        tensors = {ADAPTER if facts.shape.rank else _WHOLE: adapter} | ({} if state is None else {STATE: state})
        size = sum(array.nbytes for each in tensors.values() for array in each.values())
        whole = facts.model_copy(update={"size_bytes": size})
        files = {_ADAPTER_CONFIG if facts.shape.rank else _WHOLE_CONFIG: json.dumps(config, indent=1).encode()}
        with self._lock:
            write_tensor_folder(
                self.folder(facts.path), tensors=tensors, facts=whole.model_dump(mode="json"), files=files
            )
            self._facts[facts.path] = whole

    def state(self, path: str) -> dict[str, NDArray[np.generic]]:
        """The whole state of a training checkpoint. Raises TensorsDamaged."""
        return read_tensor_file(self.folder(path), STATE)

    def adapter_files(self, path: str) -> list[Path]:
        """The files of the adapter in peft's format, or of all weights in that of transformers."""
        return [each for each in folder_files(self.folder(path)) if each.stem != STATE]

    def change(self, facts: CheckpointFacts, **fields: object) -> None:
        """Change facts of a checkpoint; nothing if it was deleted meanwhile. Raises OSError."""
        with self._lock:
            there = self._facts.get(facts.path)
            if there is None or there.deleted:
                return
            changed = there.model_copy(update=fields)
            replace_facts(self.folder(facts.path), changed.model_dump(mode="json"))
            self._facts[facts.path] = changed

    def expire_in(self, facts: CheckpointFacts, seconds: float | None) -> None:
        """Let a checkpoint go after so many seconds, or never. Raises OSError."""
        self.change(facts, expires_at=None if seconds is None else self._clock() + seconds)

    def delete(self, facts: CheckpointFacts) -> None:
        """Remove the files, and remember that there was one; a target is forgotten. Raises OSError."""
        if facts.kind == "target":  # nobody else names it, and the event loop waits for no thread that saves
            remove_folder(self.folder(facts.path))
            del self._facts[facts.path]
            return
        with self._lock:
            self.change(facts, deleted=True, size_bytes=0)
            self._remove_files(facts)

    def _remove_files(self, facts: CheckpointFacts) -> None:
        for path in folder_files(self.folder(facts.path)):
            path.unlink()

    def copy(self, source: CheckpointFacts, copy: CheckpointFacts) -> None:
        """Write a checkpoint with the files of another. Raises TensorsDamaged, OSError."""
        folder = self.folder(source.path)
        state = self.state(source.path) if source.kind == "training" else None
        name, config_name = (ADAPTER, _ADAPTER_CONFIG) if source.shape.rank else (_WHOLE, _WHOLE_CONFIG)
        config = json.loads((folder / config_name).read_bytes())
        self.save(copy, adapter=read_tensor_file(folder, name), config=config, state=state)

    def targets(self) -> list[CheckpointFacts]:
        """Checkpoints that sampling sessions alone know."""
        return [facts for facts in list(self._facts.values()) if facts.kind == "target"]

    def expire(self) -> int:
        """Delete those whose time has come, and return how many."""
        now = self._clock()
        old = [
            facts
            for facts in list(self._facts.values())
            if not facts.deleted and facts.expires_at is not None and facts.expires_at <= now
        ]
        return sum(map(self._expired, old))

    def _expired(self, facts: CheckpointFacts) -> bool:
        """Delete it, if it is still there as it was found: another may have been saved in its place."""
        with self._lock:
            if self._facts.get(facts.path) != facts:
                return False
            self.delete(facts)
            return True

    def folder(self, path: str) -> Path:
        """The folder of a path, which needs not exist: paths hold characters that folders should not."""
        return self._folder / hashlib.sha256(path.encode()).hexdigest()[:32]


def _all_facts(folder: Path) -> Iterator[CheckpointFacts]:
    for each in folder.iterdir():
        try:
            yield CheckpointFacts.model_validate(folder_facts(each))
        except (TensorsDamaged, ValueError):
            continue  # its files fail their checksums when somebody asks for it
