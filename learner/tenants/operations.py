"""The journal of accepted operations: one sync for all that came in a tick, files that go when they are covered.

    <folder>/operations-00000000.log …   records of learner.journal.records, the catalog first in each file

An operation is acknowledged when it is on the disk. At a start all files are read: the catalog, the operations that no
snapshot of their model covers, and samples, which a former life has lost. A record that a crash cut in two is cut off.
"""

import asyncio
import contextlib
import json
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from learner.journal.files import write_atomically
from learner.journal.records import framed, record, scan
from learner.tenants.catalog import Catalog, LossEntry, ModelEntry, SamplingEntry, SessionEntry, entry_of
from services.append_file import AppendFile, make_folder, sync_folder

logger = logging.getLogger(__name__)

_ENTRY, _OPERATION, _SAMPLE, _CATALOG = 1, 2, 3, 4
_NAME = re.compile(r"operations-(\d{8,})\.log")
_SEGMENT_BYTES = 64 << 20


@dataclass(frozen=True)
class LoggedOperation:
    """An operation as it was accepted: `body` as its kind has it, and the digest by which a retry is known."""

    model_id: str
    seq_id: int
    kind: str
    digest: str
    body: bytes


@dataclass
class RecoveredLog:
    """Contents of the journal at a start. `samples`: names of requests that former lives accepted, by session."""

    catalog: Catalog = field(default_factory=Catalog)
    operations: dict[tuple[str, int], LoggedOperation] = field(default_factory=dict)
    samples: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    life: int = 1


@dataclass
class _LogSegment:
    """A file of the journal, and the last operation of each model in it."""

    path: Path
    last: dict[str, int] = field(default_factory=dict)

    def note(self, model_id: str, seq_id: int) -> None:
        self.last[model_id] = max(seq_id, self.last.get(model_id, 0))


@dataclass(frozen=True)
class _WaitingRecord:
    """A record that is to be written. `written` takes note of it as soon as it is, before a later file is begun."""

    parts: list[bytes | memoryview]
    done: asyncio.Future[None]
    written: Callable[[], None]


