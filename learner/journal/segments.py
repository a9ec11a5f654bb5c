"""A segment of the batch log: its name, its records, and what became of them on the disk."""

import json
import os
import re
import shutil
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from learner.journal.files import unused
from learner.journal.records import JournalDamaged, framed, record, scan
from learner.journal.teaching import LoggedTeaching, teaching_frames, teaching_of
from learner.weights.provenance import LoggedDistrust, LoggedProof
from protocol.codec import Frame, WrongProtocolVersion, decode, encode
from protocol.messages import FinishedLease
from protocol.model import PolicyVersion
from protocol.trajectories import TrajectoryGroup
from services.append_file import sync_folder

_GROUP, _BATCH, _FILTERED, _PROOF, _DISTRUST, _USED, _BATCH_WITH_REUSED, _TEACHING = 1, 2, 3, 4, 5, 6, 7, 8
_FRAME = struct.Struct("<I")
_NAME = re.compile(r"segment-(\d{8,})\.log")


class JournalUnknown(RuntimeError):
    """The journal is whole, but this release cannot read it, or it is of another run."""


@dataclass(frozen=True)
class LoggedGroup:
    """A group that was accepted."""

    group: TrajectoryGroup


@dataclass(frozen=True)
class LoggedBatch:
    """The leases, in order, whose groups were trained at `version`: for the first time, and then those `reused`."""

    version: int
    lease_ids: tuple[int, ...]
    reused: tuple[int, ...] = ()


@dataclass(frozen=True)
class LoggedFilter:
    """A lease that was accepted and left out on purpose."""

    lease_id: int


@dataclass(frozen=True)
class LoggedUse:
    """A lease whose group was trained before the segment was begun, and `reuses` times again. Its group follows: later
    steps may train it once more.
    """

    lease_id: int
    reuses: int


Record = LoggedGroup | LoggedBatch | LoggedFilter | LoggedProof | LoggedDistrust | LoggedUse | LoggedTeaching
R = TypeVar("R", LoggedGroup, LoggedTeaching)


@dataclass(frozen=True)
class Segment:
    """A file of the journal. `start` is the learner's version when it was begun."""

    path: Path
    start: int

    @classmethod
    def named(cls, folder: Path, start: int) -> "Segment":
        """The segment of the folder that begins at this version."""
        return cls(path=folder / f"segment-{start:08d}.log", start=start)


def segments_of(folder: Path) -> list[Segment]:
    """The journal's segments in order; none if there is no such folder."""
    found = ((path, _NAME.fullmatch(path.name)) for path in folder.glob("segment-*.log"))
    return sorted((Segment(path, int(name[1])) for path, name in found if name), key=lambda segment: segment.start)


def encoded(record: Record) -> bytes:
    """The record as it stands in a segment."""
    match record:
        case LoggedGroup(group=group):
            return b"".join(encoded_group(encode(FinishedLease(group=group))))
        case LoggedBatch(version=version, lease_ids=lease_ids, reused=()):
            return framed(_BATCH, json.dumps([version, list(lease_ids)]).encode())
        case LoggedBatch(version=version, lease_ids=lease_ids, reused=reused):
            return framed(_BATCH_WITH_REUSED, json.dumps([version, list(lease_ids), list(reused)]).encode())
        case LoggedFilter(lease_id=lease_id):
            return framed(_FILTERED, str(lease_id).encode())
        case LoggedProof(version=proven, digest=digest, fingerprints=fingerprints):
            return framed(_PROOF, json.dumps([str(proven), digest, dict(fingerprints)]).encode())
        case LoggedDistrust(instance=instance, since=since):
            return framed(_DISTRUST, json.dumps([instance, str(since)]).encode())
        case LoggedUse(lease_id=lease_id, reuses=reuses):
            return framed(_USED, json.dumps([lease_id, reuses]).encode())
        case LoggedTeaching():
            return framed(_TEACHING, b"".join(_joined(teaching_frames(record))))


def encoded_group(frames: Sequence[Frame]) -> list[Frame]:
    """The record of the group that a Finished message of these frames brings, in parts, of which none is copied."""
    return record(_GROUP, _joined(frames))


