"""Records of leases on disk: torn ends, damage, bounds, and one process for each folder."""

import asyncio
import contextlib
import errno
import json
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from env_service.checkpoints.records import LeaseRecord, LeaseRecords, file_name_of, saved_name_of
from env_service.checkpoints.rows import AnswerRow, EnvironmentState, TurnRow, line_of, read_record
from protocol.lease_keys import key_of
from protocol.messages import Lease
from protocol.routed_experts import RoutedExperts
from protocol.trajectories import VersionSpan
from services.http.metrics import Metrics
from services.run_lock import FolderTaken, RunLock
from tests.env_service.peers import lease

KEY = key_of(lease(5))


def turn(conversation: int = 0, *, version: str = "1.3", is_trained: bool = True, tokens: int = 2) -> TurnRow:
    rows = np.arange(tokens * 4, dtype=np.uint8).reshape(tokens, 2, 2)
    return TurnRow(
        conversation=conversation,
        prompt="p",
        token_ids=tuple(range(tokens)),
        behavior_logprobs=(-0.1,) * tokens,
        version_spans=(VersionSpan(version=version, start=0, end=tokens),),
        generator_ids=("g0",),
        finish_reason="stop",
        prompt_tokens=3,
        routed_experts=RoutedExperts.of([(0, rows)]),
        asked_s=1.0,
        ended_s=2.5,
        is_trained=is_trained,
    )


@asynccontextmanager
async def records_in(folder: Path, *, max_bytes: int = 1 << 20) -> AsyncIterator[LeaseRecords]:
    with await RunLock.held(folder) as lock:
        records = LeaseRecords(folder, max_bytes=max_bytes, metrics=Metrics("env-service"), lock=lock)
        try:
            yield records
        finally:
            records.close()


async def two_turns(records: LeaseRecords, granted: Lease | None = None) -> LeaseRecord:
    record = records.record_of(granted or lease(5), rules="r")
    record.add_turn(turn(0))
    await record.add_answer(AnswerRow(conversation=0, step="a"))
    record.add_turn(turn(1))
    return record


async def test_the_next_process_reads_each_conversation_in_its_order(tmp_path: Path) -> None:
    async with records_in(tmp_path) as records:
        records.begin_run("a run")
        first = await two_turns(records)
    async with records_in(tmp_path) as records:
        assert records.run == "a run"
        past = records.past()[KEY]
        assert past.first.lease == lease(5)
        assert past.oldest_version == "1.3"
        assert past.elapsed_s == 2.5
        again = records.record_of(lease(5), rules="r")
        assert again.now == first.now
        found = [again.next_turn(0), again.next_turn(0), again.next_turn(1)]
        assert [one and one.step for one in found] == ["a", None, None]
        assert found[0] is not None
        assert found[0].turn.model_dump_json() == turn(0).model_dump_json()
        assert found[1] is None


async def test_what_is_not_trained_has_no_age(tmp_path: Path) -> None:
    async with records_in(tmp_path) as records:
        record = records.record_of(lease(5), rules="r")
        record.add_turn(turn(0, version="1.10"))
        record.add_turn(turn(1, version="1.9"))
        record.add_turn(turn(2, version="1.2", is_trained=False))
    async with records_in(tmp_path) as records:
        assert records.past()[KEY].oldest_version == "1.9"


async def test_a_torn_last_row_is_cut_off_and_later_rows_stand_behind_the_whole_ones(tmp_path: Path) -> None:
    async with records_in(tmp_path) as records:
        await two_turns(records)
    path = tmp_path / file_name_of(KEY)
    whole = path.read_bytes()
    for size in range(len(whole) - len(line_of(turn(1))), len(whole)):
        path.write_bytes(whole[:size])
        found = read_record(path)
        assert found is not None
        assert [len(found.turns[index]) for index in (0, 1)] == [1, 0]
    async with records_in(tmp_path) as records:
        record = records.record_of(lease(5), rules="r")
        record.add_turn(turn(2))
    found = read_record(path)
    assert found is not None
    assert [len(found.turns[index]) for index in (0, 1, 2)] == [1, 0, 1]
    assert found.end == found.size


