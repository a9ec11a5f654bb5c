"""Files in the learner's memory."""

import fcntl
import mmap
import os
import resource
from pathlib import Path

import pytest

from learner.weights.shared_files import HostProof, SharedFile, SharedFiles
from protocol.fleet import SharedMemoryAnswer


def test_others_see_what_is_written_and_can_neither_shorten_it_nor_find_it_when_it_is_let_go_of() -> None:
    file = SharedFile(mmap.PAGESIZE)
    bytes_, path = file.mapped(), file.path
    bytes_[3] = 7
    assert Path(path).read_bytes()[:4] == b"\0\0\0\7"
    with pytest.raises(PermissionError):
        os.truncate(path, 1)
    del file
    assert not os.path.lexists(path)
    bytes_[4] = 8  # who has it mapped keeps it


def test_a_secret_is_shown_by_its_content_and_by_nothing_else() -> None:
    proof = HostProof()
    assert proof.is_shown_by(SharedMemoryAnswer(secret=Path(proof.question.path).read_text()))
    assert not any(map(proof.is_shown_by, (SharedMemoryAnswer(secret=""), SharedMemoryAnswer(secret="0" * 32))))


@pytest.mark.parametrize("missing", ["the calls, as elsewhere than on Linux", "its own entry in /proc"])
def test_where_none_is_to_be_had_weights_are_broadcast(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "calls" in missing:
        monkeypatch.delattr(fcntl, "F_SEAL_SHRINK")
    else:
        monkeypatch.setattr(os, "readlink", lambda _: "/dev/null")  # /proc is another PID namespace's
    assert SharedFiles().make(1) is None


def test_without_files_to_spare_there_is_no_shared_memory_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4, 4))
    files = SharedFiles()
    kept = [files.make(1) for _ in range(4)]
    assert [file is not None for file in kept] == [True, False, False, False]
    assert len(caplog.records) == 1
    assert "weights.bucket_mb" in caplog.text
    kept.clear()
    assert files.make(1) is not None
