"""The batch log: what was appended comes back in order, torn tails go, damage is named."""

import errno
import os
import resource
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from learner.journal.journal import (
    Journal,
    JournalDamaged,
    JournalFull,
    JournalLost,
    JournalUnknown,
    LoggedBatch,
    LoggedDistrust,
    LoggedFilter,
    LoggedGroup,
    Record,
    read_journal,
)
from learner.journal.segments import encoded_group, read_segment, segments_of, set_aside
from protocol.codec import encode, sealed
from protocol.messages import FinishedLease
from protocol.model import PolicyVersion
from protocol.routed_experts import RoutedExperts
from services.append_file import AppendFile
from services.run_lock import FolderLost
from tests.learner.journal.power_loss import UnsyncedDisk
from tests.learner.samples import group, trajectory


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "journal"


@pytest.fixture
def path(folder: Path) -> Path:
    """The first segment."""
    return folder / "segment-00000000.log"


STORED = Path(__file__).parents[2] / "protocol/golden/stored/finished-4.hex"
"""The frames of a group as protocol version 4 wrote them."""
DISTRUST = LoggedDistrust("g-1", PolicyVersion(1, 2))


def write_some(path: Path) -> list[int]:
    """Two groups, a distrust and a batch; returns where each record ends."""
    ends: list[int] = []

    def note() -> None:
        ends.append(path.stat().st_size)

    with Journal.open(path.parent) as journal:
        journal.append_group(group(7, version=2))
        note()
        journal.append_group(group(3, version=2))
        note()
        journal.append_provenance(DISTRUST)
        note()
        journal.append_batch(version=2, lease_ids=(3,))
        note()
    return ends


def short(records: list[Record]) -> list[object]:
    return [("group", r.group.lease_id) if isinstance(r, LoggedGroup) else r for r in records]


SOME: list[object] = [
    ("group", 7),
    ("group", 3),
    DISTRUST,
    LoggedBatch(version=2, lease_ids=(3,)),
]


def test_records_come_back_in_the_order_of_their_appending(path: Path) -> None:
    write_some(path)
    assert short(list(read_journal(path.parent))) == SOME


@pytest.mark.parametrize("as_received", [False, True])
def test_a_group_comes_back_as_it_was(path: Path, as_received: bool) -> None:
    original = group(4, trajectory(1, 1, 2, reward=0.5, finish="length"), trajectory(2, reward=None))
    with Journal.open(path.parent) as journal:
        journal.append_group(original, frames=encode(FinishedLease(group=original)) if as_received else None)
    (record,) = read_journal(path.parent)
    assert isinstance(record, LoggedGroup)
    for ours, theirs in zip(record.group.trajectories, original.trajectories, strict=True):
        for name in ("token_ids", "loss_mask", "behavior_logprobs"):
            assert np.array_equal(getattr(ours, name), getattr(theirs, name))
        left_out = {"token_ids", "loss_mask", "behavior_logprobs"}
        assert ours.model_dump(exclude=left_out) == theirs.model_dump(exclude=left_out)
    assert record.group.oldest_version == 1


def test_routed_experts_come_back_from_the_disk(path: Path) -> None:
    rows = np.array([[[3, 250]], [[0, 1]], [[7, 9]]], dtype=np.uint8)
    routed = trajectory(1, 1).model_copy(update={"routed_experts": RoutedExperts.of([(0, rows)])})
    with Journal.open(path.parent) as journal:
        journal.append_group(group(7, routed, trajectory(1), version=1))
    (record,) = read_journal(path.parent)
    assert isinstance(record, LoggedGroup)
    first, second = record.group.trajectories
    assert first.routed_experts is not None
    assert first.routed_experts.spans == ((0, 3),)
    assert (first.routed_experts.rows() == rows).all()
    assert second.routed_experts is None


def test_a_missing_journal_is_empty(path: Path) -> None:
    assert list(read_journal(path.parent)) == []


@pytest.mark.parametrize("lost", [1, 5, 20])
def test_a_torn_tail_is_left_out_and_cut_at_opening(path: Path, lost: int) -> None:
    ends = write_some(path)
    os.truncate(path, ends[3] - lost)
    assert short(list(read_journal(path.parent))) == SOME[:3]
    with Journal.open(path.parent) as journal:
        assert path.stat().st_size == ends[2]
        journal.append_batch(version=2, lease_ids=(3,))
    assert short(list(read_journal(path.parent))) == SOME


