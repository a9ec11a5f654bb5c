"""Checkpoints beside training: one at a time, told of in the trainer's thread; the former stays until one is there."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from learner.checkpoint_writer import CheckpointWriter
from learner.journal.checkpoints import Checkpoints, VersionScore, checkpoints_of
from learner.journal.journal import Journal
from learner.journal.segments import segments_of

ROOT = Path(__file__).parents[2]


class Script:
    """A trainer whose files are written when `may_finish` is set, or which fails then."""

    def __init__(self, *, error: OSError | None = None) -> None:
        self.may_finish = threading.Event()
        self.error = error
        self.thread: threading.Thread | None = None

    def save(self, directory: Path) -> None:
        self.begin_save(directory)()

    def begin_save(self, directory: Path) -> Callable[[], None]:
        def finish() -> None:
            self.thread = threading.current_thread()
            assert self.may_finish.wait(30)
            if self.error is not None:
                raise self.error
            directory.mkdir(parents=True)
            (directory / "weights").write_text("w")

        return finish


class Told:
    """Notes what a writer tells."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.failed: list[str] = []

    def writer(self, checkpoints: Checkpoints, script: Script, *, beside_training: bool = True) -> CheckpointWriter:
        return CheckpointWriter(
            checkpoints,
            script,
            beside_training=beside_training,
            written=lambda version, _: self.written.append(version),
            failed=lambda version, error: self.failed.append(f"{version}: {error}"),
        )


def versions(folder: Path) -> list[int]:
    return [each.version for each in checkpoints_of(folder) if each.fault() is None]


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    script, told = Script(), Told()
    writer = told.writer(Checkpoints(tmp_path, keep=2), script)
    writer.begin(version=3, progress={})
    writer.settle(wait=False)
    assert (versions(tmp_path), told.written) == ([], [])
    script.may_finish.set()
    writer.settle(wait=True)
    assert (versions(tmp_path), told.written, told.failed) == ([3], [3], [])


def test_the_next_one_begins_when_the_former_is_there(tmp_path: Path) -> None:
    script, told = Script(), Told()
    writer = told.writer(Checkpoints(tmp_path, keep=1), script)
    writer.begin(version=1, progress={})
    threading.Timer(0.2, script.may_finish.set).start()
    writer.begin(version=2, progress={})
    assert told.written[:1] == [1]
    writer.settle(wait=True)
    assert (versions(tmp_path), told.written) == ([2], [1, 2])


def test_one_that_fails_is_told_and_leaves_the_former(tmp_path: Path) -> None:
    script, told = Script(), Told()
    script.may_finish.set()
    checkpoints = Checkpoints(tmp_path, keep=1)
    writer = told.writer(checkpoints, script)
    writer.begin(version=1, progress={})
    writer.settle(wait=True)
    script.error = OSError("the disk is full")
    writer.begin(version=2, progress={})
    writer.settle(wait=True)
    assert (told.written, told.failed) == ([1], ["2: the disk is full"])
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-00000001"]


def test_training_can_be_made_to_wait(tmp_path: Path) -> None:
    script, told = Script(), Told()
    script.may_finish.set()
    told.writer(Checkpoints(tmp_path, keep=1), script, beside_training=False).begin(version=1, progress={})
    assert script.thread is threading.current_thread()
    assert (versions(tmp_path), told.written) == ([1], [1])


def test_the_journal_keeps_what_the_former_checkpoint_needs_until_the_next_is_there(tmp_path: Path) -> None:
    script, told = Script(), Told()
    script.may_finish.set()
    with Journal.open(tmp_path / "journal") as journal:
        checkpoints = Checkpoints(tmp_path, keep=1, journal=journal)
        writer = told.writer(checkpoints, script)
        for version in (1, 2):
            journal.rotate(version=version, groups=())
            writer.begin(version=version, progress={})
            if version == 1:
                writer.settle(wait=True)
                script.may_finish.clear()
        assert [segment.start for segment in segments_of(tmp_path / "journal")] == [1, 2]
        script.may_finish.set()
        writer.settle(wait=True)
        assert [segment.start for segment in segments_of(tmp_path / "journal")] == [2]


def test_an_evaluation_that_ends_before_its_checkpoint_is_there_stands_beside_it(tmp_path: Path) -> None:
    script, told = Script(), Told()
    checkpoints = Checkpoints(tmp_path, keep=1, keep_best=1)
    writer = told.writer(checkpoints, script)
    writer.begin(version=4, progress={})
    checkpoints.evaluated(VersionScore(version=4, accuracy=0.5, reward=0.25))
    script.may_finish.set()
    writer.settle(wait=True)
    assert [each.version for each in checkpoints.best()] == [4]


def test_a_process_that_dies_in_the_middle_leaves_the_former_checkpoint(tmp_path: Path) -> None:
    script = f"""
import sys, time
from pathlib import Path
from learner.journal.checkpoints import Checkpoints

def begin(folder):
    def finish():
        folder.mkdir(parents=True)
        (folder / "weights").write_text(folder.parent.name)
        if folder.parent.name == "draft-2":
            print("in the middle", flush=True)
            time.sleep(60)
    return finish

checkpoints = Checkpoints(Path({str(tmp_path)!r}), keep=1)
for version in (1, 2):
    checkpoints.begin(version=version, begin_save=begin)()
"""
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"in the middle\n"
    child.send_signal(signal.SIGKILL)
    child.wait(timeout=30)
    child.stdout.close()
    assert versions(tmp_path) == [1]
    assert (tmp_path / "draft-2").is_dir()
    Checkpoints(tmp_path, keep=1).begin(version=2, begin_save=lambda folder: lambda: folder.mkdir())()
    assert versions(tmp_path) == [2]
    assert not (tmp_path / "draft-2").exists()
