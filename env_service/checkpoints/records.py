"""Records of leases in a folder: written while their conversations go on, read by the next process of the same name.

    first turn of a lease ─▶ its file ─▶ turns and steps ─▶ the learner has its outcome, or wants none ─▶ removed
                                           └─ this process dies ─▶ the next one goes on with it

A record is an aid: where it cannot be written, or the folder is full, the lease goes on without one.
"""

import asyncio
import hashlib
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from env_service.checkpoints.rows import (
    AnswerRow,
    EnvironmentState,
    LeaseRow,
    RecordedLease,
    RecordedTurn,
    ResumedRow,
    Row,
    TurnRow,
    line_of,
    read_record,
)
from protocol.lease_keys import LeaseKey, key_of
from protocol.messages import Lease
from services.append_file import AppendFile, sync_folder
from services.http.metrics import Metrics, one_label
from services.run_lock import FolderLost, RunLock

logger = logging.getLogger(__name__)

_ENDING = ".turns"
_SAVED = ".saved"
_TRIES = 2
"""Processes in a row that may go on with a lease and add no turn: it may be what they die of."""


def file_name_of(key: LeaseKey) -> str:
    """The file of a lease's record."""
    return f"{key.purpose}-{key.incarnation}-{key.lease_id}-{key.attempt}{_ENDING}"


def saved_name_of(key: LeaseKey, conversation: int) -> str:
    """The file of the state of one conversation's environment."""
    return f"{file_name_of(key).removesuffix(_ENDING)}.{conversation}{_SAVED}"


class LeaseRecord:
    """The record of one lease, with what a former process had of it. `now` is the date that its chat template shows."""

    def __init__(self, records: "LeaseRecords", first: LeaseRow, past: RecordedLease | None) -> None:
        self._records = records
        self._first = first
        self._past = past
        self._file: AppendFile | None = None
        self._is_begun = self._is_named = past is not None
        self._is_given_up = False
        self.key = key_of(first.lease)
        self.now: datetime = first.now
        self.has_past = past is not None
        self.lives = 0 if past is None else 1 + past.resumptions
        """Processes before this one that are known to have gone on with it, for names that none of them has used."""

    def next_turn(self, conversation: int) -> RecordedTurn | None:
        """The next turn of a conversation that a former process had; None if there is no other one."""
        turns = self._past.turns[conversation] if self._past is not None else None
        turn = turns.popleft() if turns else None
        if turn is not None:
            self._records.metrics.replayed.inc()
        return turn

    def add_turn(self, row: TurnRow) -> None:
        """Takes a turn down: it survives the end of this process from here on."""
        rows = (row,) if self._is_begun else (self._first, row)
        self._is_begun = True
        self._write(*rows)

    async def add_answer(self, row: AnswerRow) -> None:
        """Takes the environment's answer down; all so far is on the disk when this returns."""
        self._write(row)
        if self._file is not None:
            try:
                await asyncio.to_thread(self._sync, self._file)
            except OSError as error:
                self.give_up("disk", error)

    def has_more(self, conversation: int) -> bool:
        """True if a former process had another turn of a conversation."""
        return self._past is not None and bool(self._past.turns[conversation])

    async def saved(self, conversation: int) -> EnvironmentState | None:
        """The state in which a former process saved a conversation's environment last; None if it did not."""
        if not self.has_past:
            return None
        return await asyncio.to_thread(self._records.saved, self.key, conversation)

    async def save(self, conversation: int, state: EnvironmentState) -> None:
        """Takes the environment's state down, in the place of the one before; it is on the disk when this returns."""
        if self._is_given_up:
            return
        try:
            if not self._records.has_room_for(len(state.data)):
                self.give_up("full", None)
                return
            self._records.grew(self.key, len(state.data), name=saved_name_of(self.key, conversation))
            await asyncio.to_thread(self._records.write_saved, self.key, conversation, state)
        except (OSError, FolderLost) as error:
            self.give_up("disk", error)

    def resume(self) -> None:
        """This process goes on with it."""
        self._write(ResumedRow())

    def close(self) -> None:
        """Lets go of the file; nothing is taken down any more."""
        self._is_given_up = True
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, *rows: Row) -> None:
        if self._is_given_up:
            return
        lines = [line_of(row) for row in rows]
        try:
            if not self._records.has_room_for(sum(map(len, lines))):
                self.give_up("full", None)
                return
            if self._file is None:
                self._file = self._records.opened(self.key, end=self._past.end if self._past is not None else 0)
            self._file.append(*lines)
            self._records.grew(self.key, self._file.end)
        except (OSError, FolderLost) as error:
            self.give_up("disk", error)

    def _sync(self, file: AppendFile) -> None:
        if self._is_given_up:
            return
        file.sync()
        if not self._is_named:
            self._is_named = True
            self._records.sync_names()

    def give_up(self, reason: str, error: Exception | None) -> None:
        """The lease goes on without a record."""
        if not self._is_given_up:
            self._records.give_up(self.key, reason, error)