async def test_nothing_behind_a_damaged_row_is_believed(tmp_path: Path) -> None:
    async with records_in(tmp_path) as records:
        await two_turns(records)
    path = tmp_path / file_name_of(KEY)
    first, *rest = path.read_bytes().splitlines(keepends=True)
    rest[0] = rest[0].replace(b'"g0"', b'"g1"')
    path.write_bytes(b"".join((first, *rest)))
    found = read_record(path)
    assert found is not None
    assert not any(found.turns.values())


async def test_a_record_without_a_whole_lease_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / file_name_of(KEY)
    path.write_bytes(line_of(turn(0)))
    async with records_in(tmp_path) as records:
        assert records.past() == {}
    assert not path.exists()
    assert "is no whole record of a lease" in caplog.text


async def test_a_lease_whose_outcome_the_learner_has_leaves_nothing(tmp_path: Path) -> None:
    async with records_in(tmp_path) as records:
        record = await two_turns(records)
        assert records.keys() == (KEY,)
        records.remove(KEY)
        record.add_turn(turn(0))
        await record.add_answer(AnswerRow(conversation=0, step="late"))
        assert records.keys() == ()
    async with records_in(tmp_path) as records:
        assert records.past() == {}


async def test_records_of_another_run_are_removed_when_its_learner_comes(tmp_path: Path) -> None:
    async with records_in(tmp_path) as records:
        records.begin_run("one")
        await two_turns(records)
    async with records_in(tmp_path) as records:
        records.begin_run("one")
        assert records.keys() == (KEY,)
        records.begin_run("another")
        assert records.keys() == ()
    assert not (tmp_path / file_name_of(KEY)).exists()


async def test_leases_beyond_the_bound_have_no_record_and_the_others_keep_theirs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    size = len(line_of(turn(tokens=100)))
    async with records_in(tmp_path, max_bytes=2 * size) as records:
        kept = await two_turns(records, lease(5))
        large = records.record_of(lease(6), rules="r")
        for _ in range(3):
            large.add_turn(turn(tokens=100))
        assert records.keys() == (KEY,)
        kept.add_turn(turn(0))
        again = records.record_of(lease(7), rules="r")
        again.add_turn(turn(0))
        assert records.keys() == (KEY, key_of(lease(7)))
    assert "conversations go on without a checkpoint" in caplog.text
    async with records_in(tmp_path) as records:
        assert set(records.past()) == {KEY, key_of(lease(7))}


async def test_a_disk_that_takes_nothing_costs_the_record_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with records_in(tmp_path) as records:
        record = await two_turns(records)
        monkeypatch.setattr("services.append_file.AppendFile.append", full)
        record.add_turn(turn(0))
        await record.add_answer(AnswerRow(conversation=0, step="b"))
        assert records.keys() == ()
    assert "No space left on device" in caplog.text
    assert not (tmp_path / file_name_of(KEY)).exists()


async def test_a_step_is_on_the_disk_when_it_was_taken_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    path = tmp_path / file_name_of(KEY)
    monkeypatch.setattr("services.append_file.os.fdatasync", lambda _: synced.append(path.stat().st_size))
    async with records_in(tmp_path) as records:
        record = records.record_of(lease(5), rules="r")
        record.add_turn(turn(0))
        await record.add_answer(AnswerRow(conversation=0, step="a"))
        assert synced == [path.stat().st_size]


async def test_a_lease_that_processes_die_of_is_given_up_and_one_that_moves_on_is_not(tmp_path: Path) -> None:
    async with records_in(tmp_path) as records:
        await two_turns(records)
        await two_turns(records, lease(6))
    for _ in range(2):
        async with records_in(tmp_path) as records:
            records.record_of(lease(5), rules="r")
            records.record_of(lease(6), rules="r").add_turn(turn(0))
    async with records_in(tmp_path) as records:
        assert set(records.past()) == {key_of(lease(6))}


