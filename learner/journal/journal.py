"""The batch log: every accepted group and every batch taken, on disk, in the order in which they happened.

It is a folder of segments. Each checkpoint begins a new one, which starts with a copy of the groups that no batch has
used yet, and of those that later batches may use again: so a checkpoint needs only the segments from its own version
on, and older ones can go. A group is appended before it is acknowledged, a batch is appended and synced before it is
trained.
"""

import asyncio
import errno
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol, Self

from learner.journal.files import anyone, ignore, sync_tree
from learner.journal.records import JournalDamaged
from learner.journal.segments import (
    JournalUnknown,
    LoggedBatch,
    LoggedFilter,
    LoggedGroup,
    LoggedUse,
    Record,
    Segment,
    encoded,
    encoded_group,
    end_of_records,
    read_segment,
    segments_of,
)
from learner.journal.teaching import LoggedTeaching
from learner.weights.provenance import LoggedDistrust, LoggedProof
from protocol.codec import Frame
from protocol.trajectories import TrajectoryGroup
from services.append_file import AppendFile, make_folder, sync_folder
from services.http.waiting import Waiting

logger = logging.getLogger(__name__)

__all__ = [
    "FOLDER",
    "DiskRoom",
    "Journal",
    "JournalDamaged",
    "JournalFull",
    "JournalLost",
    "JournalUnknown",
    "LoggedBatch",
    "LoggedDistrust",
    "LoggedFilter",
    "LoggedGroup",
    "LoggedProof",
    "LoggedTeaching",
    "LoggedUse",
    "NoJournal",
    "Record",
    "RunLog",
    "read_journal",
]

FOLDER = "journal"
"""The journal's name in the run's folder."""

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DRAFT = "segment.new"
_SAY_EVERY_S = 30.0
_RETRY_EVERY_S = 0.5
_LATELY_S = 120.0


UsedGroup = tuple[TrajectoryGroup, int]
"""A group that was trained, and how many times again."""


class JournalFull(OSError):
    """There is no room for a record. The journal is as it was, and may be appended to once there is room."""

    def __init__(self, folder: Path, error: OSError) -> None:
        super().__init__(error.errno, f"the disk of {folder} is full: {error.strerror}")
        self.folder = folder


class JournalLost(RuntimeError):
    """The disk has not kept what was written: a sync failed, and what stands in the file since is something else."""

    def __init__(self, path: Path, start: int, what: str) -> None:
        super().__init__(
            f"{path}: the disk has lost what was written from byte {start} on ({what}). See to the disk; --resume goes "
            "on from what it has kept"
        )


class RunLog(Protocol):
    """The log as the learner uses it. `prepare`, `append_batch` and `sync` may take as long as the disk does."""

    def append_group(
        self, group: TrajectoryGroup, *, frames: Sequence[Frame] | None = None, filtered: bool = False
    ) -> None:
        """Hands the group to the operating system: it survives this process's death. Raises JournalFull.

        `frames` are those of the Finished that brought it, as it is: they save encoding it once more. `filtered` notes
        in the same write that it was left out on purpose: a group without that note is trained after a resume.
        """

    def append_provenance(self, news: LoggedProof | LoggedDistrust) -> None:
        """Notes what became known of a generator's process. Raises JournalFull."""

    def append_teaching(self, teaching: Sequence[LoggedTeaching]) -> None:
        """Hands what teachers said of the newest batch to the operating system. Raises JournalFull, and is then called
        again.
        """

    def append_batch(self, *, version: int, lease_ids: Sequence[int], reused: Sequence[int] = ()) -> None:
        """Returns when the batch, and all before it, are on the disk. Raises JournalFull, and is then called again."""

    def prepare(self, *, version: int, groups: Iterable[TrajectoryGroup], used: Iterable[UsedGroup] = ()) -> None:
        """Writes the groups for the segment of `version` aside, while others are appended: those that no batch has
        used, and those `used` that later ones may train again. Raises JournalFull.
        """

    def rotate(self, *, version: int, groups: Iterable[TrajectoryGroup]) -> None:
        """Begins the segment of `version` with the groups that no batch has used: what `prepare` wrote for it, and then
        these. Raises JournalFull.
        """

    def sync(self) -> None:
        """Returns when all that was appended is on the disk. Raises JournalFull, and is then called again."""

    def size(self) -> int:
        """Bytes of the newest segment."""

    def trim(self, *, version: int) -> None:
        """Removes what no checkpoint of `version` or later needs."""


def _records_of(used: Iterable[UsedGroup]) -> Iterator[Record]:
    """The use of each comes before it: a group without one would be trained as if it never was."""
    for group, reuses in used:
        yield LoggedUse(lease_id=group.lease_id, reuses=reuses)
        yield LoggedGroup(group=group)


def _unheeded(seconds: float) -> None:
    """Nobody wants to know how long the disk took."""


