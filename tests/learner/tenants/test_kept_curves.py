"""Curves of runs on the disk: the same after a start, nothing twice, and no obstacle to it."""

import asyncio
import logging
from pathlib import Path

import pytest

from learner.tenants.kept_curves import KeptCurves
from learner.tenants.run_curves import RunCurve
from learner.tenants.run_records import RunRecords, shown_name
from tests.learner.tenants.service_client import Client, served
from tests.learner.tenants.test_run_records import ByHand, trained


async def kept(folder: Path, records: RunRecords) -> RunRecords:
    """The records of the next life."""
    await KeptCurves(folder, records).write(now=True)
    again = RunRecords(most=records.most)
    KeptCurves(folder, again).read()
    return again


async def test_a_run_is_the_same_after_a_start(tmp_path: Path) -> None:
    records = RunRecords(wall=lambda: 7.0)
    for step in range(1500):
        trained(records, "m", (2, {"loss:sum": float(step)}))
    again = (await kept(tmp_path, records)).runs["m"]
    before = records.runs["m"]

    assert again.curve.columns() == before.curve.columns()
    assert (again.steps, again.rows, again.loss, again.seq_id) == (1500, 3000, 749.5, before.seq_id)
    for record in (again, before):
        record.curve.add(1501, 8.0, {"loss": 3.0})
    assert again.curve.columns() == before.curve.columns(), "it goes on as if nothing had been"


async def test_only_what_changed_is_written_and_what_is_kept_no_more_is_removed(tmp_path: Path) -> None:
    clock, records = ByHand(), RunRecords(most=2)
    files = KeptCurves(tmp_path / "curves", records, clock=clock)
    trained(records, "one", (1, {}))
    await files.write()
    assert not (tmp_path / "curves").exists(), "a minute has not passed"
    clock.now += 61
    await files.write()
    (first,) = (tmp_path / "curves").iterdir()
    first.write_text("not written again")
    trained(records, "two", (1, {}))
    await files.write(now=True)
    assert first.read_text() == "not written again"

    trained(records, "three", (1, {}))
    await files.write(now=True)
    assert first.exists() is False
    assert len(list((tmp_path / "curves").iterdir())) == 2


async def test_what_the_disk_refused_is_written_at_the_next_call(tmp_path: Path) -> None:
    clock, records, folder = ByHand(), RunRecords(), tmp_path / "curves"
    files = KeptCurves(folder, records, clock=clock)
    trained(records, "one", (1, {}))
    folder.touch()  # no folder can be made in its place
    clock.now += 61
    with pytest.raises(OSError, match="curves"):
        await files.write()
    folder.unlink()
    await files.write()
    assert len(list(folder.iterdir())) == 1
    assert records.changed == set()


async def test_runs_that_are_kept_no_more_are_not_remembered_while_the_disk_refuses(tmp_path: Path) -> None:
    records, folder = RunRecords(most=2), tmp_path / "curves"
    files = KeptCurves(folder, records)
    folder.touch()
    for number in range(9):
        trained(records, f"m{number}", (1, {}))
        with pytest.raises(OSError, match="curves"):
            await files.write(now=True)
    assert records.changed == {"m7", "m8"}


async def test_a_write_whose_caller_was_cancelled_ends_before_the_next_one_and_what_it_failed_at_is_in_that(
    tmp_path: Path,
) -> None:
    records, folder = RunRecords(), tmp_path / "curves"
    files = KeptCurves(folder, records)
    trained(records, "one", (1, {}))
    folder.touch()
    sweep = asyncio.create_task(files.write(now=True))
    while records.changed:  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0)
    sweep.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sweep
    with pytest.raises(OSError, match="curves"):
        await files.write(now=True)
    folder.unlink()
    await files.write(now=True)

    assert len(list(folder.iterdir())) == 1


async def test_a_damaged_file_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    records = RunRecords()
    for name in ("one", "two", "three", "four"):
        trained(records, name, (1, {"loss:sum": 1.0}))
    await KeptCurves(tmp_path, records).write(now=True)
    damaged = sorted(tmp_path.iterdir())[:3]  # noqa: ASYNC240 - nothing else waits here
    for path, text in zip(
        damaged, ("", "[]", damaged[2].read_text().replace('"steps": [1]', '"steps": []')), strict=True
    ):
        path.write_text(text)
    again = RunRecords()
    with caplog.at_level(logging.WARNING):
        KeptCurves(tmp_path, again).read()

    assert len(again.runs) == 1
    assert len(caplog.records) == 3


def test_columns_of_other_lengths_are_no_curve() -> None:
    state = RunCurve().state()
    with pytest.raises(ValueError, match="not of one length"):
        RunCurve.of({**state, "times": [1.0]})


def test_a_file_of_a_former_release_has_its_newest_steps_one_by_one() -> None:
    state = {"width": 3, "steps": [3], "times": [3.0], "columns": {"loss": [9.0]}}
    curve = RunCurve.of({**state, "open": [[4, 4.0, {"loss": 2.0}], [5, 5.0, {"loss": 4.0, "late": 1.0}]]})

    assert curve.columns() == {"step": [3, 5], "unix_s": [3.0, 5.0], "loss": [9.0, 3.0]}
    curve.add(6, 6.0, {"loss": 9.0, "late": 2.0})
    assert curve.columns() == {"step": [3, 6], "unix_s": [3.0, 6.0], "loss": [9.0, 5.0], "late": [None, 1.5]}


async def losses_of(client: Client, model_id: str, steps: range) -> None:
    for step in steps:
        await client.loss(model_id, 2 * step - 1)
        await client.result(await client.step(model_id, 2 * step))


async def test_a_server_that_was_started_again_goes_on_with_the_curve_and_has_no_point_twice(tmp_path: Path) -> None:
    async with served(tmp_path, snapshot_every=1000) as parts:
        client = parts.client("a")
        model_id = await client.model()
        await losses_of(client, model_id, range(1, 4))
        former = parts.service.records.runs[model_id].curve.columns()
    async with served(tmp_path, snapshot_every=1000) as parts:
        client = parts.client("a")
        await losses_of(client, model_id, range(4, 6))
        record = parts.service.records.runs[model_id]
        columns = record.curve.columns()

    assert record.name == shown_name("a", model_id)
    assert parts.trainer.calls.count("round of 1") == 5, "the journal did the first three again"
    assert columns["step"] == [1, 2, 3, 4, 5]
    assert columns["loss"][:3] == former["loss"]
    assert record.rows == 5