def _joined(frames: Sequence[Frame]) -> list[Frame]:
    return [part for frame in frames for part in (_FRAME.pack(len(frame)), frame)]


def read_segment(path: Path) -> Iterator[tuple[Record, int]]:
    """The segment's records in order, each with the byte at which it begins; those of a torn tail are left out.

    Raises JournalDamaged when a record that others follow fails its checksum, JournalUnknown when one is of no known
    type.
    """
    for kind, payload, start, _ in scan(path):
        yield _decoded(kind, payload, path=path), start


def group_at(path: Path, at: int) -> TrajectoryGroup:
    """The group whose record begins at this byte, as `read_segment` said. Raises JournalDamaged."""
    return _record_at(path, at, LoggedGroup).group


def teaching_at(path: Path, at: int) -> LoggedTeaching:
    """The teaching whose record begins at this byte. Raises JournalDamaged."""
    return _record_at(path, at, LoggedTeaching)


def _record_at(path: Path, at: int, wanted: type[R]) -> R:
    for kind, payload, _, _ in scan(path, at=at):
        record = _decoded(kind, payload, path=path)
        if isinstance(record, wanted):
            return record
        break
    raise JournalDamaged(path, at, what=f"there was a {wanted.__name__}, and is none now")


def end_of_records(path: Path, *, start: int = 0, size: int | None = None) -> int:
    """The byte after the last whole record of the first `size` bytes; reads from `start`, where a record begins.

    Raises JournalDamaged.
    """
    return max((end for *_, end in scan(path, at=start, size=size)), default=start)


def set_aside(damage: JournalDamaged, *, segments: Sequence[Segment], keep_empty: bool) -> None:
    """Keeps what stands before the damage, and renames the rest and all later segments to `*.damaged`.

    A segment of which nothing is left goes altogether, unless `keep_empty`.
    """
    paths = [segment.path for segment in segments]
    following = paths[paths.index(damage.path) :]
    cut = damage.at > 0 or keep_empty
    for path in reversed(following[1:] if cut else following):
        path.rename(unused(_damaged_name(path)))
    if cut:
        with damage.path.open("rb") as source, unused(_damaged_name(damage.path)).open("xb") as rest:
            source.seek(damage.at)
            shutil.copyfileobj(source, rest)
            rest.flush()
            os.fsync(rest.fileno())
        os.truncate(damage.path, damage.at)
    sync_folder(damage.path.parent)


def _damaged_name(path: Path) -> Path:
    return path.with_name(f"{path.name}.damaged")


def _decoded(kind: int, payload: bytes, *, path: Path) -> Record:
    match kind:
        case 1:
            return LoggedGroup(group=_group(payload, path=path))
        case 2:
            version, lease_ids = json.loads(payload)
            return LoggedBatch(version=version, lease_ids=tuple(lease_ids))
        case 3:
            return LoggedFilter(lease_id=int(payload))
        case 4:
            proven, digest, fingerprints = json.loads(payload)
            return LoggedProof(version=PolicyVersion.parse(proven), digest=digest, fingerprints=fingerprints)
        case 5:
            instance, since = json.loads(payload)
            return LoggedDistrust(instance=instance, since=PolicyVersion.parse(since))
        case 6:
            lease_id, reuses = json.loads(payload)
            return LoggedUse(lease_id=lease_id, reuses=reuses)
        case 7:
            version, lease_ids, reused = json.loads(payload)
            return LoggedBatch(version=version, lease_ids=tuple(lease_ids), reused=tuple(reused))
        case 8:
            return teaching_of(_split(payload))
        case _:
            raise JournalUnknown(f"{path}: record type {kind} is not known; was it written by a newer release?")


def _group(payload: bytes, *, path: Path) -> TrajectoryGroup:
    try:
        message = decode(_split(payload), stored=True)
    except WrongProtocolVersion as error:
        raise JournalUnknown(f"{path}: a group cannot be read: {error}") from error
    assert isinstance(message, FinishedLease), message.kind
    return message.group


def _split(payload: bytes) -> list[memoryview]:
    frames = []
    view = memoryview(payload)
    while view:
        (length,) = _FRAME.unpack(view[: _FRAME.size])
        frames.append(view[_FRAME.size : _FRAME.size + length])
        view = view[_FRAME.size + length :]
    return frames
