"""Checkpoints are whole or not there, and damage in one is named; a run's folder is never written over."""

import errno
import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from learner.journal.checkpoints import Checkpoint, Checkpoints, VersionScore, checkpoints_of, oldest_open_lease
from learner.journal.journal import Journal
from learner.journal.segments import segments_of
from learner.ledger import Ledger, LedgerSnapshot
from learner.training.guard import GuardState
from tests.learner.samples import LEDGER, group


def save(folder: Path) -> None:
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "weights").write_text("w")


def fail(folder: Path) -> None:
    save(folder)
    raise OSError("the disk is full")


def snapshot() -> LedgerSnapshot:
    ledger = Ledger(LEDGER)
    ledger.served_changed(0)
    ledger.grant(now=0.0, holder="e", room=3)
    return ledger.snapshot()


def write(checkpoints: Checkpoints, *versions: int) -> None:
    for version in versions:
        checkpoints.write(version=version, ledger=snapshot(), save_trainer=save)


def versions_in(folder: Path) -> list[int]:
    return [each.version for each in checkpoints_of(folder)]


def only(folder: Path) -> Checkpoint:
    (found,) = checkpoints_of(folder)
    return found


def test_a_checkpoint_is_whole_and_its_ledger_comes_back(tmp_path: Path) -> None:
    assert checkpoints_of(tmp_path) == []
    write(Checkpoints(tmp_path, keep=2), 2, 10)
    newest = checkpoints_of(tmp_path)[-1]
    assert (newest.path.name, newest.version) == ("checkpoint-00000010", 10)
    assert newest.fault() is None
    assert newest.ledger() == snapshot()
    assert (newest.trainer / "deep" / "weights").read_text() == "w"
    manifest = json.loads((newest.path / "manifest.json").read_text())
    assert (manifest["version"], manifest["journal"]) == (10, "segment-00000010.log")
    assert sorted(manifest["files"]) == ["guard.json", "ledger.json", "progress.json", "trainer/deep/weights"]