class Journal:
    """Appends records to the newest segment, from any thread; a context manager.

    `whole`: the newest segment has all groups that no batch has used. One that a former process began may lack some,
    which that process had dropped for a reason that died with it, such as a bound of the guard.

    `may_write` is called before each change, and raises if the folder is not this process's any more. `synced` is told
    how many seconds each sync took.
    """

    def __init__(
        self,
        segment: Segment,
        *,
        end: int,
        whole: bool = True,
        may_write: Callable[[], None] = anyone,
        synced: Callable[[float], None] = _unheeded,
    ) -> None:
        self._may_write = may_write
        self._tell_synced = synced
        self._folder = segment.path.parent
        self._segment = segment
        self._file = AppendFile(segment.path, end=end)
        self._lock = threading.Lock()  # for appends
        self._disk = threading.Lock()  # for what takes long; taken before the other
        self._last_batch: int | None = None
        self._name_synced = False
        self._synced = 0  # the bytes before it are on the disk
        self._in_doubt = False
        self._prepared: tuple[int, AppendFile] | None = None
        self._whole = whole

    @classmethod
    def open(
        cls, folder: Path, *, may_write: Callable[[], None] = anyone, synced: Callable[[float], None] = _unheeded
    ) -> Self:
        """Goes on with the newest segment, its torn tail cut; an empty journal begins at version 0.

        What a former process has written is synced first, since that may have died before it was: batches are trained
        again from there, and a later sync is of the newest segment alone. Raises JournalDamaged, and then changes
        nothing, and OSError.
        """
        make_folder(folder)
        segments = segments_of(folder)
        if not segments:
            return cls(Segment.named(folder, 0), end=0, may_write=may_write, synced=synced)
        newest = segments[-1]
        sync_tree(folder)
        return cls(newest, end=end_of_records(newest.path), whole=False, may_write=may_write, synced=synced)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._disk, self._lock:  # a thread may still be at work; what it appends after this is refused
            self._drop_prepared()
            self._file.close()

    def append_group(
        self, group: TrajectoryGroup, *, frames: Sequence[Frame] | None = None, filtered: bool = False
    ) -> None:
        """See RunLog."""
        parts = [encoded(LoggedGroup(group=group))] if frames is None else encoded_group(frames)
        note = [encoded(LoggedFilter(lease_id=group.lease_id))] if filtered else []
        self._append(*parts, *note)

    def append_provenance(self, news: LoggedProof | LoggedDistrust) -> None:
        """See RunLog."""
        self._append(encoded(news))

    def append_teaching(self, teaching: Sequence[LoggedTeaching]) -> None:
        """See RunLog. If the machine dies before the disk has it, teachers are asked again."""
        self._append(*map(encoded, teaching))

    def append_batch(self, *, version: int, lease_ids: Sequence[int], reused: Sequence[int] = ()) -> None:
        """See RunLog."""
        if self._last_batch != version:  # else it was written, and only the disk did not take it yet
            batch = LoggedBatch(version=version, lease_ids=tuple(lease_ids), reused=tuple(reused))
            self._append(encoded(batch))
            self._last_batch = version
        self.sync()

    def prepare(self, *, version: int, groups: Iterable[TrajectoryGroup], used: Iterable[UsedGroup] = ()) -> None:
        """See RunLog."""
        records = chain(_records_of(used), map(LoggedGroup, groups))
        if version == self._segment.start:
            self._make_whole(records)
            return
        with self._disk:
            self._may_write()
            self._drop_prepared()
            self._prepared = version, self._draft(records)

    def _make_whole(self, records: Iterable[Record]) -> None:
        """Of a segment that was begun before: adds the groups of its beginning, those that it has once more."""
        if not self._whole:
            for record in records:
                self._append(encoded(record))
            self._whole = True

    def rotate(self, *, version: int, groups: Iterable[TrajectoryGroup]) -> None:
        """See RunLog. A journal that has begun this segment already goes on with it."""
        if version == self._segment.start:
            self._make_whole(map(LoggedGroup, groups))
            return
        with self._disk, self._lock:
            self._may_write()
            assert version > self._segment.start, (version, self._segment.start)
            segment = Segment.named(self._folder, version)
            begun = self._begin(segment, groups)
            self._file.close()  # its batches are on the disk, and its other groups are in the new one
            self._file, self._segment = begun, segment
            self._name_synced, self._synced, self._in_doubt, self._whole = False, 0, False, True

    def _begin(self, segment: Segment, groups: Iterable[TrajectoryGroup]) -> AppendFile:
        if self._prepared is None or self._prepared[0] != segment.start:
            self._drop_prepared()
            self._prepared = segment.start, self._draft(())
        file = self._prepared[1]
        try:
            for group in groups:
                file.append(encoded(LoggedGroup(group=group)))
            (self._folder / _DRAFT).rename(segment.path)
        except OSError as error:
            self._drop_prepared()
            raise self._explained(error) from error
        self._prepared = None
        return file

    def _draft(self, records: Iterable[Record]) -> AppendFile:
        draft = self._folder / _DRAFT
        draft.unlink(missing_ok=True)
        try:
            file = AppendFile(draft)
        except OSError as error:
            raise self._explained(error) from error
        try:
            for record in records:
                file.append(encoded(record))
        except OSError as error:
            file.close()
            draft.unlink(missing_ok=True)
            raise self._explained(error) from error
        return file

    def _drop_prepared(self) -> None:
        if self._prepared is not None:
            self._prepared[1].close()
            self._prepared = None
            (self._folder / _DRAFT).unlink(missing_ok=True)

    def sync(self) -> None:
        """See RunLog.

        After a failure the kernel may count pages as written that are not, and say so at the next call: what has not
        been synced yet is written once more first. Raises JournalLost if it is not there any more.
        """
        with self._disk:
            with self._lock:
                file, end = self._file, self._file.end
                if self._in_doubt:
                    self._write_again(end)
            began = time.monotonic()
            try:
                file.sync()
                if not self._name_synced:
                    sync_folder(self._folder)
                    self._name_synced = True
            except OSError as error:
                self._in_doubt = True
                raise self._explained(error) from error
            self._synced, self._in_doubt = end, False
            self._tell_synced(time.monotonic() - began)

    def _write_again(self, end: int) -> None:
        path, start = self._segment.path, self._synced
        try:
            kept = end_of_records(path, start=start, size=end)
        except JournalDamaged as damage:
            raise JournalLost(path, start, str(damage)) from damage
        if max(kept, start) != end:
            raise JournalLost(path, start, f"records end at byte {kept}, expected {end}")
        try:
            self._file.write_again(start)
        except OSError as error:
            raise self._explained(error) from error

    def size(self) -> int:
        """See RunLog."""
        return self._file.end

    def trim(self, *, version: int) -> None:
        """See RunLog."""
        self._may_write()
        for segment in segments_of(self._folder):
            if segment.start < min(version, self._segment.start):
                segment.path.unlink()

    def _append(self, *parts: Frame) -> None:
        self._may_write()
        with self._lock:  # a batch is appended in a thread of its own while the event loop appends groups
            try:
                self._file.append(*parts)
            except OSError as error:
                raise self._explained(error) from error

    def _explained(self, error: OSError) -> OSError:
        if error.errno not in _DISK_FULL:
            return error
        return JournalFull(self._folder, error)


