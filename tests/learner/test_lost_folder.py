"""A learner that has lost its run's folder to another one changes nothing there, whatever it was about to write."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from learner.journal.checkpoints import Checkpoints, VersionScore
from learner.leases.dead_letters import DEAD_LETTERS, DeadLetters
from learner.page.store import TrajectoryStore
from learner.page.taken import TakenStep
from learner.reports.run_records import Records
from protocol.messages import FailedLease
from services.run_lock import FolderLost
from tests.learner.samples import group


@dataclass
class Fence:
    """The lock of a folder that can be lost."""

    lost: bool = False

    def __call__(self) -> None:
        if self.lost:
            raise FolderLost("it is another's")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def save(folder: Path) -> None:
    folder.mkdir()
    (folder / "weights").write_text("w")


def failure() -> FailedLease:
    return FailedLease(incarnation=1, lease_id=3, attempt=0, purpose="train", data_fault=True, reason="no")


def of_checkpoints(folder: Path, fence: Fence) -> Callable[[], object]:
    """The other one has two newer checkpoints: of three the oldest would go, were this one to write its own."""
    checkpoints = Checkpoints(folder, keep=2, may_write=fence)
    for version in (1, 2):
        checkpoints.write(version=version, save_trainer=save)
    (folder / "draft-9").mkdir()
    (folder / "draft-9" / "trainer").write_text("the other one is writing it")
    return lambda: checkpoints.write(version=3, save_trainer=save)


def of_evaluations(folder: Path, fence: Fence) -> Callable[[], object]:
    checkpoints = Checkpoints(folder, keep=2, may_write=fence)
    checkpoints.write(version=1, save_trainer=save)
    return lambda: checkpoints.evaluated(VersionScore(version=1, accuracy=0.5, reward=0.5))


def of_metrics(folder: Path, fence: Fence) -> Callable[[], object]:
    records = Records(folder=folder, total_steps=3, may_write=fence)
    records.checkpoint(version=1, seconds=0.1)
    return lambda: records.checkpoint(version=2, seconds=0.1)


def of_dead_letters(folder: Path, fence: Fence) -> Callable[[], object]:
    letters = DeadLetters(folder / DEAD_LETTERS, largest_share=0.5, may_write=fence)
    letters.append(failure(), task_index=0, version=1)

    def append_and_close() -> None:
        try:
            letters.append(failure(), task_index=1, version=1)
        finally:
            letters.close()

    return append_and_close


@pytest.mark.parametrize("writer", [of_checkpoints, of_evaluations, of_metrics, of_dead_letters])
def test_who_lost_the_folder_changes_nothing_in_it(
    writer: Callable[[Path, Fence], Callable[[], object]], tmp_path: Path
) -> None:
    fence = Fence()
    write = writer(tmp_path, fence)
    before = contents(tmp_path)
    assert before
    fence.lost = True
    with pytest.raises(FolderLost):
        write()
    assert contents(tmp_path) == before


def test_a_checkpoint_that_was_being_saved_when_the_folder_was_lost_gets_no_name(tmp_path: Path) -> None:
    fence = Fence()
    checkpoints = Checkpoints(tmp_path, keep=1, may_write=fence)
    checkpoints.write(version=1, save_trainer=save)

    def save_slowly(folder: Path) -> None:
        save(folder)
        fence.lost = True

    with pytest.raises(FolderLost):
        checkpoints.write(version=2, save_trainer=save_slowly)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-00000001"]


def test_trajectories_of_who_lost_the_folder_are_left_out_and_its_parts_stay(tmp_path: Path) -> None:
    fence = Fence(lost=True)
    with TrajectoryStore(tmp_path, budget_bytes=1 << 20, share=1.0, may_write=fence) as store:
        store.put(TakenStep(step=1, groups=(group(1),)))
        store.wait_idle()
    assert contents(tmp_path) == {}
    assert store.left_out == 1