def test_a_last_record_whose_bytes_did_not_arrive_counts_as_torn(path: Path) -> None:
    ends = write_some(path)
    with path.open("r+b") as file:
        file.seek(ends[3] - 2)
        file.write(b"\0\0")
    assert short(list(read_journal(path.parent))) == SOME[:3]


def test_a_tail_of_zeros_counts_as_torn(path: Path) -> None:
    ends = write_some(path)
    os.truncate(path, ends[3] + 4096)
    assert short(list(read_journal(path.parent))) == SOME


@pytest.mark.parametrize("at", [0, 3, 4, 5, 13, 40], ids=["length", "length high", "type", "hash", "check", "payload"])
def test_damage_in_the_middle_names_the_file_and_the_place_and_is_not_cut(path: Path, at: int) -> None:
    ends = write_some(path)
    damaged = bytearray(path.read_bytes())
    damaged[ends[0] + at] ^= 0x41
    path.write_bytes(damaged)
    with pytest.raises(JournalDamaged, match=rf"segment-00000000\.log: at byte {ends[0]} a record does not") as found:
        list(read_journal(path.parent))
    assert (found.value.path, found.value.at) == (path, ends[0])
    with pytest.raises(JournalDamaged):
        Journal.open(path.parent)
    assert path.read_bytes() == damaged


def test_a_batch_is_synced_before_append_batch_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    really: Callable[[int], None] = os.fdatasync

    def spy(handle: int) -> None:
        synced.append(os.fstat(handle).st_size)
        really(handle)

    monkeypatch.setattr("services.append_file.os.fdatasync", spy)
    with Journal.open(path.parent) as journal:
        journal.append_group(group(0))
        assert synced == [], "a group only has to survive the process"
        journal.append_batch(version=0, lease_ids=(0,))
        assert synced == [path.stat().st_size], "the whole batch was in the file when it was synced"


def test_what_a_killed_process_had_not_synced_is_on_the_disk_before_the_next_one_goes_on(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal.open(path.parent) as journal:
        journal.append_group(group(0))
        journal.append_batch(version=0, lease_ids=(0,))
        journal.rotate(version=1, groups=())
        journal.append_group(group(1))
    disk = UnsyncedDisk.beneath(monkeypatch)
    with Journal.open(path.parent) as journal:
        journal.rotate(version=2, groups=())  # a batch that is trained again is not written again, nor synced for it
        left = disk.left_of(path.parent, path.parent.parent / "left")
    disk.close()
    assert short(list(read_journal(left))) == [("group", 0), LoggedBatch(0, (0,)), ("group", 1)]


def test_a_group_is_in_the_file_when_append_group_returns(path: Path) -> None:
    with Journal.open(path.parent) as journal:
        journal.append_group(group(0))
        assert short(list(read_journal(path.parent))) == [("group", 0)]


def test_groups_and_batches_appended_from_two_threads_do_not_mix(path: Path) -> None:
    with Journal.open(path.parent) as journal:

        def append_batches() -> None:
            for version in range(60):
                journal.append_batch(version=version, lease_ids=range(version, version + 50))

        thread = threading.Thread(target=append_batches)
        thread.start()
        for lease_id in range(200):
            journal.append_group(group(lease_id))
        thread.join()
    records = list(read_journal(path.parent))
    assert [r.group.lease_id for r in records if isinstance(r, LoggedGroup)] == list(range(200))
    assert [r.version for r in records if isinstance(r, LoggedBatch)] == list(range(60))


def test_a_journal_killed_at_any_byte_of_a_write_keeps_all_records_before_it(path: Path) -> None:
    ends = write_some(path)
    whole = path.read_bytes()
    for size in range(ends[1], len(whole)):
        path.write_bytes(whole[:size])
        kept = sum(end <= size for end in ends)
        assert short(list(read_journal(path.parent))) == SOME[:kept], size
        with Journal.open(path.parent) as journal:
            assert path.stat().st_size == ends[kept - 1]
            journal.append_provenance(DISTRUST)
        assert short(list(read_journal(path.parent))) == [*SOME[:kept], DISTRUST], size


def test_any_flipped_bit_ends_the_good_part_at_its_record_and_never_changes_one(path: Path) -> None:
    ends = write_some(path)
    whole = path.read_bytes()
    for at in range(ends[1], len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x20]) + whole[at + 1 :])
        before = sum(end <= at for end in ends)
        seen, damaged_at = read_what_is_whole(path)
        assert damaged_at in (None, ends[before - 1])
        assert short(seen) == SOME[:before], at