class OperationLog:
    """Appends to the journal. All but the reading at the start is for one event loop."""

    def __init__(self, folder: Path, *, segment_bytes: int = _SEGMENT_BYTES) -> None:
        """Raises JournalDamaged and OSError."""
        make_folder(folder)
        self._folder, self._segment_bytes = folder, segment_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="operation-log")
        self._waiting: list[_WaitingRecord] = []
        self._writing: asyncio.Task[None] | None = None
        self._segments: list[_LogSegment] = []
        self._starting: set[tuple[str, str]] = set()  # samples that are written, and not under way yet
        self._refused_from: int | None = None
        self.recovered = self._recover()
        self.catalog = self.recovered.catalog
        self.samples_awaited: Callable[[], Iterable[tuple[str, str]]] = self._lost_samples
        """Sessions and names of samples that later files must know of, too: their clients wait until they hear of them.
        """
        self._file = self._begin_segment()

    async def entry(self, entry: SessionEntry | ModelEntry | SamplingEntry | LossEntry) -> None:
        """Put the entry into the catalog, on the disk too. Raises OSError, and then has changed nothing."""
        await self._append(_ENTRY, entry.model_dump_json().encode(), written=lambda: self.catalog.put(entry))

    async def operation(self, operation: LoggedOperation) -> None:
        """Returns when the operation is on the disk. Raises OSError."""
        head = [operation.model_id, operation.seq_id, operation.kind, operation.digest]
        payload = json.dumps(head).encode(), b"\n", operation.body
        await self._append(
            _OPERATION, *payload, written=lambda: self._segments[-1].note(operation.model_id, operation.seq_id)
        )

    async def sample(self, sampling_session_id: str, request_id: str) -> None:
        """Returns when it is on the disk that the sample was accepted. Raises OSError."""
        sample = sampling_session_id, request_id
        try:
            await self._append(_SAMPLE, json.dumps(sample).encode(), written=lambda: self._starting.add(sample))
        finally:
            self._starting.discard(sample)

    def trim(self, covered: dict[str, int]) -> None:
        """Remove the files whose operations are all covered; `covered`: the last operation in each model's snapshot."""
        for segment in self._segments[:-1]:
            if all(covered.get(model_id, -1) >= seq_id for model_id, seq_id in segment.last.items()):
                segment.path.unlink()
                self._segments.remove(segment)

    def holding(self) -> set[str]:
        """Models for whose operations the oldest file is kept."""
        return set(self._segments[0].last) if len(self._segments) > 1 else set()

    @property
    def files(self) -> int:
        """Files of the journal."""
        return len(self._segments)

    async def close(self) -> None:
        """Returns when all is written; nothing may be appended after it."""
        if self._writing is not None:
            await self._writing
        self._thread.shutdown()
        self._file.close()

    async def _append(self, kind: int, *payload: bytes, written: Callable[[], None]) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_WaitingRecord(record(kind, payload), done, written))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())
        await asyncio.shield(done)  # what is under way is written, whether its client waits or not

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch, self._waiting = self._waiting, []
            parts = [part for each in batch for part in each.parts]
            try:
                await loop.run_in_executor(self._thread, self._append_synced, parts)
            except OSError as error:
                for each in batch:
                    each.done.set_exception(OSError(error.errno, f"the journal of operations: {error.strerror}"))
                    each.done.exception()  # a client that has left does not read it
                continue
            for each in batch:
                each.written()
                each.done.set_result(None)
        self._writing = None
        if self._file.end > self._segment_bytes and self._refused_from is None:
            self._roll_over()

    def _append_synced(self, parts: Sequence[bytes | memoryview]) -> None:
        if self._refused_from is not None:
            self._cut_off(self._refused_from)
        start = self._file.end
        self._file.append(*parts)
        try:
            self._file.sync()
        except OSError:
            # Its clients are told that it was not accepted, so that it must not be found at the next start.
            self._refused_from = start
            with contextlib.suppress(OSError):  # tried again before the next append
                self._cut_off(start)
            raise

    def _cut_off(self, end: int) -> None:
        file = AppendFile(self._segments[-1].path, end=end)
        self._file.close()
        self._file, self._refused_from = file, None

    def _roll_over(self) -> None:
        former = self._file
        try:
            self._file = self._begin_segment()
        except OSError as error:
            logger.warning("the journal of operations goes on in its file, since no other can be begun: %s", error)
            return
        former.close()

    def _begin_segment(self) -> AppendFile:
        """Raises OSError, and then leaves no file: its catalog would hide what the one before it goes on with."""
        number = 1 + max((int(_matched(segment.path)) for segment in self._segments), default=-1)
        path = self._folder / f"operations-{number:08d}.log"
        file = AppendFile(path, end=0)
        try:
            file.append(framed(_CATALOG, self.catalog.dump()))
            samples = dict.fromkeys((*self.samples_awaited(), *self._starting))
            file.append(b"".join(framed(_SAMPLE, json.dumps(each).encode()) for each in samples))
            file.sync()
            sync_folder(self._folder)
        except OSError:
            file.close()
            path.unlink(missing_ok=True)
            raise
        self._segments.append(_LogSegment(path))
        return file

    def _lost_samples(self) -> list[tuple[str, str]]:
        """Samples that the files of former lives know of."""
        return [(session, name) for session, names in self.recovered.samples.items() for name in names]

    def _recover(self) -> RecoveredLog:
        recovered = RecoveredLog(life=self._next_life())
        for path in sorted(self._folder.glob("operations-*.log"), key=_matched):
            segment = _LogSegment(path)
            for kind, payload in _records(path):
                _recover_record(recovered, segment, kind, payload)
            self._segments.append(segment)
        return recovered

    def _next_life(self) -> int:
        path = self._folder / "life"
        life = 1 + (int(path.read_text()) if path.exists() else 0)
        write_atomically(path, f"{life}\n")
        return life


def _matched(path: Path) -> str:
    found = _NAME.fullmatch(path.name)
    assert found is not None, path
    return found[1].zfill(20)


def _records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Whole records; a torn tail is cut off, since it would hide all that follows it.

    They are on the disk in the end: a life that was killed may have left some that were on their way there, and a retry
    of these is told that they were accepted.
    """
    end = 0
    for kind, payload, _, following in scan(path):
        yield kind, payload
        end = following
    file = AppendFile(path, end=end)
    file.sync()
    file.close()


def _recover_record(recovered: RecoveredLog, segment: _LogSegment, kind: int, payload: bytes) -> None:
    match kind:
        case 1:
            recovered.catalog.put(entry_of(payload))
        case 2:
            head, _, body = payload.partition(b"\n")
            model_id, seq_id, name, digest = json.loads(head)
            operation = LoggedOperation(model_id, seq_id, name, digest, body)
            recovered.operations[model_id, seq_id] = operation  # a later one is in the place of one that was given up
            segment.note(model_id, seq_id)
        case 3:
            session, request_id = json.loads(payload)
            recovered.samples[session].append(request_id)
        case 4:
            recovered.catalog.load(payload)
