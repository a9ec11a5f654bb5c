"""The batch log: every accepted group and every batch taken, on disk, in the order in which they happened.

A record is `length u32, type u8, xxh3 u64 of the payload, xxh32 of these three, payload`, little-endian. A group is
appended before it is acknowledged, a batch is appended and synced before it is trained. A torn tail, the mark of a
crash in a write, is cut off at opening. The header has a checksum of its own so that a damaged length is not mistaken
for such a tail, which would cut off all that follows.
"""

import json
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

import xxhash

from protocol.codec import decode, encode
from protocol.messages import Finished
from protocol.trajectories import TrajectoryGroup

_FACTS = struct.Struct("<IBQ")
_CHECK = struct.Struct("<I")
_HEADER_BYTES = _FACTS.size + _CHECK.size
_GROUP, _BATCH, _FILTERED = 1, 2, 3
_FRAME = struct.Struct("<I")


class JournalDamaged(RuntimeError):
    """A record that others follow does not match its checksum. The text names the file and the place."""


@dataclass(frozen=True)
class LoggedGroup:
    """A group that was accepted."""

    group: TrajectoryGroup


@dataclass(frozen=True)
class LoggedBatch:
    """The leases, in order, whose groups were trained at `version`."""

    version: int
    lease_ids: tuple[int, ...]


@dataclass(frozen=True)
class LoggedFilter:
    """A lease that was accepted and left out on purpose."""

    lease_id: int


Record = LoggedGroup | LoggedBatch | LoggedFilter


class Journal:
    """Appends records to one file, from any thread. `open` cuts a torn tail; use as a context manager."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Opens for appending; makes the file if there is none. Raises JournalDamaged, and then changes nothing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.touch()
            _sync_folder(path.parent)
        end = max((end for _, end in _scan(path)), default=0)
        file = path.open("r+b")
        file.truncate(end)
        file.seek(end)
        return cls(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append_group(self, group: TrajectoryGroup) -> None:
        """Hands the group to the operating system: it survives this process's death."""
        self._append(_GROUP, _join(encode(Finished(group=group))))

    def append_filtered(self, lease_id: int) -> None:
        """Notes that the lease's group was left out on purpose."""
        self._append(_FILTERED, str(lease_id).encode())

    def append_batch(self, *, version: int, lease_ids: Sequence[int]) -> None:
        """Returns when the batch, and all before it, are on the disk."""
        self._append(_BATCH, json.dumps([version, list(lease_ids)]).encode())
        os.fdatasync(self._file.fileno())

    def _append(self, kind: int, payload: bytes) -> None:
        facts = _FACTS.pack(len(payload), kind, xxhash.xxh3_64_intdigest(payload))
        record = b"".join((facts, _CHECK.pack(xxhash.xxh32_intdigest(facts)), payload))
        with self._lock:  # a batch is appended in a thread of its own while the event loop appends groups
            self._file.write(record)
            self._file.flush()


def read_journal(path: Path) -> Iterator[Record]:
    """The records of a journal in order; those of a torn tail are left out.

    Raises JournalDamaged when a record that others follow fails its checksum, or is of no known type.
    """
    if not path.exists():
        return
    for (kind, payload), _ in _scan(path):
        match kind:
            case 1:
                message = decode(_split(payload))
                assert isinstance(message, Finished), message.kind
                yield LoggedGroup(group=message.group)
            case 2:
                version, lease_ids = json.loads(payload)
                yield LoggedBatch(version=version, lease_ids=tuple(lease_ids))
            case 3:
                yield LoggedFilter(lease_id=int(payload))
            case _:
                raise JournalDamaged(f"{path}: record type {kind} is not known; was it written by a newer release?")


def _scan(path: Path) -> Iterator[tuple[tuple[int, bytes], int]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = 0
        while size - start >= _HEADER_BYTES:
            facts, check = file.read(_FACTS.size), file.read(_CHECK.size)
            length, kind, checksum = _FACTS.unpack(facts)
            end = start + _HEADER_BYTES + length
            if _CHECK.unpack(check)[0] != xxhash.xxh32_intdigest(facts):
                if not any(facts + check) and _only_zeros(file):
                    return  # the file had grown on the disk, the record's bytes had not arrived
                raise _damaged(path, start)
            if end > size:
                return
            payload = file.read(length)
            if xxhash.xxh3_64_intdigest(payload) != checksum:
                if end == size:
                    return
                raise _damaged(path, start)
            yield (kind, payload), end
            start = end


def _only_zeros(file: BinaryIO) -> bool:
    while chunk := file.read(1 << 20):
        if any(chunk):
            return False
    return True


def _damaged(path: Path, start: int) -> JournalDamaged:
    return JournalDamaged(
        f"{path}: the record at byte {start} does not match its checksum, and it is not a torn last one. Restore the "
        f"file; or give up what follows with `truncate -s {start} {path}`, and resume"
    )


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _join(frames: Sequence[bytes | memoryview]) -> bytes:
    return b"".join(part for frame in frames for part in (_FRAME.pack(len(frame)), frame))


def _split(payload: bytes) -> list[memoryview]:
    frames = []
    view = memoryview(payload)
    while view:
        (length,) = _FRAME.unpack(view[: _FRAME.size])
        frames.append(view[_FRAME.size : _FRAME.size + length])
        view = view[_FRAME.size + length :]
    return frames
