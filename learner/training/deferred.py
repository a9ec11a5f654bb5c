"""Files of a checkpoint that a rank writes beside training, from copies in host memory.

    training   ─▶ copies what the files are to hold ─▶ goes on
    a thread         └▶ writes them ─▶ tells rank 0, in the ranks' store, that its part is there

A file of which the host has no room for a copy is written at once, and training waits for it.
"""

from __future__ import annotations

import copy
import errno
import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed import DistError, DistStoreError

from learner.training.ranks import STORE_POLL, Ranks
from services.memory import available_memory

logger = logging.getLogger(__name__)

_SPARE = 1.25
"""Memory that has to be available for a copy, as a multiple of it: the rest is for what else is going on."""


class Writes:
    """Writes to a disk, and the first error that one of them met; after one nothing more is written."""

    def __init__(self) -> None:
        self.error: OSError | None = None

    def attempt(self, write: Callable[..., object], *arguments: object, **named: object) -> None:
        """Writes, and keeps an error of the disk."""
        if self.error is not None:
            return
        try:
            write(*arguments, **named)
        except DistError:
            raise
        except OSError as error:
            self.error = error
        except (RuntimeError, SafetensorError) as error:  # torch's and safetensors' own, for a disk that is full
            self.error = OSError(errno.EIO, f"a checkpoint cannot be written: {str(error).splitlines()[0]}")

    def deferring(self, write: Callable[..., object]) -> Callable[..., None]:
        """`write` as an attempt."""
        return partial(self.attempt, write)


class DeferredFiles:
    """Files that are written when `write` is called, with what they were to hold when they were put."""

    def __init__(self, *, copying: int = 1) -> None:
        """`copying`: how many ranks of this host make such copies at the same time, each of its own part."""
        self._copying = copying
        self._writes: list[Callable[[], object]] = []
        self.bytes = 0
        """Size of the copies."""

    def put(self, write: Callable[..., object], contents: object, path: Path | str, **named: object) -> None:
        """Has `write` write `contents` to `path` later; at once if there is no room for a copy."""
        size = _size(contents)
        if (available_memory() or 0) < _SPARE * size * self._copying:
            logger.info("%s is written while training waits: no room in memory for a copy of %d bytes", path, size)
            write(contents, path, **named)
            return
        self.bytes += size
        self._writes.append(partial(write, copied(contents, {}), path, **named))

    def write(self) -> OSError | None:
        """Writes the files; returns the first error of the disk. Each copy goes when its file is there."""
        writes = Writes()
        while self._writes:
            writes.attempt(self._writes.pop(0))
        return writes.error


class PartsOfRanks:
    """The parts that all ranks write of one save: rank 0 writes its own in `finish`, the others in a thread."""

    def __init__(
        self, files: DeferredFiles, directory: Path, *, ranks: Ranks, store: Store | None, number: int
    ) -> None:
        """`store` is of this object's alone while it is in use; None for a single rank."""
        self._files = files
        self._directory = directory
        self._ranks = ranks
        self._store = store
        self._number = number
        self._thread = threading.Thread(target=self._report, name="checkpoint", daemon=True)
        if not ranks.leads:
            self._thread.start()

    def finish(self) -> None:
        """Rank 0 only: returns when all parts are written. Raises OSError if one could not be."""
        error = self._files.write()
        for rank in range(1, self._ranks.count):
            told = self._told(rank)
            if told and error is None:
                error = OSError(errno.EIO, f"rank {rank} could not write its part of {self._directory}: {told}")
        if error is not None:
            raise error

    def join(self) -> None:
        """Returns when this rank, which is not rank 0, has written its part."""
        if self._thread.is_alive():
            self._thread.join()

    def _report(self) -> None:
        assert self._store is not None, "several ranks have a store"
        error = self._files.write()
        self._store.set(self._key(self._ranks.rank), "" if error is None else str(error) or type(error).__name__)

    def _told(self, rank: int) -> str:
        assert self._store is not None, "several ranks have a store"
        key = self._key(rank)
        while True:
            try:
                self._store.wait([key], STORE_POLL)
                break
            except DistStoreError as error:
                if "timeout" not in str(error).lower():
                    raise OSError(errno.EIO, f"the ranks' store is gone: {str(error).splitlines()[0]}") from error
        told = self._store.get(key).decode()
        self._store.delete_key(key)
        return told

    def _key(self, rank: int) -> str:
        return f"saved/{self._number}/{rank}"


def copied(contents: Any, known: dict[tuple[object, ...], Tensor]) -> Any:
    """A copy whose tensors lie in host memory of their own; `known` are those that were copied, by where they lay."""
    if isinstance(contents, Tensor):
        place = (contents.data_ptr(), contents.dtype, tuple(contents.shape), contents.stride(), contents.device)
        if not contents.numel() or place not in known:
            known[place] = contents.detach().to("cpu", copy=True)
        return known[place]
    if isinstance(contents, dict):
        found = copy.copy(contents)
        for key, value in contents.items():
            found[key] = copied(value, known)
        return found
    if type(contents) in (list, tuple):
        return type(contents)(copied(value, known) for value in contents)
    return copy.deepcopy(contents)


def _size(contents: object) -> int:
    if isinstance(contents, Tensor):
        return contents.nbytes
    if isinstance(contents, Mapping):
        return sum(map(_size, contents.values()))
    return sum(map(_size, contents)) if isinstance(contents, list | tuple) else 0
