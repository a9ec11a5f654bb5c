"""The batch log: what was appended comes back in order, torn tails go, damage is named."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from learner.history.journal import (
    Journal,
    JournalDamaged,
    LoggedBatch,
    LoggedFilter,
    LoggedGroup,
    Record,
    read_journal,
)
from tests.learner.samples import group, trajectory


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "journal.log"


def write_some(path: Path) -> list[int]:
    """Two groups, a filter and a batch; returns where each record ends."""
    ends: list[int] = []

    def note() -> None:
        ends.append(path.stat().st_size)

    with Journal.open(path) as journal:
        journal.append_group(group(7, version=2))
        note()
        journal.append_group(group(3, version=2))
        note()
        journal.append_filtered(7)
        note()
        journal.append_batch(version=2, lease_ids=(3,))
        note()
    return ends


def short(records: list[Record]) -> list[object]:
    return [("group", r.group.lease_id) if isinstance(r, LoggedGroup) else r for r in records]


SOME: list[object] = [
    ("group", 7),
    ("group", 3),
    LoggedFilter(lease_id=7),
    LoggedBatch(version=2, lease_ids=(3,)),
]


def test_records_come_back_in_the_order_of_their_appending(path: Path) -> None:
    write_some(path)
    assert short(list(read_journal(path))) == SOME


def test_a_group_comes_back_as_it_was(path: Path) -> None:
    original = group(4, trajectory(1, 1, 2, reward=0.5, finish="length"), trajectory(2, reward=None))
    with Journal.open(path) as journal:
        journal.append_group(original)
    (record,) = read_journal(path)
    assert isinstance(record, LoggedGroup)
    for ours, theirs in zip(record.group.trajectories, original.trajectories, strict=True):
        for name in ("token_ids", "loss_mask", "behavior_logprobs"):
            assert np.array_equal(getattr(ours, name), getattr(theirs, name))
        left_out = {"token_ids", "loss_mask", "behavior_logprobs"}
        assert ours.model_dump(exclude=left_out) == theirs.model_dump(exclude=left_out)
    assert record.group.oldest_version == 1


def test_a_missing_journal_is_empty(path: Path) -> None:
    assert list(read_journal(path)) == []


@pytest.mark.parametrize("lost", [1, 5, 20])
def test_a_torn_tail_is_left_out_and_cut_at_opening(path: Path, lost: int) -> None:
    ends = write_some(path)
    os.truncate(path, ends[3] - lost)
    assert short(list(read_journal(path))) == SOME[:3]
    with Journal.open(path) as journal:
        assert path.stat().st_size == ends[2]
        journal.append_batch(version=2, lease_ids=(3,))
    assert short(list(read_journal(path))) == SOME


def test_a_last_record_whose_bytes_did_not_arrive_counts_as_torn(path: Path) -> None:
    ends = write_some(path)
    with path.open("r+b") as file:
        file.seek(ends[3] - 2)
        file.write(b"\0\0")
    assert short(list(read_journal(path))) == SOME[:3]


def test_a_tail_of_zeros_counts_as_torn(path: Path) -> None:
    ends = write_some(path)
    os.truncate(path, ends[3] + 4096)
    assert short(list(read_journal(path))) == SOME


@pytest.mark.parametrize("at", [0, 3, 4, 5, 13, 40], ids=["length", "length high", "type", "hash", "check", "payload"])
def test_damage_in_the_middle_names_the_file_and_the_place_and_is_not_cut(path: Path, at: int) -> None:
    ends = write_some(path)
    damaged = bytearray(path.read_bytes())
    damaged[ends[0] + at] ^= 0x41
    path.write_bytes(damaged)
    with pytest.raises(JournalDamaged, match=rf"journal\.log: the record at byte {ends[0]} .*truncate -s {ends[0]}"):
        list(read_journal(path))
    with pytest.raises(JournalDamaged):
        Journal.open(path)
    assert path.read_bytes() == damaged


def test_a_batch_is_synced_before_append_batch_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    really: Callable[[int], None] = os.fdatasync

    def spy(handle: int) -> None:
        synced.append(os.fstat(handle).st_size)
        really(handle)

    monkeypatch.setattr("learner.history.journal.os.fdatasync", spy)
    with Journal.open(path) as journal:
        journal.append_group(group(0))
        assert synced == [], "a group only has to survive the process"
        journal.append_batch(version=0, lease_ids=(0,))
        assert synced == [path.stat().st_size], "the whole batch was in the file when it was synced"


def test_a_group_is_in_the_file_when_append_group_returns(path: Path) -> None:
    with Journal.open(path) as journal:
        journal.append_group(group(0))
        assert short(list(read_journal(path))) == [("group", 0)]


def test_groups_and_batches_appended_from_two_threads_do_not_mix(path: Path) -> None:
    with Journal.open(path) as journal:

        def append_batches() -> None:
            for version in range(60):
                journal.append_batch(version=version, lease_ids=range(version, version + 50))

        thread = threading.Thread(target=append_batches)
        thread.start()
        for lease_id in range(200):
            journal.append_group(group(lease_id))
        thread.join()
    records = list(read_journal(path))
    assert [r.group.lease_id for r in records if isinstance(r, LoggedGroup)] == list(range(200))
    assert [r.version for r in records if isinstance(r, LoggedBatch)] == list(range(60))
