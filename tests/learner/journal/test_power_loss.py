"""After a power loss at any moment what was promised is there: syncs come in the right order, names and bytes alike."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from learner.journal.checkpoints import Checkpoints, checkpoints_of
from learner.journal.files import write_atomically
from learner.journal.journal import FOLDER, Journal, LoggedBatch, LoggedGroup, Record, read_journal
from services.append_file import sync_folder
from tests.learner.journal.power_loss import UnsyncedDisk
from tests.learner.samples import group


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[UnsyncedDisk]:
    found = UnsyncedDisk.beneath(monkeypatch)
    yield found
    found.close()


@pytest.fixture
def run(tmp_path: Path, disk: UnsyncedDisk) -> Path:
    """A run's folder in which the journal's folder is on the disk."""
    folder = tmp_path / "run"
    (folder / FOLDER).mkdir(parents=True)
    sync_folder(folder)
    return folder


def short(records: Iterator[Record]) -> list[object]:
    return [("group", each.group.lease_id) if isinstance(each, LoggedGroup) else each for each in records]


def save(folder: Path) -> None:
    folder.mkdir()
    (folder / "weights").write_text("w")


def test_a_batch_in_a_new_segment_is_there_after_a_power_loss_and_so_is_the_segment_itself(
    run: Path, disk: UnsyncedDisk, tmp_path: Path
) -> None:
    with Journal.open(run / FOLDER) as journal:
        journal.append_batch(version=0, lease_ids=())
        journal.rotate(version=1, groups=[group(1)])
        journal.append_group(group(2))
        journal.append_batch(version=1, lease_ids=(1, 2))
        left = disk.left_of(run, tmp_path / "left")
    assert short(read_journal(left / FOLDER)) == [
        LoggedBatch(version=0, lease_ids=()),
        ("group", 1),
        ("group", 2),
        LoggedBatch(version=1, lease_ids=(1, 2)),
    ]


def test_a_first_life_has_the_folders_that_it_made_on_the_disk(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, disk: UnsyncedDisk
) -> None:
    run = tmp_path / "runs" / "one"
    with Journal.open(run / FOLDER) as journal:
        journal.append_group(group(1))
        journal.append_batch(version=0, lease_ids=(1,))
        left = disk.left_of(tmp_path, tmp_path_factory.mktemp("after") / "left")
    assert short(read_journal(left / "runs" / "one" / FOLDER)) == [("group", 1), LoggedBatch(version=0, lease_ids=(1,))]


def test_a_checkpoint_that_a_power_loss_leaves_is_whole_and_has_the_segment_that_follows_it(
    run: Path, disk: UnsyncedDisk, tmp_path: Path
) -> None:
    with Journal.open(run / FOLDER) as journal:
        checkpoints = Checkpoints(run, keep=1, journal=journal)
        journal.append_batch(version=0, lease_ids=())
        for version in (1, 2):
            journal.rotate(version=version, groups=[group(version)])
            checkpoints.write(version=version, save_trainer=save)
            left = disk.left_of(run, tmp_path / f"left-{version}")
            (found,) = [each for each in checkpoints_of(left) if each.version == version]
            assert found.fault() is None
            assert (found.trainer / "weights").read_text() == "w"
            assert ("group", version) in short(read_journal(left / FOLDER)), "it needs the groups that were at hand"


def test_at_no_moment_does_a_power_loss_leave_a_checkpoint_without_its_segment(
    run: Path, disk: UnsyncedDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments: list[Path] = []
    note = disk._note

    def look(handle: int) -> None:
        note(handle)
        moments.append(disk.left_of(run, tmp_path / f"moment-{len(moments)}"))

    monkeypatch.setattr(disk, "_note", look)
    with Journal.open(run / FOLDER) as journal:
        journal.append_batch(version=0, lease_ids=())
        journal.rotate(version=1, groups=[group(1)])
        Checkpoints(run, keep=1, journal=journal).write(version=1, save_trainer=save)
    whole = [moment for moment in moments if checkpoints_of(moment)]
    assert whole, "the checkpoint was made"
    for moment in whole:
        assert [each.fault() for each in checkpoints_of(moment)] == [None]
        assert ("group", 1) in short(read_journal(moment / FOLDER))


def test_a_small_file_holds_its_former_text_or_the_new_one_after_a_power_loss(
    run: Path, disk: UnsyncedDisk, tmp_path: Path
) -> None:
    for text in ("former", "new"):
        write_atomically(run / "note.json", text)
        assert (disk.left_of(run, tmp_path / text) / "note.json").read_text() == text
