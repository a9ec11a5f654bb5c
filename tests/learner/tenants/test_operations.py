import asyncio
import os
from pathlib import Path

import pytest

from learner.journal.records import framed
from learner.tenants.catalog import SamplingEntry, SessionEntry
from learner.tenants.operations import LoggedOperation, OperationLog


def operation(seq_id: int, model_id: str = "m", body: bytes = b"body") -> LoggedOperation:
    return LoggedOperation(model_id, seq_id, "optim_step", "digest", body)


def session(name: str = "s") -> SessionEntry:
    return SessionEntry(owner="a", session_id=name, created_at=1.0)


async def recovered(folder: Path) -> OperationLog:
    log = OperationLog(folder)
    await log.close()
    return log


async def test_what_was_appended_is_there_after_a_start(tmp_path: Path) -> None:
    log = OperationLog(tmp_path)
    await log.entry(session())
    await log.operation(operation(1, body=b"\n\0binary"))
    await log.sample("s:sample:0", "s:sample:0:1")
    await log.close()
    found = (await recovered(tmp_path)).recovered
    assert found.catalog.sessions == {"s": session()}
    assert found.operations == {("m", 1): operation(1, body=b"\n\0binary")}
    assert dict(found.samples) == {"s:sample:0": ["s:sample:0:1"]}
    assert found.life == 2


async def test_all_that_comes_in_a_tick_is_synced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, syncs = OperationLog(tmp_path), 0
    real = os.fdatasync

    def counted(handle: int) -> None:
        nonlocal syncs
        syncs += 1
        real(handle)

    monkeypatch.setattr(os, "fdatasync", counted)
    await asyncio.gather(*(log.operation(operation(number)) for number in range(50)))
    assert syncs <= 2
    await log.close()
    assert len((await recovered(tmp_path)).recovered.operations) == 50


async def test_a_record_that_a_death_cut_in_two_hides_nothing(tmp_path: Path) -> None:
    log = OperationLog(tmp_path)
    await log.operation(operation(1))
    await log.close()
    path = tmp_path / "operations-00000000.log"
    whole = path.stat().st_size
    with path.open("ab") as file:
        file.write(framed(2, bytes(50))[:-10])
    log = OperationLog(tmp_path)
    assert path.stat().st_size == whole
    await log.operation(operation(2))
    await log.close()
    assert set((await recovered(tmp_path)).recovered.operations) == {("m", 1), ("m", 2)}