def test_a_checkpoint_begins_a_segment_with_the_groups_that_no_batch_has_used(folder: Path) -> None:
    with Journal.open(folder) as journal:
        journal.append_group(group(1))
        journal.append_group(group(2))
        journal.append_batch(version=0, lease_ids=(1,))
        journal.rotate(version=1, groups=[group(2)])
        journal.append_group(group(3))
        journal.append_batch(version=1, lease_ids=(2,))
    assert [segment.start for segment in segments_of(folder)] == [0, 1]
    (_, newest) = segments_of(folder)
    records = [record for record, _ in read_segment(newest.path)]
    assert short(records) == [("group", 2), ("group", 3), LoggedBatch(version=1, lease_ids=(2,))]
    with Journal.open(folder) as journal:
        journal.rotate(version=1, groups=[])
        journal.append_group(group(4), filtered=True)
    assert [record for record, _ in read_segment(newest.path)][-1] == LoggedFilter(lease_id=4)


@pytest.mark.parametrize("aside", [True, False])
def test_a_segment_that_a_former_process_began_gets_the_groups_that_it_had_dropped(folder: Path, aside: bool) -> None:
    """As with a guard's bound, which dies with the process if its checkpoint is not written any more."""
    with Journal.open(folder) as journal:
        journal.append_group(group(1))
        journal.append_group(group(2))
        journal.append_batch(version=0, lease_ids=(1,))
        journal.rotate(version=1, groups=[])
        journal.append_group(group(3))
    (_, newest) = segments_of(folder)

    with Journal.open(folder) as journal:
        if aside:
            journal.prepare(version=1, groups=[group(2), group(3)])
        journal.rotate(version=1, groups=[] if aside else [group(2), group(3)])
        journal.rotate(version=1, groups=[group(2)])
        journal.append_batch(version=1, lease_ids=(2,))

    records = [record for record, _ in read_segment(newest.path)]
    batch = LoggedBatch(version=1, lease_ids=(2,))
    assert short(records) == [("group", 3), ("group", 2), ("group", 3), batch], "each once more, and once"


def test_a_segment_that_was_being_begun_at_a_crash_is_not_there(folder: Path) -> None:
    with Journal.open(folder) as journal:
        journal.append_group(group(1))
    (folder / "segment.new").write_bytes(b"half a rec")
    with Journal.open(folder) as journal:
        assert short(list(read_journal(folder))) == [("group", 1)]
        journal.rotate(version=1, groups=[group(1)])
    assert short(list(read_journal(folder))) == [("group", 1), ("group", 1)]


def test_old_segments_go_and_the_newest_never_does(folder: Path) -> None:
    with Journal.open(folder) as journal:
        for version in (2, 4):
            journal.rotate(version=version, groups=[])
        journal.trim(version=2)
        assert [segment.start for segment in segments_of(folder)] == [2, 4]
        journal.trim(version=9)
        assert [segment.start for segment in segments_of(folder)] == [4]


def test_damage_is_moved_aside_with_all_that_follows(folder: Path) -> None:
    with Journal.open(folder) as journal:
        for version in range(3):
            journal.append_group(group(version))
            journal.append_batch(version=version, lease_ids=(version,))
            journal.rotate(version=version + 1, groups=[])
    segments = segments_of(folder)
    middle = segments[1].path
    whole = middle.read_bytes()
    first = next(at for _, at in list(read_segment(middle))[1:])
    set_aside(JournalDamaged(middle, first, what="is wrong"), segments=segments, keep_empty=False)
    assert middle.read_bytes() == whole[:first]
    assert (folder / "segment-00000001.log.damaged").read_bytes() == whole[first:]
    assert sorted(path.name for path in folder.iterdir()) == [
        "segment-00000000.log", "segment-00000001.log", "segment-00000001.log.damaged",
        "segment-00000002.log.damaged", "segment-00000003.log.damaged",
    ]  # fmt: skip
    set_aside(JournalDamaged(middle, 0, what="is wrong"), segments=segments_of(folder), keep_empty=False)
    assert [segment.start for segment in segments_of(folder)] == [0]
    assert (folder / "segment-00000001.log.damaged-2").read_bytes() == whole[:first]


class LimitedFileSize:
    """Files of this process end here, as on a full disk."""

    def __init__(self, size: int) -> None:
        self._former = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, self._former[1]))

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._former)


