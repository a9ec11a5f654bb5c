"""The folder of a service that was killed is removed by the next one; those in use and those of others are not."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.isolation.staging import staging_folder

_LONG_AGO = 1_000_000.0


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@contextmanager
def service(temporary: Path) -> Iterator[subprocess.Popen[str]]:
    """A process with a folder that looks old."""
    program = (
        "import os, signal; from services.isolation.staging import staging_folder\n"
        "with staging_folder() as folder:\n"
        "    folder.joinpath('packages').mkdir()\n"
        "    os.utime(folder, (1e6, 1e6)); print(folder, flush=True); signal.pause()"
    )
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline()
            yield child
        finally:
            child.kill()


def test_it_is_removed_at_the_end(temporary: Path) -> None:
    with staging_folder() as folder:
        assert list(temporary.iterdir()) == [folder]
    assert list(temporary.iterdir()) == []


def test_that_of_a_killed_service_is_removed_and_that_of_a_living_one_kept(temporary: Path) -> None:
    with service(temporary) as living, service(temporary) as killed:
        assert len(list(temporary.iterdir())) == 2
        killed.send_signal(signal.SIGKILL)
        killed.wait(timeout=30)
        with staging_folder() as mine:
            others = [folder for folder in temporary.iterdir() if folder != mine]
            assert len(others) == 1
        assert living.poll() is None


def test_what_is_young_or_no_folder_of_ours_is_left_alone(temporary: Path) -> None:
    young, file, other = (temporary / name for name in ("headway-sandbox-young", "headway-sandbox-file", "other"))
    target = temporary / "target"
    link = temporary / "headway-sandbox-link"
    for folder in (young, other, target):
        folder.mkdir()
    file.touch()
    link.symlink_to(target)
    for path in (file, other, target, link):
        os.utime(path, (_LONG_AGO, _LONG_AGO), follow_symlinks=False)
    with staging_folder() as mine:
        assert {path for path in temporary.iterdir() if path != mine} == {young, file, other, target, link}


def test_folders_of_another_prefix_or_place_are_left_alone(temporary: Path) -> None:
    within = temporary / "weights"
    for folder in (stale := [within / "headway-held-1", within / "headway-other-1", temporary / "headway-held-2"]):
        folder.mkdir(parents=True)
        folder.joinpath("0.bucket").write_bytes(b"0")
        os.utime(folder, (_LONG_AGO, _LONG_AGO))
    with staging_folder("headway-held-", within=within) as mine:
        assert mine.parent == within
        assert [folder.exists() for folder in stale] == [False, True, True]
    assert not mine.exists()
