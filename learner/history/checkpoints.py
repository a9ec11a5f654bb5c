"""Checkpoints in the run's folder, and which of them is the newest that is whole.

A checkpoint is a folder `checkpoint-<version>` with the trainer's files and `ledger.json`. It is written under another
name and renamed when all of it is on disk, so that one that has the name is whole.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from learner.ledger import LedgerSnapshot

_PREFIX = "checkpoint-"


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def write(self, *, version: int, ledger: LedgerSnapshot, save_trainer: Callable[[Path], None]) -> Path:
        """Writes a checkpoint of `version`, then removes the oldest beyond `keep`."""
        draft = self._folder / f"draft-{version}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        save_trainer(draft / "trainer")
        (draft / "ledger.json").write_text(json.dumps(asdict(ledger)), encoding="utf-8")
        _sync(draft)
        final = self._folder / f"{_PREFIX}{version:08d}"
        shutil.rmtree(final, ignore_errors=True)
        draft.rename(final)
        _sync_folder(self._folder)
        for old in self._all()[: -self._keep]:
            shutil.rmtree(old)
        return final

    def newest(self) -> Path | None:
        """The newest checkpoint; None if there is none."""
        found = self._all()
        return found[-1] if found else None

    def _all(self) -> list[Path]:
        return sorted(self._folder.glob(f"{_PREFIX}*"))


def read_ledger(checkpoint: Path) -> LedgerSnapshot:
    """The ledger of a checkpoint."""
    return LedgerSnapshot(**json.loads((checkpoint / "ledger.json").read_text(encoding="utf-8")))


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_dir():
            _sync_folder(path)
        elif path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