def test_a_full_disk_leaves_no_torn_record_and_the_journal_goes_on_once_there_is_room(path: Path) -> None:
    with Journal.open(path.parent) as journal:
        journal.append_group(group(1))
        end = path.stat().st_size
        with LimitedFileSize(end + 30):
            with pytest.raises(JournalFull, match=rf"the disk of {path.parent} is full: File too large") as full:
                journal.append_group(group(2))
            with pytest.raises(JournalFull):
                journal.append_batch(version=0, lease_ids=range(100))
            with pytest.raises(JournalFull):
                journal.rotate(version=1, groups=[group(1), group(1)])
        assert full.value.errno == errno.EFBIG
        assert path.stat().st_size == end
        assert [each.name for each in path.parent.iterdir()] == [path.name], "the segment that was begun is gone"
        journal.append_group(group(3))
        journal.append_batch(version=0, lease_ids=(1,))
    assert short(list(read_journal(path.parent))) == [
        ("group", 1),
        ("group", 3),
        LoggedBatch(version=0, lease_ids=(1,)),
    ]


def test_a_batch_whose_sync_found_no_room_is_not_written_twice(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: AppendFile) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Journal.open(path.parent) as journal:
        with monkeypatch.context() as patch:
            patch.setattr(AppendFile, "sync", full)
            with pytest.raises(JournalFull):
                journal.append_batch(version=0, lease_ids=(1,))
        journal.append_batch(version=0, lease_ids=(1,))
    assert list(read_journal(path.parent)) == [LoggedBatch(version=0, lease_ids=(1,))]


def test_what_could_not_be_cut_off_is_cut_before_the_next_append(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "file")
    file.append(b"whole")
    with LimitedFileSize(8), pytest.raises(OSError, match="File too large"):
        file.append(b"too long")
    with (tmp_path / "file").open("ab") as residue:
        residue.write(b"that a failed truncation leaves")
    file._torn = True
    file.append(b"!")
    file.close()
    assert (tmp_path / "file").read_bytes() == b"whole!"


