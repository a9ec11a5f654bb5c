"""A run's folder: who has it, what of an earlier run stays, and from what a run is not taken up."""

import asyncio
from pathlib import Path

import pytest

from learner.journal.checkpoints import Checkpoints
from learner.journal.journal import FOLDER, Journal
from learner.journal.run_folder import NothingToResume, hold_run_folder, open_run_folder
from learner.ledger import Ledger
from services.run_lock import FolderTaken
from tests.learner.samples import LEDGER, group


def start(folder: Path, *, resume: bool, journal: bool = True) -> int:
    """The incarnation of a start that ends at once."""

    async def begin() -> int:
        with await hold_run_folder(folder, resume=resume) as lock:
            return open_run_folder(lock, folder, resume=resume, journal=journal)

    return asyncio.run(begin())


def touched(folder: Path) -> dict[Path, int]:
    """Time at which each file was last written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def checkpointed(folder: Path, version: int) -> None:
    def save(path: Path) -> None:
        path.mkdir()
        (path / "weights").write_text("1")

    Checkpoints(folder, keep=1).write(version=version, ledger=Ledger(LEDGER).snapshot(), save_trainer=save)


def test_each_start_has_an_incarnation_of_its_own(tmp_path: Path) -> None:
    assert [start(tmp_path / "run", resume=resume) for resume in (False, True, True)] == [1, 2, 3]


def test_a_fresh_run_moves_earlier_ones_of_its_name_aside(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for number in range(4):
        assert start(folder, resume=False) == 1
        (folder / "note").write_text(str(number))
    assert sorted((path / "note").read_text() for path in tmp_path.iterdir()) == ["0", "1", "2", "3"]
    assert (folder / "note").read_text() == "3"


def test_a_fresh_run_does_not_go_on_with_a_journal_whose_marker_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    start(folder, resume=False)
    with Journal.open(folder / FOLDER) as journal:
        journal.append_group(group(3))
    (folder / "incarnation").unlink()
    assert start(folder, resume=False) == 1
    assert (folder / FOLDER / "segment-00000000.log").stat().st_size == 0
    assert len(list(tmp_path.iterdir())) == 2


def test_a_second_start_touches_nothing_while_the_first_one_lives(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    async def twice() -> None:
        with await hold_run_folder(folder, resume=False) as lock:
            open_run_folder(lock, folder, resume=False, journal=True)
            (folder / "metrics.jsonl").write_text("a line\n")
            before = touched(tmp_path)
            for resume in (False, True):
                with pytest.raises(FolderTaken, match=r"the run in .*run is that of process \d+ on .*: stop it first"):
                    await hold_run_folder(folder, resume=resume)
            assert touched(tmp_path) == before

    asyncio.run(twice())
    assert start(folder, resume=True) == 2


def test_a_run_that_moved_another_aside_holds_the_new_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    start(folder, resume=False)

    async def again() -> None:
        with await hold_run_folder(folder, resume=False) as lock:
            open_run_folder(lock, folder, resume=False, journal=True)
            with pytest.raises(FolderTaken):
                await hold_run_folder(folder, resume=False)

    asyncio.run(again())
    (aside,) = (path for path in tmp_path.iterdir() if path != folder)
    assert start(aside, resume=True) == 2, "nobody holds what was moved aside"


def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    with pytest.raises(NothingToResume, match=r"there is no run to resume in .*: start it without --resume"):
        start(tmp_path / "run", resume=True)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_was_killed_before_it_had_begun_begins(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "incarnation.new").write_text("")
    assert start(tmp_path / "run", resume=True) == 1


def test_a_run_that_was_killed_before_its_first_record_goes_on(tmp_path: Path) -> None:
    start(tmp_path / "run", resume=False)
    assert start(tmp_path / "run", resume=True) == 2


def test_a_run_that_has_lost_journal_and_checkpoints_is_not_taken_up(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    start(folder, resume=False)
    (folder / FOLDER / "segment-00000000.log").unlink()
    with pytest.raises(NothingToResume, match=r"has begun, and its journal and its checkpoints are gone"):
        start(folder, resume=True)
    checkpointed(folder, 3)
    assert start(folder, resume=True) == 2


def test_a_run_without_its_number_of_starts_is_not_taken_up_as_if_it_were_new(tmp_path: Path) -> None:
    checkpointed(tmp_path, 7)
    with pytest.raises(FileNotFoundError, match=r"incarnation is missing, though .* holds checkpoint-00000007"):
        start(tmp_path, resume=True)