def test_the_guard_comes_back_and_a_checkpoint_without_one_has_a_guard_that_has_seen_nothing(tmp_path: Path) -> None:
    held = GuardState(max_lag=1, healthy=3, relapses=2, rose=True, tightened=4, loosened=3)
    Checkpoints(tmp_path, keep=2).write(version=2, ledger=snapshot(), save_trainer=save, guard=held)
    assert only(tmp_path).guard() == held
    (only(tmp_path).path / "guard.json").unlink()
    assert only(tmp_path).guard() == GuardState()


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    write(Checkpoints(tmp_path, keep=2), 0, 1, 2, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-00000002", "checkpoint-00000003"]


@pytest.mark.parametrize("step", ["rename", "delete", "trim"])
def test_an_old_checkpoint_that_cannot_be_removed_keeps_nobody_from_writing_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    rename, delete, trim = Path.rename, shutil.rmtree, Journal.trim

    def refuse(path: Path) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    def unmoved(path: Path, target: Path) -> Path:
        return refuse(path) if target.name.startswith("draft-removed") else rename(path, target)

    def untrimmed(journal: Journal, *, version: int) -> None:
        refuse(tmp_path / "journal")

    with Journal.open(tmp_path / "journal") as journal:
        checkpoints = Checkpoints(tmp_path, keep=1, journal=journal)
        for version in (1, 2, 3):
            if version == 2:
                if step == "rename":
                    monkeypatch.setattr(Path, "rename", unmoved)
                elif step == "delete":
                    monkeypatch.setattr(shutil, "rmtree", refuse)
                else:
                    monkeypatch.setattr(Journal, "trim", untrimmed)
            journal.rotate(version=version, groups=[])
            write(checkpoints, version)
        assert versions_in(tmp_path) == ([1, 2, 3] if step == "rename" else [3])
        assert len(list(tmp_path.glob("draft-removed*"))) == (2 if step == "delete" else 0)
        assert [each.start for each in segments_of(tmp_path / "journal")] == ([1, 2, 3] if step == "trim" else [3])
        assert "cannot be removed, which the next checkpoint tries again" in caplog.text
        for owner, name, real in ((Path, "rename", rename), (shutil, "rmtree", delete), (Journal, "trim", trim)):
            monkeypatch.setattr(owner, name, real)
        journal.rotate(version=4, groups=[])
        write(checkpoints, 4)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-00000004", "journal"]
        assert [each.start for each in segments_of(tmp_path / "journal")] == [4]


def test_an_evaluation_is_noted_while_old_checkpoints_are_being_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    write(checkpoints, 1)
    delete, waited = shutil.rmtree, []

    def slow(path: Path) -> None:
        note = threading.Thread(target=checkpoints.evaluated, args=(VersionScore(2, accuracy=0.5, reward=0.5),))
        note.start()
        note.join(5)
        waited.append(note.is_alive())
        delete(path)

    monkeypatch.setattr(shutil, "rmtree", slow)
    write(checkpoints, 2)
    assert waited == [False]
    assert only(tmp_path).evaluation.exists()


def test_the_best_by_evaluation_is_kept_besides_until_a_better_one_comes(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1, keep_best=1)
    for version, accuracy in ((1, 0.5), (2, 0.7), (3, 0.6), (4, 0.7)):
        write(checkpoints, version)
        checkpoints.evaluated(VersionScore(version=version, accuracy=accuracy, reward=-accuracy))
        checkpoints.evaluated(VersionScore(version=version + 100, accuracy=1.0, reward=1.0))
    assert versions_in(tmp_path) == [2, 4]
    assert [each.version for each in checkpoints.best()] == [4], "of equal ones the newest"
    write(checkpoints, 5)
    assert versions_in(tmp_path) == [4, 5]
    assert [path.name for path in tmp_path.glob("*.json")] == ["checkpoint-00000004.evaluation.json"]
    by_reward = Checkpoints(tmp_path, keep=1, keep_best=1, best_by="reward")
    by_reward.evaluated(VersionScore(version=5, accuracy=0.0, reward=0.1))
    assert [each.version for each in by_reward.best()] == [5]
    assert Checkpoints(tmp_path, keep=1, keep_best=0).best() == []


@pytest.mark.parametrize("error", [OSError("the disk is full"), None], ids=["failed", "killed"])
def test_a_checkpoint_that_was_not_finished_is_not_there_and_can_be_written_again(
    tmp_path: Path, error: OSError | None
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    if error is not None:
        with pytest.raises(OSError, match="the disk is full"):
            checkpoints.write(version=3, ledger=snapshot(), save_trainer=fail)
        assert list(tmp_path.iterdir()) == []
    else:
        save(tmp_path / "draft-2" / "trainer")
    assert checkpoints_of(tmp_path) == []
    write(checkpoints, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-00000003"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (lambda c: flip(c / "trainer/deep/weights"), r"weights has the hash \w+, expected \w+"),
    "a flipped bit in the ledger": (lambda c: flip(c / "ledger.json"), r"ledger.json has the hash"),
    "a short file": (lambda c: os.truncate(c / "trainer/deep/weights", 0), r"weights has 0 bytes, expected 1"),
    "a lost file": (lambda c: (c / "ledger.json").unlink(), r"ledger.json is missing: expected \d+ bytes"),
    "a lost manifest": (lambda c: (c / "manifest.json").unlink(), r"manifest.json is missing"),
    "a cut manifest": (lambda c: os.truncate(c / "manifest.json", 20), r"manifest.json cannot be read"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_named_with_the_file_and_what_was_expected(tmp_path: Path, what: str) -> None:
    write(Checkpoints(tmp_path, keep=2), 4)
    damage, text = DAMAGES[what]
    damage(only(tmp_path).path)
    fault = only(tmp_path).fault()
    assert fault is not None
    assert re.search(text, fault), fault


def test_every_bit_of_a_checkpoint_matters(tmp_path: Path) -> None:
    write(Checkpoints(tmp_path, keep=2), 4)
    for path in (only(tmp_path).path / "ledger.json", only(tmp_path).path / "trainer" / "deep" / "weights"):
        whole = path.read_bytes()
        for at in range(len(whole)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
            assert only(tmp_path).fault() is not None, (path, at)
        path.write_bytes(whole)
    assert only(tmp_path).fault() is None


def test_journal_segments_go_when_the_oldest_kept_checkpoint_covers_them(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "journal") as journal:
        checkpoints = Checkpoints(tmp_path, keep=2, keep_best=1, journal=journal)
        seen = []
        for version in (3, 6, 9, 12):
            journal.append_group(group(version))
            journal.rotate(version=version, groups=[group(version)])
            write(checkpoints, version)
            checkpoints.evaluated(VersionScore(version=version, accuracy=1.0 / version, reward=0.0))
            seen.append([segment.start for segment in segments_of(tmp_path / "journal")])
    assert seen == [[0, 3], [3, 6], [6, 9], [9, 12]], "while fewer than two are there, the initial model is one"
    assert versions_in(tmp_path) == [3, 9, 12], "the best is kept, and needs no journal"


def test_a_resume_may_grant_again_what_was_open_at_the_oldest_checkpoint_that_it_may_go_back_to(
    tmp_path: Path,
) -> None:
    ledger = Ledger(LEDGER)
    found = []
    for version in (2, 4, 6):
        ledger.served_changed(0)
        for grant in ledger.grant(now=0.0, holder="e", room=2):
            ledger.accept(lease_id=grant.lease_id, attempt=grant.attempt, oldest_version=0, size=1)
            if grant.lease_id != 3:
                ledger.filter(lease_id=grant.lease_id)
        Checkpoints(tmp_path, keep=2).write(version=version, ledger=ledger.snapshot(), save_trainer=save)
        found.append(oldest_open_lease(tmp_path, keep=2))
    assert found == [0, 2, 3], "no checkpoint before the first; leases 0 and 1 are closed; and 3 stays open"


def test_a_damaged_checkpoint_that_is_kept_to_go_back_to_ends_no_run_that_goes_on(tmp_path: Path) -> None:
    ledger = Ledger(LEDGER)
    for version in (2, 4):
        Checkpoints(tmp_path, keep=2).write(version=version, ledger=ledger.snapshot(), save_trainer=save)
    (tmp_path / "checkpoint-00000002" / "ledger.json").write_bytes(bytes(100))
    assert oldest_open_lease(tmp_path, keep=2) == 0


def test_a_checkpoint_is_due_once_the_journal_has_outgrown_the_last_attempt(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "journal") as journal:
        checkpoints = Checkpoints(tmp_path, keep=2, journal=journal)
        journal.append_group(group(1))
        size = journal.size()
        assert checkpoints.outgrown(size)
        assert not checkpoints.outgrown(size + 1)

        def fail(_: Path) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with pytest.raises(OSError, match="No space"):
            checkpoints.write(version=0, ledger=snapshot(), save_trainer=fail)
        assert not checkpoints.outgrown(size), "not at once again"
        journal.rotate(version=3, groups=[])
        write(checkpoints, 3)
        journal.append_group(group(2))
        assert checkpoints.outgrown(size)