async def test_of_an_environment_the_last_whole_state_is_there_and_goes_with_its_lease(tmp_path: Path) -> None:
    async with records_in(tmp_path) as records:
        record = await two_turns(records)
        await record.save(0, EnvironmentState(1, b"one"))
        await record.save(0, EnvironmentState(2, b"two\nlines"))
        await record.save(1, EnvironmentState(1, b"other"))
    async with records_in(tmp_path) as records:
        record = records.record_of(lease(5), rules="r")
        assert await record.saved(0) == EnvironmentState(2, b"two\nlines")
        assert await record.saved(2) is None
        path = tmp_path / saved_name_of(KEY, 1)
        path.write_bytes(path.read_bytes()[:-1])
        assert await record.saved(1) is None
        (tmp_path / saved_name_of(key_of(lease(9)), 0)).write_bytes(b"of a lease that has ended")
        (tmp_path / f"{saved_name_of(KEY, 0)}.new").write_bytes(b"half")
    async with records_in(tmp_path) as records:
        records.remove(KEY)
    assert not tmp_path.exists(), "an empty folder is removed"  # noqa: ASYNC240


async def test_a_state_that_is_written_while_its_lease_is_taken_back_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_syncing, may_go_on, fsync = threading.Event(), threading.Event(), os.fsync

    def slow(file: int) -> None:
        is_syncing.set()
        may_go_on.wait(10)
        fsync(file)

    async with records_in(tmp_path) as records:
        record = await two_turns(records)
        monkeypatch.setattr(os, "fsync", slow)
        saving = asyncio.create_task(record.save(0, EnvironmentState(1, b"one")))
        await asyncio.to_thread(is_syncing.wait, 10)
        saving.cancel()
        records.remove(KEY)
        may_go_on.set()
        with contextlib.suppress(asyncio.CancelledError):
            await saving
        await asyncio.get_running_loop().shutdown_default_executor()
        assert names_in(tmp_path) == []


async def test_a_state_that_is_written_while_its_process_ends_is_there_for_the_next_one(tmp_path: Path) -> None:
    async with records_in(tmp_path) as records:
        await two_turns(records)
        records.close()
        records.write_saved(KEY, 0, EnvironmentState(1, b"one"))
    async with records_in(tmp_path) as records:
        assert await records.record_of(lease(5), rules="r").saved(0) == EnvironmentState(1, b"one")


async def test_a_state_that_the_disk_does_not_take_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with records_in(tmp_path) as records:
        record = await two_turns(records)
        monkeypatch.setattr(os, "fsync", full)
        await record.save(0, EnvironmentState(1, b"one"))
        assert names_in(tmp_path) == []


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(KEY.purpose))


async def test_each_process_that_goes_on_with_a_lease_has_another_number(tmp_path: Path) -> None:
    numbers = []
    for life in range(4):
        async with records_in(tmp_path) as records:
            record = records.record_of(lease(5), rules="r")
            numbers.append(record.lives)
            if life != 2:
                record.add_turn(turn(0))
    assert numbers == [0, 1, 2, 3]


async def test_states_count_against_the_bound(tmp_path: Path) -> None:
    async with records_in(tmp_path, max_bytes=10_000) as records:
        record = await two_turns(records)
        await record.save(0, EnvironmentState(1, bytes(10_000)))
        assert records.keys() == ()
    assert not tmp_path.exists(), "an empty folder is removed"  # noqa: ASYNC240


async def test_of_two_processes_one_has_the_folder(tmp_path: Path) -> None:
    async with records_in(tmp_path):
        with pytest.raises(FolderTaken):
            async with records_in(tmp_path):
                pass


async def test_a_process_that_lost_its_folder_writes_and_removes_nothing_there(tmp_path: Path) -> None:
    with await RunLock.held(tmp_path) as lock:
        records = LeaseRecords(tmp_path, max_bytes=1 << 20, metrics=Metrics("env-service"), lock=lock)
        record = await two_turns(records)
        whole = (tmp_path / file_name_of(KEY)).read_bytes()
        taker = {"host": "other", "place": "x", "pid": 1, "command": "env-service", "since": 0.0}
        (tmp_path / "lease-9.json").write_text(json.dumps(taker))
        lock.beat()
        record.add_turn(turn(0))
        records.remove(KEY)
        assert (tmp_path / file_name_of(KEY)).read_bytes() == whole