class RecordMetrics:
    """The metrics of records."""

    def __init__(self, metrics: Metrics) -> None:
        self.replayed = metrics.counter(
            "replayed_turns", "Turns that a former process had recorded, and that were gone through again."
        )
        self.resumed = metrics.counter(
            "resumed_leases",
            "Leases that a former process had recorded: resumed, or refused, so that they are rolled out anew.",
            labels=("outcome",),
            known=one_label("resumed", "refused"),
        )
        self.unrecorded = metrics.counter(
            "unrecorded_leases",
            "Leases whose record was given up: `full`, the folder may hold no more; `disk`, it could not be written; "
            "`unsaved`, an environment could not be.",
            labels=("reason",),
            known=one_label("full", "disk", "unsaved"),
        )
        self.size = metrics.gauge("record_bytes", "Bytes of the records of conversations that are going on.")


class LeaseRecords:
    """The records of one env_service, of at most `max_bytes`. `lock` holds the folder, which nobody else reads."""

    def __init__(self, folder: Path, *, max_bytes: int, metrics: Metrics, lock: RunLock) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = lock
        self._open: dict[LeaseKey, LeaseRecord] = {}
        self._sizes: dict[LeaseKey, dict[str, int]] = {}
        self._past: dict[LeaseKey, RecordedLease] = {}
        self._has_complained = False
        self.run = ""
        """The run that the records are of, as its learner names it."""
        self.metrics = RecordMetrics(metrics)
        self.metrics.size.set_function(self._bytes)
        self._read()

    def _bytes(self) -> int:
        return sum(size for files in self._sizes.values() for size in files.values())

    def past(self) -> Mapping[LeaseKey, RecordedLease]:
        """Leases of a former process that nobody has gone on with yet."""
        return dict(self._past)

    def keys(self) -> tuple[LeaseKey, ...]:
        """Leases that have a record."""
        return tuple(self._sizes)

    def record_of(self, lease: Lease, *, rules: str) -> LeaseRecord:
        """The record of a lease that begins now, or goes on. `rules` is text of all that its conversations go by."""
        key, digest = key_of(lease), hashlib.sha256(rules.encode()).hexdigest()
        past = self._past.pop(key, None)
        if past is not None and past.first.rules != digest:
            self._refuse(key, past, "its environment has other rules now")
            past = None
        first = LeaseRow(run=self.run, lease=lease, rules=digest, now=datetime.now())
        record = self._open[key] = LeaseRecord(self, first if past is None else past.first, past)
        if past is not None:
            record.resume()
            self.metrics.resumed.labels(outcome="resumed").inc()
        return record

    def remove(self, key: LeaseKey) -> None:
        """Forgets a lease: the learner has its outcome, or waits for none. One without a record is passed over."""
        self._past.pop(key, None)
        record = self._open.pop(key, None)
        if record is not None:
            record.close()
        files = self._sizes.pop(key, None)
        self._unlink(*(self._folder / name for name in files or ()))

    def begin_run(self, run: str) -> None:
        """Records are of this run from here on; those of another one are of nobody any more."""
        if run != self.run:
            for key in dict.fromkeys((*self._open, *self._sizes)):
                self.remove(key)
            self.run = run

    def close(self) -> None:
        """Leaves the records to the next process."""
        for record in self._open.values():
            record.close()
        self._open.clear()

    def has_room_for(self, size: int) -> bool:
        """True if so many bytes more may be written. Raises FolderLost."""
        self._lock.check()
        return self._bytes() + size <= self._max_bytes

    def opened(self, key: LeaseKey, *, end: int) -> AppendFile:
        """The file of a record, cut at the byte `end`. Raises OSError."""
        return AppendFile(self._folder / file_name_of(key), end=end)

    def grew(self, key: LeaseKey, size: int, *, name: str = "") -> None:
        """The file of a record, or the one of this `name` beside it, has so many bytes now."""
        self._sizes.setdefault(key, {})[name or file_name_of(key)] = size

    def saved(self, key: LeaseKey, conversation: int) -> EnvironmentState | None:
        """The state of an environment that was saved last; None if there is no whole one."""
        path = self._folder / saved_name_of(key, conversation)
        return EnvironmentState.unpacked(path.read_bytes()) if path.exists() else None

    def write_saved(self, key: LeaseKey, conversation: int, state: EnvironmentState) -> None:
        """Puts a state in the place of the one before, whole or not at all. Raises OSError."""
        path = self._folder / saved_name_of(key, conversation)
        draft = path.with_name(f"{path.name}.new")
        try:
            with draft.open("wb") as file:
                file.write(state.packed())
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except OSError:
            self._unlink(draft)
            raise
        if key not in self._sizes:  # the lease has ended meanwhile: whoever saves may have been cancelled
            self._unlink(path)
        self.sync_names()

    def sync_names(self) -> None:
        """Returns when the names of all records are on the disk. Raises OSError."""
        sync_folder(self._folder)

    def give_up(self, key: LeaseKey, reason: str, error: Exception | None) -> None:
        """The lease goes on without a record."""
        self._sizes.setdefault(key, {})[file_name_of(key)] = 0
        self.remove(key)
        self.metrics.unrecorded.labels(reason=reason).inc()
        if not self._has_complained:
            self._has_complained = True
            what = f"more than {self._max_bytes >> 20} MiB" if error is None else str(error)
            logger.warning(
                "%s: conversations go on without a checkpoint, and are begun anew if this process dies: %s",
                self._folder, what,
            )  # fmt: skip

    def _read(self) -> None:
        """Takes up what a former process has left."""
        for path, found in self._found():
            key = key_of(found.first.lease)
            self._sizes[key] = {path.name: found.end, **self._sizes_of_saved(key)}
            if found.size > found.end:
                logger.info("%s: its last %d bytes are torn, and left out", path, found.size - found.end)
            if found.resumed >= _TRIES:
                self._refuse(key, found, f"{found.resumed} processes in a row ended before it had another turn")
            elif found.first.run != self.run and self.run:
                self._refuse(key, found, "it is of another run than others here")
            else:
                self.run, self._past[key] = found.first.run, found
        known = {name for files in self._sizes.values() for name in files}
        for path in (*self._folder.glob(f"*{_SAVED}"), *self._folder.glob(f"*{_SAVED}.new")):
            if path.name not in known:  # its lease had ended, or its process died while it was written
                path.unlink()

    def _sizes_of_saved(self, key: LeaseKey) -> dict[str, int]:
        stem = file_name_of(key).removesuffix(_ENDING)
        return {path.name: path.stat().st_size for path in self._folder.glob(f"{stem}.*{_SAVED}")}

    def _found(self) -> Iterator[tuple[Path, RecordedLease]]:
        for path in sorted(self._folder.glob(f"*{_ENDING}")):
            found = read_record(path)
            if found is None or file_name_of(key_of(found.first.lease)) != path.name:
                logger.warning("%s is no whole record of a lease: it is removed", path)
                path.unlink()
                self.metrics.resumed.labels(outcome="refused").inc()
            else:
                yield path, found

    def _unlink(self, *paths: Path) -> None:
        with suppress(OSError, FolderLost):
            self._lock.check()
            for path in paths:
                path.unlink(missing_ok=True)

    def _refuse(self, key: LeaseKey, found: RecordedLease, why: str) -> None:
        logger.warning(
            "lease %d of environment %s is not gone on with: %s; it is rolled out anew",
            key.lease_id, found.first.lease.environment, why,
        )  # fmt: skip
        self.metrics.resumed.labels(outcome="refused").inc()
        self.remove(key)
