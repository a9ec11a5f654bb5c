"""Reads the journal from the outside: its own parser of the record format, over files that the run may remove.

    record = length u32, type u8, xxh3 u64 of the payload, xxh32 of these three, payload          (little-endian)

A run keeps either one `journal.log` or `journal/segment-*.log`, and removes segments that a checkpoint covers. An
`Archive` holds a hard link to each file that it has ever seen, so that the whole history can be read at the end.
"""

import json
import os
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import xxhash

from protocol.codec import decode
from protocol.messages import FinishedLease
from protocol.trajectories import TrajectoryGroup

_FACTS = struct.Struct("<IBQ")
_CHECK = struct.Struct("<I")
_FRAME = struct.Struct("<I")
GROUP, BATCH, FILTERED, PROOF, DISTRUST, USED, BATCH_WITH_REUSED = 1, 2, 3, 4, 5, 6, 7


@dataclass(frozen=True, order=True)
class Place:
    """A place in the journal: the name of the file, and the byte in it."""

    file: str
    offset: int


@dataclass(frozen=True)
class GroupRecord:
    """An accepted group."""

    place: Place
    group: TrajectoryGroup


@dataclass(frozen=True)
class BatchRecord:
    """A batch that was taken at `version`; `reused` leases were trained in it once more."""

    place: Place
    version: int
    lease_ids: tuple[int, ...]
    reused: tuple[int, ...] = ()


@dataclass(frozen=True)
class FilterRecord:
    """A lease whose group was left out on purpose."""

    place: Place
    lease_id: int


@dataclass(frozen=True)
class ProofRecord:
    """Processes of generators that proved to serve a version."""

    place: Place
    version: str
    instances: frozenset[str]


@dataclass(frozen=True)
class UseRecord:
    """A lease that was trained before, and `reuses` times again; a copy of its group follows."""

    place: Place
    lease_id: int
    reuses: int


JournalRecord = GroupRecord | BatchRecord | FilterRecord | ProofRecord | UseRecord


@dataclass(frozen=True)
class ReadJournal:
    """All records in order; `damages` say where reading a file ended before the file did."""

    records: tuple[JournalRecord, ...]
    damages: tuple[str, ...]


def journal_files(folder: Path) -> list[Path]:
    """The journal of a run folder, or of an archive, in order."""
    return sorted(folder.glob("journal/segment-*.log")) or sorted(folder.glob("journal.log"))


def journal_end(folder: Path) -> Place:
    """Behind the newest record."""
    while files := journal_files(folder):
        try:
            return Place(file=files[-1].name, offset=files[-1].stat().st_size)
        except FileNotFoundError:
            continue  # it was removed meanwhile, so that there is a newer one
    return Place(file="", offset=0)


def read_journal(folder: Path) -> ReadJournal:
    """Every whole record of every file."""
    records: list[JournalRecord] = []
    damages: list[str] = []
    for path in journal_files(folder):
        scanned = list(_scan(path))
        end = scanned[-1][1] if scanned else 0
        found = (_record(place, kind, payload) for place, _, kind, payload in scanned)
        records.extend(record for record in found if record is not None)
        if end < path.stat().st_size:
            damages.append(f"{path.name}: {path.stat().st_size - end} bytes from byte {end} on are no whole record")
    return ReadJournal(records=tuple(records), damages=tuple(damages))


def _scan(path: Path) -> Iterator[tuple[Place, int, int, bytes]]:
    data = path.read_bytes()
    start, header = 0, _FACTS.size + _CHECK.size
    while start + header <= len(data):
        facts = data[start : start + _FACTS.size]
        length, kind, checksum = _FACTS.unpack(facts)
        end = start + header + length
        payload = data[start + header : end]
        whole = _CHECK.unpack_from(data, start + _FACTS.size)[0] == xxhash.xxh32_intdigest(facts)
        if not whole or end > len(data) or xxhash.xxh3_64_intdigest(payload) != checksum:
            return
        yield Place(file=path.name, offset=start), end, kind, payload
        start = end


def _record(place: Place, kind: int, payload: bytes) -> JournalRecord | None:
    if kind == GROUP:
        message = decode(_frames(payload), stored=True)
        assert isinstance(message, FinishedLease), message
        return GroupRecord(place=place, group=message.group)
    if kind in (BATCH, BATCH_WITH_REUSED):
        version, lease_ids, *reused = json.loads(payload)
        return BatchRecord(place=place, version=version, lease_ids=tuple(lease_ids), reused=tuple(*reused))
    if kind == USED:
        lease_id, reuses = json.loads(payload)
        return UseRecord(place=place, lease_id=lease_id, reuses=reuses)
    if kind == PROOF:
        proven, _, fingerprints = json.loads(payload)
        return ProofRecord(place=place, version=proven, instances=frozenset(fingerprints))
    if kind == FILTERED:
        return FilterRecord(place=place, lease_id=int(payload))
    assert kind == DISTRUST, f"{place}: a record of type {kind}, of which nothing is known here"
    return None


def _frames(payload: bytes) -> list[bytes]:
    frames, start = [], 0
    while start < len(payload):
        (length,) = _FRAME.unpack_from(payload, start)
        frames.append(payload[start + _FRAME.size : start + _FRAME.size + length])
        start += _FRAME.size + length
    return frames


class Archive:
    """Links every journal file of `run` into `folder` while the run goes on; a context manager."""

    def __init__(self, *, run: Path, folder: Path) -> None:
        self._run = run
        self.folder = folder
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="chaos-archive", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._stop.wait(0.1):
            self.look()

    def look(self) -> None:
        """Links what is new. A file that was replaced under its name is linked anew."""
        for path in journal_files(self._run):
            link = self.folder / path.relative_to(self._run)
            link.parent.mkdir(parents=True, exist_ok=True)
            try:
                if link.exists() and link.samefile(path):
                    continue
                link.unlink(missing_ok=True)
                os.link(path, link)
            except FileNotFoundError:
                continue
