import shutil
from pathlib import Path

import pytest

from learner.journal import held
from learner.journal.held import HELD_PREFIX, NothingHeld, held_still
from learner.journal.journal import FOLDER
from learner.journal.manifest import MANIFEST, write_manifest


def run_of(folder: Path, *, checkpoints: tuple[int, ...], segments: tuple[int, ...]) -> Path:
    for version in checkpoints:
        trainer = folder / f"checkpoint-{version:08d}" / "trainer"
        trainer.mkdir(parents=True)
        (trainer / "weights").write_text(f"of {version}")
        write_manifest(trainer.parent, version=version, journal=f"segment-{version:08d}.log")
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    for start in segments:
        (folder / FOLDER / f"segment-{start:08d}.log").write_text(f"from {start}")
    return folder


def files_in(folder: Path) -> dict[str, str]:
    """The content of each, but for manifests."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {str(path.relative_to(folder)): path.read_text() for path in found}


def test_what_the_learner_removes_stays_until_the_end_and_then_goes(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", checkpoints=(2, 4), segments=(2, 4))
    with held_still(run, version=None, beside=tmp_path) as folder:
        shutil.rmtree(run / "checkpoint-00000002")
        (run / FOLDER / "segment-00000002.log").unlink()
        assert files_in(folder) == {
            "checkpoint-00000002/trainer/weights": "of 2",
            f"{FOLDER}/segment-00000002.log": "from 2",
            f"{FOLDER}/segment-00000004.log": "from 4",
        }
        assert folder.parent == tmp_path
        assert folder.name.startswith(HELD_PREFIX)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("version", "names"),
    [
        (4, {"checkpoint-00000004", "segment-00000004.log"}),
        (0, {"segment-00000000.log", "segment-00000002.log", "segment-00000004.log"}),
        (None, {"segment-00000000.log", "segment-00000002.log", "segment-00000004.log"}),
    ],
)
def test_it_begins_with_the_version_that_is_asked_for_or_with_the_oldest(
    tmp_path: Path, version: int | None, names: set[str]
) -> None:
    run = run_of(tmp_path / "run", checkpoints=(1, 2, 4), segments=(0, 2, 4))
    with held_still(run, version=version, beside=None) as folder:
        found = {path.name for path in [*folder.glob("checkpoint-*"), *(folder / FOLDER).iterdir()]}
    assert found == names


def test_a_checkpoint_that_goes_meanwhile_is_left_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path / "run", checkpoints=(2, 4), segments=(2, 4))
    link, removed = held._linked, run / "checkpoint-00000002"

    def removing(source: str | Path, target: str | Path) -> None:
        shutil.rmtree(removed, ignore_errors=True)
        (run / FOLDER / "segment-00000002.log").unlink(missing_ok=True)
        link(source, target)

    monkeypatch.setattr(held, "_linked", removing)
    with held_still(run, version=None, beside=tmp_path) as folder:
        assert set(files_in(folder)) == {"checkpoint-00000004/trainer/weights", f"{FOLDER}/segment-00000004.log"}


@pytest.mark.parametrize("version", [7, 0])
def test_a_version_that_is_not_there_is_taken_for_no_other(tmp_path: Path, version: int) -> None:
    run = run_of(tmp_path / "run", checkpoints=(3, 6, 9), segments=(3, 6, 9))
    with pytest.raises(NothingHeld), held_still(run, version=version, beside=tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_damaged_one_is_left_for_the_next_one_and_the_initial_model_for_none(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", checkpoints=(3, 6), segments=(3, 6))
    (run / "checkpoint-00000003/trainer/weights").write_text("or not")
    with held_still(run, version=None, beside=None) as folder:
        assert set(files_in(folder)) == {"checkpoint-00000006/trainer/weights", f"{FOLDER}/segment-00000006.log"}
    with pytest.raises(NothingHeld), held_still(run, version=3, beside=None):
        pass
    (run / "checkpoint-00000006/trainer/weights").unlink()
    with pytest.raises(NothingHeld), held_still(run, version=None, beside=None):
        pass
    (run / FOLDER / "segment-00000000.log").write_text("from 0")
    with held_still(run, version=None, beside=None) as folder:
        assert set(files_in(folder)) == {f"{FOLDER}/segment-{start:08d}.log" for start in (0, 3, 6)}
