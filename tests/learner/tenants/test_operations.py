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


async def test_samples_under_way_outlive_the_file_they_stand_in(tmp_path: Path) -> None:
    log = OperationLog(tmp_path, segment_bytes=500)
    log.samples_under_way = lambda: [("s:sample:0", "s:sample:0:7")]
    await log.operation(operation(1, body=bytes(600)))
    log.trim({"m": 1})
    assert log.files == 1
    await log.close()
    assert (await recovered(tmp_path)).recovered.samples["s:sample:0"] == ["s:sample:0:7"]


async def test_a_dropped_sampling_session_is_gone_from_the_catalog(tmp_path: Path) -> None:
    log = OperationLog(tmp_path)
    entry = SamplingEntry(owner="a", session_id="s", created_at=1.0, sampling_session_id="s:sample:0", base_model="b")
    await log.entry(entry)
    await log.entry(entry.model_copy(update={"dropped": True}))
    await log.close()
    assert (await recovered(tmp_path)).catalog.samplings == {}
