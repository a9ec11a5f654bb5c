"""Checkpoints are whole or not there; a run's folder is never written over."""

from pathlib import Path

import pytest

from learner.history.checkpoints import Checkpoints, read_ledger
from learner.history.run_folder import open_run_folder
from learner.ledger import Ledger
from tests.learner.samples import LEDGER


def save(folder: Path) -> None:
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "weights").write_text("w")


def fail(folder: Path) -> None:
    save(folder)
    raise OSError("the disk is full")


def ledger_snapshot() -> Ledger:
    ledger = Ledger(LEDGER)
    ledger.served_changed(0)
    ledger.grant(now=0.0, holder="e", room=3)
    return ledger


def test_the_newest_checkpoint_is_found_and_its_ledger_comes_back(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.newest() is None
    snapshot = ledger_snapshot().snapshot()
    for version in (2, 10):
        checkpoints.write(version=version, ledger=snapshot, save_trainer=save)
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.name == "checkpoint-00000010"
    assert read_ledger(newest) == snapshot
    assert (newest / "trainer" / "deep" / "weights").read_text() == "w"


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for version in range(4):
        checkpoints.write(version=version, ledger=ledger_snapshot().snapshot(), save_trainer=save)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-00000002", "checkpoint-00000003"]


def test_a_checkpoint_that_failed_is_not_found_and_can_be_written_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    with pytest.raises(OSError, match="the disk is full"):
        checkpoints.write(version=3, ledger=ledger_snapshot().snapshot(), save_trainer=fail)
    assert checkpoints.newest() is None
    checkpoints.write(version=3, ledger=ledger_snapshot().snapshot(), save_trainer=save)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-00000003"]


def test_each_start_has_an_incarnation_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert open_run_folder(folder, resume=False) == 1
    assert open_run_folder(folder, resume=True) == 2
    assert open_run_folder(folder, resume=True) == 3


def test_a_fresh_run_moves_earlier_ones_of_its_name_aside(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for number in range(4):
        assert open_run_folder(folder, resume=False) == 1
        (folder / "note").write_text(str(number))
    assert sorted((path / "note").read_text() for path in tmp_path.iterdir()) == ["0", "1", "2", "3"]
    assert (folder / "note").read_text() == "3"


def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no run to resume in .*: start it without --resume"):
        open_run_folder(tmp_path / "run", resume=True)