@pytest.mark.parametrize("at_once", [1, 2, 3, 7, 1000])
def test_parts_that_the_disk_takes_piece_by_piece_stand_one_after_the_other(
    tmp_path: Path, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_some(handle: int, parts: Sequence[bytes | memoryview], at: int) -> int:
        return os.pwrite(handle, b"".join(parts)[:at_once], at)

    monkeypatch.setattr(os, "pwritev", write_some)
    file = AppendFile(tmp_path / "file")
    file.append(b"first")
    file.append(b"", b"one", memoryview(b"and"), b"", b"another")
    file.append(b"last")
    file.close()
    assert (tmp_path / "file").read_bytes() == b"firstoneandanotherlast"


def test_more_parts_than_one_write_takes_are_all_written(tmp_path: Path) -> None:
    parts = [bytes([number % 256]) for number in range(5000)]
    file = AppendFile(tmp_path / "file")
    file.append(*parts)
    file.close()
    assert (tmp_path / "file").read_bytes() == b"".join(parts)


def test_parts_of_which_some_found_no_room_leave_the_file_as_it_was(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "file")
    file.append(b"whole")
    with LimitedFileSize(8), pytest.raises(OSError, match="File too large"):
        file.append(b"to", b"o long", b" by far")
    assert (tmp_path / "file").read_bytes() == b"whole"
    file.append(b", and", b" more")
    file.close()
    assert (tmp_path / "file").read_bytes() == b"whole, and more"


def read_what_is_whole(path: Path) -> tuple[list[Record], int | None]:
    seen: list[Record] = []
    try:
        for record, _ in read_segment(path):
            seen.append(record)
    except JournalDamaged as damage:
        return seen, damage.at
    return seen, None


def keeps(first_failure: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has the disk fail at its n-th sync, and report nothing more of what it gave up. Counts the bytes it was given."""
    given, syncs = [0], [0]
    really_write, really_sync = os.pwrite, os.fdatasync

    def write(handle: int, data: bytes, at: int) -> int:
        given[0] += len(data)
        return really_write(handle, data, at)

    def sync(handle: int) -> None:
        syncs[0] += 1
        if syncs[0] == first_failure:
            raise OSError(errno.ENOSPC, "No space left on device")
        really_sync(handle)

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(os, "fdatasync", sync)
    return given


def test_what_a_failed_sync_may_have_given_up_is_written_again_before_the_next_one_counts(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = keeps(2, monkeypatch)
    with Journal.open(path.parent) as journal:
        journal.append_group(group(1))
        journal.append_batch(version=0, lease_ids=(1,))
        synced = path.stat().st_size
        journal.append_group(group(2))
        with pytest.raises(JournalFull):
            journal.append_batch(version=1, lease_ids=(2,))
        journal.append_group(group(3))
        before, unsure = given[0], path.stat().st_size - synced
        journal.append_batch(version=1, lease_ids=(2,))
        assert given[0] - before == unsure
        journal.append_batch(version=2, lease_ids=(3,))
        assert given[0] - before - unsure == path.stat().st_size - synced - unsure, "and once only"
    records = short(list(read_journal(path.parent)))
    assert records[2:4] == [("group", 2), LoggedBatch(version=1, lease_ids=(2,))]


def test_what_the_disk_has_lost_ends_the_run_instead_of_being_believed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeps(1, monkeypatch)
    with Journal.open(path.parent) as journal:
        journal.append_group(group(1))
        with pytest.raises(JournalFull):
            journal.append_batch(version=0, lease_ids=(1,))
        path.write_bytes(bytes(path.stat().st_size))
        with pytest.raises(JournalLost, match=r"the disk has lost what was written from byte 0 on .*--resume"):
            journal.append_batch(version=0, lease_ids=(1,))


def test_nothing_is_written_by_who_has_lost_the_folder(path: Path) -> None:
    with Journal.open(path.parent) as journal:
        journal.append_group(group(1))

    def lost() -> None:
        raise FolderLost("taken over")

    before = path.read_bytes()
    with Journal.open(path.parent, may_write=lost) as journal:
        writes: list[Callable[[], None]] = [
            lambda: journal.append_group(group(2)),
            lambda: journal.append_batch(version=0, lease_ids=(1,)),
            lambda: journal.prepare(version=1, groups=[group(1)]),
            lambda: journal.rotate(version=1, groups=[group(1)]),
            lambda: journal.trim(version=1),
        ]
        for write in writes:
            with pytest.raises(FolderLost):
                write()
    assert (path.read_bytes(), os.listdir(path.parent)) == (before, [path.name])


def test_groups_written_aside_begin_the_segment_and_later_ones_follow(folder: Path) -> None:
    with Journal.open(folder) as journal:
        journal.append_group(group(1))
        journal.prepare(version=3, groups=[group(1)])
        journal.append_group(group(2))
        assert short(list(read_journal(folder))) == [("group", 1), ("group", 2)]
        journal.rotate(version=3, groups=[group(2)])
        journal.prepare(version=4, groups=[group(1)])
        journal.rotate(version=5, groups=[group(2)])
        journal.prepare(version=6, groups=[group(1)])
    segments = segments_of(folder)
    assert [segment.start for segment in segments] == [0, 3, 5]
    assert [short([record for record, _ in read_segment(segment.path)]) for segment in segments[1:]] == [
        [("group", 1), ("group", 2)],
        [("group", 2)],
    ]
    assert len(os.listdir(folder)) == 3, "what was written aside and not used is gone"


def test_a_closed_journal_refuses_what_comes_after(path: Path) -> None:
    journal = Journal.open(path.parent)
    journal.append_group(group(1))
    journal.__exit__()
    other = os.open(path.with_name("other"), os.O_RDWR | os.O_CREAT)  # gets the descriptor's number
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            journal.append_group(group(2))
        with pytest.raises(OSError, match="Bad file descriptor"):
            journal.sync()
        assert os.fstat(other).st_size == 0
    finally:
        os.close(other)


def test_a_journal_of_a_former_version_of_the_protocol_is_read(path: Path) -> None:
    frames = [bytes.fromhex(line) for line in STORED.read_text("ascii").splitlines()]
    path.parent.mkdir(parents=True)
    path.write_bytes(b"".join(encoded_group(frames)))
    with Journal.open(path.parent) as journal:
        journal.append_group(group(3, version=2))
    first, second = [record for record, _ in read_segment(path)]
    assert isinstance(first, LoggedGroup)
    assert isinstance(second, LoggedGroup)
    assert (first.group.lease_id, first.group.oldest_version, second.group.lease_id) == (70000, 6, 3)
    header = frames[0].replace(b"\x93\x04", b"\x93\x03", 1)
    path.write_bytes(b"".join(encoded_group(sealed([header, *frames[1:-1]]))))
    with pytest.raises(JournalUnknown, match="a group cannot be read: it was stored by a release that speaks"):
        list(read_segment(path))
