"""A learner with a key resumes from what that key signed, and from nothing that others wrote beside it."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import xxhash

from learner.journal.checkpoints import Checkpoint, Checkpoints, checkpoints_of
from learner.journal.manifest import Signer
from services.secret_files import SecretFileError

OURS, THEIRS = Signer("a" * 40), Signer("b" * 40)


def save(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "weights").write_text("good")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    Checkpoints(tmp_path, keep=2, signer=OURS).write(version=3, save_trainer=save)
    (written,) = checkpoints_of(tmp_path)
    return written


def forge(checkpoint: Checkpoint, **changes: object) -> None:
    """Other weights, with the hashes that anybody can compute."""
    path, manifest = checkpoint.trainer / "weights", checkpoint.path / "manifest.json"
    path.write_text("evil")
    said = json.loads(manifest.read_text())
    said["files"]["trainer/weights"] |= {"xxh3": xxhash.xxh3_64(b"evil").hexdigest(), **changes}
    manifest.write_text(json.dumps(said))


def test_a_signed_checkpoint_is_whole_to_its_key_and_to_those_who_only_read_it(checkpoint: Checkpoint) -> None:
    assert checkpoint.fault(signer=OURS) is None
    assert checkpoint.fault() is None


def test_weights_of_others_are_refused_though_their_hashes_fit(checkpoint: Checkpoint) -> None:
    forge(checkpoint)
    fault = checkpoint.fault(signer=OURS)
    assert fault is not None
    assert "is not what this learner's key signed" in fault
    assert "checkpoint.check_signature = false" in fault


def test_weights_that_were_exchanged_under_a_good_manifest_are_refused(checkpoint: Checkpoint) -> None:
    (checkpoint.trainer / "weights").write_text("evil")
    assert "has the hash" in str(checkpoint.fault(signer=OURS))


def test_a_checkpoint_without_signature_or_of_another_key_is_refused(tmp_path: Path, checkpoint: Checkpoint) -> None:
    assert "is not what this learner's key signed" in str(checkpoint.fault(signer=THEIRS))
    manifest = checkpoint.path / "manifest.json"
    said = json.loads(manifest.read_text())
    del said["signature"]
    manifest.write_text(json.dumps(said))
    assert "nobody signed it" in str(checkpoint.fault(signer=OURS))


def test_a_file_that_the_manifest_does_not_name_is_refused(checkpoint: Checkpoint) -> None:
    (checkpoint.trainer / "more.pt").write_text("evil")
    assert "more.pt is not in its manifest" in str(checkpoint.fault(signer=OURS))


def unreadable(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    """Files of this name are not read from here on, for the reason of this number."""
    really = Path.open

    def refuse(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == name:
            raise OSError(number, os.strerror(number))
        return really(path, *args, **options)

    monkeypatch.setattr(Path, "open", refuse)


@pytest.mark.parametrize("name", ["manifest.json", "trainer/weights"])
def test_what_the_disk_does_not_read_is_a_fault_that_is_named(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    unreadable(monkeypatch, Path(name).name, errno.EIO)
    for signer in (None, OURS):
        assert checkpoint.fault(signer=signer) == f"{checkpoint.path / name} cannot be read: Input/output error"


@pytest.mark.parametrize("name", ["manifest.json", "weights"])
def test_what_may_not_be_read_is_no_damage(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    unreadable(monkeypatch, name, errno.EACCES)
    with pytest.raises(PermissionError):
        checkpoint.fault()


def test_without_a_key_nothing_is_signed(tmp_path: Path) -> None:
    Checkpoints(tmp_path, keep=2, signer=Signer.read(None)).write(version=1, save_trainer=save)
    (written,) = checkpoints_of(tmp_path)
    assert "signature" not in json.loads((written.path / "manifest.json").read_text())
    assert written.fault() is None


def test_a_key_that_others_can_read_signs_nothing(tmp_path: Path) -> None:
    (tmp_path / "learner.key").write_text("a" * 40)
    (tmp_path / "learner.key").chmod(0o644)
    with pytest.raises(SecretFileError, match=r"learner\.key"):
        Signer.read(tmp_path / "learner.key")