async def test_what_a_killed_life_left_on_its_way_to_the_disk_is_there_before_the_next_one_knows_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry of it is told that it was accepted: a machine that lost power then must not have lost it."""
    path = tmp_path / "operations-00000000.log"
    log = OperationLog(tmp_path)
    await log.operation(operation(1))
    await log.close()
    with path.open("ab") as file:
        file.write(framed(2, b'["m", 2, "optim_step", "digest"]\nbody'))  # and killed before its sync
    synced: dict[str, int] = {}
    real = os.fdatasync

    def noted(handle: int) -> None:
        real(handle)
        synced[os.readlink(f"/proc/self/fd/{handle}")] = os.fstat(handle).st_size

    monkeypatch.setattr(os, "fdatasync", noted)
    log = await recovered(tmp_path)
    assert log.recovered.operations[("m", 2)] == operation(2)
    assert synced[str(path)] == path.stat().st_size


async def test_what_the_disk_refused_is_not_found_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = OperationLog(tmp_path)
    await log.operation(operation(1))
    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(OSError, match="journal of operations"):
            await log.operation(operation(2))
    await log.operation(operation(3))
    await log.close()
    assert set((await recovered(tmp_path)).recovered.operations) == {("m", 1), ("m", 3)}


async def test_files_go_when_every_model_is_past_them(tmp_path: Path) -> None:
    log = OperationLog(tmp_path, segment_bytes=2000)
    await log.entry(session())
    for number in range(1, 40):
        await log.operation(operation(number, "m" if number % 2 else "n", bytes(100)))
    files = log.files
    assert files > 2
    log.trim({"m": 40})
    assert log.files == files
    assert log.holding() == {"m", "n"}
    log.trim({"m": 40, "n": 40})
    assert log.files == 1
    await log.close()
    assert (await recovered(tmp_path)).catalog.sessions == {"s": session()}


async def test_samples_awaited_outlive_the_file_they_stand_in(tmp_path: Path) -> None:
    log = OperationLog(tmp_path, segment_bytes=500)
    log.samples_awaited = lambda: [("s:sample:0", "s:sample:0:7")]
    await log.operation(operation(1, body=bytes(600)))
    log.trim({"m": 1})
    assert log.files == 1
    await log.close()
    assert (await recovered(tmp_path)).recovered.samples["s:sample:0"] == ["s:sample:0:7"]


async def test_samples_that_a_life_lost_are_known_to_all_later_ones_though_their_files_go(tmp_path: Path) -> None:
    log = OperationLog(tmp_path)
    await log.sample("s:sample:0", "s:sample:0:7")
    await log.close()
    for _ in range(2):
        log = await recovered(tmp_path)
        assert set(log.recovered.samples["s:sample:0"]) == {"s:sample:0:7"}
        log.trim({})
        assert log.files == 1


async def test_a_dropped_sampling_session_is_gone_from_the_catalog(tmp_path: Path) -> None:
    log = OperationLog(tmp_path)
    entry = SamplingEntry(owner="a", session_id="s", created_at=1.0, sampling_session_id="s:sample:0", base_model="b")
    await log.entry(entry)
    await log.entry(entry.model_copy(update={"dropped": True}))
    await log.close()
    assert (await recovered(tmp_path)).catalog.samplings == {}


async def test_what_was_dropped_stays_so_though_a_file_before_its_drop_outlives_that_of_it(tmp_path: Path) -> None:
    log = OperationLog(tmp_path, segment_bytes=1)
    entry = SamplingEntry(owner="a", session_id="s", created_at=1.0, sampling_session_id="s:sample:0", base_model="b")
    await asyncio.gather(log.entry(entry), log.operation(operation(1)))
    await log.entry(entry.model_copy(update={"dropped": True}))
    await log.entry(session())
    log.trim({})
    assert log.holding() == {"m"}
    await log.close()
    catalog = (await recovered(tmp_path)).catalog
    assert (catalog.samplings, catalog.sessions) == ({}, {"s": session()})


async def test_of_two_operations_under_a_number_the_one_that_was_accepted_last_is_done(tmp_path: Path) -> None:
    """The former one was given up, behind a hole, and forgotten."""
    log = OperationLog(tmp_path)
    for body in (b"given up", b"done"):
        await log.operation(operation(2, body=body))
    await log.close()
    assert (await recovered(tmp_path)).recovered.operations == {("m", 2): operation(2, body=b"done")}


async def test_the_last_records_of_a_file_are_accounted_to_it(tmp_path: Path) -> None:
    """Each write ends its file here: what waits for it resumes when the next file has been begun."""
    log = OperationLog(tmp_path, segment_bytes=1)
    await asyncio.gather(log.entry(session()), log.operation(operation(1)), log.sample("s:sample:0", "s:sample:0:7"))
    await log.operation(operation(2))
    assert log.files == 3
    log.trim({"m": 0})
    assert log.files == 3, "operation 1 stands in the first file"
    log.trim({"m": 1})
    assert log.files == 2
    assert log.holding() == {"m"}
    await log.close()
    found = (await recovered(tmp_path)).recovered
    assert found.catalog.sessions == {"s": session()}
    assert set(found.operations) == {("m", 2)}


async def test_a_sample_is_in_the_next_file_before_whoever_starts_it_knows_that_it_is_accepted(tmp_path: Path) -> None:
    log, started = OperationLog(tmp_path, segment_bytes=1), list[tuple[str, str]]()
    log.samples_awaited = lambda: started
    await log.sample("s:sample:0", "s:sample:0:7")
    started.append(("s:sample:0", "s:sample:0:7"))
    log.trim({})
    assert log.files == 1
    await log.close()
    found = (await recovered(tmp_path)).recovered
    assert found.samples["s:sample:0"] == ["s:sample:0:7"]


def failing(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


async def test_a_file_that_cannot_be_begun_leaves_the_one_before_it_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = OperationLog(tmp_path, segment_bytes=1)
    with monkeypatch.context() as broken:
        broken.setattr("learner.tenants.operations.sync_folder", failing)
        await log.operation(operation(1))
        await log.entry(session())
        assert not (tmp_path / "operations-00000001.log").exists()
    await log.operation(operation(2))
    assert log.files == 2
    await log.operation(operation(3))
    await log.close()
    found = (await recovered(tmp_path)).recovered
    assert {seq_id for _, seq_id in found.operations} == {1, 2, 3}
    assert found.catalog.sessions == {"s": session()}


async def test_a_file_that_cannot_be_opened_again_after_a_refusal_is_so_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = OperationLog(tmp_path)
    await log.operation(operation(1))
    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", failing)
        broken.setattr("learner.tenants.operations.AppendFile", failing)
        with pytest.raises(OSError, match="No space left"):
            await log.operation(operation(2))
    await log.operation(operation(3))
    await log.close()
    assert set((await recovered(tmp_path)).recovered.operations) == {("m", 1), ("m", 3)}