class NoJournal:
    """A log that keeps nothing: a run of which a killed learner loses all."""

    def append_group(
        self, group: TrajectoryGroup, *, frames: Sequence[Frame] | None = None, filtered: bool = False
    ) -> None:
        """Keeps nothing."""

    def append_provenance(self, news: LoggedProof | LoggedDistrust) -> None:
        """Keeps nothing."""

    def append_teaching(self, teaching: Sequence[LoggedTeaching]) -> None:
        """Keeps nothing."""

    def append_batch(self, *, version: int, lease_ids: Sequence[int], reused: Sequence[int] = ()) -> None:
        """Keeps nothing."""

    def prepare(self, *, version: int, groups: Iterable[TrajectoryGroup], used: Iterable[UsedGroup] = ()) -> None:
        """Keeps nothing."""

    def rotate(self, *, version: int, groups: Iterable[TrajectoryGroup]) -> None:
        """Keeps nothing."""

    def size(self) -> int:
        """Nothing is kept."""
        return 0

    def sync(self) -> None:
        """Has nothing to wait for."""

    def trim(self, *, version: int) -> None:
        """Has nothing to remove."""


def read_journal(folder: Path) -> Iterator[Record]:
    """The records of all segments in order. Groups that were copied into a new segment come again.

    Raises JournalDamaged and JournalUnknown.
    """
    for segment in segments_of(folder):
        for record, _ in read_segment(segment.path):
            yield record


class DiskRoom:
    """Tells if the disk takes what the run must keep. `failed` is told the file of each write that it did not take;
    `clock` is in seconds.
    """

    def __init__(self, *, waits: Waiting, clock: Callable[[], float], failed: Callable[[str], None] = ignore) -> None:
        self._failed = failed
        self._waits = waits
        self._clock = clock
        self._said_at = self._missed_at = float("-inf")

    def is_missing(self) -> bool:
        """True if a group could not be kept lately: those that are refused now are sent again ever more rarely."""
        return self._clock() - self._missed_at < _LATELY_S

    def say(self, error: JournalFull) -> None:
        """A group could not be kept. Said at most twice a minute."""
        self._missed_at = self._clock()
        self._failed("journal")
        if self._clock() - self._said_at >= _SAY_EVERY_S:
            self._said_at = self._clock()
            logger.error("%s. Groups are not acknowledged, and env_services send them again: make room", error.strerror)

    async def wait_for(self, write: Callable[[], None]) -> None:
        """Calls `write` in a thread until the disk takes it."""
        try:
            await asyncio.to_thread(write)
        except JournalFull as error:
            self.say(error)
            with self._waits.wait(f"room on the disk of {error.folder}"):
                await self._until_written(write)

    async def _until_written(self, write: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(_RETRY_EVERY_S)  # nobody tells when a disk has room again
            try:
                await asyncio.to_thread(write)
            except JournalFull:
                self._failed("journal")
            else:
                return
