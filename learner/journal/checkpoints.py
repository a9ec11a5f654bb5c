"""Checkpoints in the run's folder: written whole or not at all, verified by a manifest before they are used.

A checkpoint is a folder `checkpoint-<version>` with the trainer's files (model, optimizer, progress of the schedule,
random states of every rank), `ledger.json`, `guard.json`, `progress.json`, and `manifest.json`. The order of the data
needs no file of its own: it is a pure function of the seed and of the ledger's cursor. Its place in the journal is the
segment of its version. It is written under another name, the manifest last, and renamed when all of it is on disk. What
the held-out evaluation of its version found stands beside it, in `checkpoint-<version>.evaluation.json`.
"""

import errno
import json
import logging
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from learner.journal.files import anyone, sync_tree, unused, write_atomically
from learner.journal.journal import FOLDER, NoJournal, RunLog
from learner.journal.manifest import Signer, manifest_fault, write_manifest
from learner.journal.segments import Segment
from learner.ledger import LedgerSnapshot
from learner.training.guard import NEW_GUARD, GuardState
from services.append_file import make_folder, sync_folder

logger = logging.getLogger(__name__)

_PREFIX = "checkpoint-"
_NAME = re.compile(r"checkpoint-(\d{8,})")
_DRAFT = "draft-"
_PROGRESS = "progress.json"
_NOTHING: Mapping[str, object] = {}
Metric = Literal["accuracy", "reward"]


@dataclass(frozen=True)
class VersionScore:
    """Result of a held-out evaluation of a version: the share of solved tasks, and the mean reward."""

    version: int
    accuracy: float
    reward: float


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder."""

    path: Path
    version: int

    def fault(self, *, signer: Signer | None = None) -> str | None:
        """Tells what is wrong with it: the file, what was expected and what is there; None if it is whole.

        With a signer, only what the same key signed is whole.
        """
        return manifest_fault(self.path, signer=signer)

    def ledger(self) -> LedgerSnapshot:
        """The ledger as it was."""
        return LedgerSnapshot(**json.loads((self.path / "ledger.json").read_text(encoding="utf-8")))

    def guard(self) -> GuardState:
        """The guard as it was; one that has seen nothing in a checkpoint of a release without guard."""
        path = self.path / "guard.json"
        return GuardState.read(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else NEW_GUARD

    def progress(self) -> dict[str, Any]:
        """The progress that was given as such; empty in a checkpoint of a release that kept none."""
        path = self.path / _PROGRESS
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}

    @property
    def trainer(self) -> Path:
        """The folder of the trainer's files."""
        return self.path / "trainer"

    @property
    def evaluation(self) -> Path:
        """Path of its held-out evaluation, once there is one."""
        return self.path.with_name(f"{self.path.name}.evaluation.json")


def checkpoints_of(folder: Path) -> list[Checkpoint]:
    """The checkpoints of a run, the oldest first, whole or not."""
    found = ((path, _NAME.fullmatch(path.name)) for path in folder.glob(f"{_PREFIX}*") if path.is_dir())
    return sorted((Checkpoint(path, int(name[1])) for path, name in found if name), key=lambda each: each.version)


def oldest_open_lease(folder: Path, *, keep: int) -> int:
    """The first lease that a resume may grant again, whichever of the newest `keep` checkpoints it goes back to; 0
    while the initial model is one to go back to, and where that cannot be told.
    """
    bases = checkpoints_of(folder)[-keep:]
    if len(bases) < keep:
        return 0
    try:
        ledger = bases[0].ledger()
    except (OSError, ValueError, TypeError):  # removed meanwhile for a newer one; or damaged, which is said at a resume
        return 0
    return min(ledger.lease_ids, default=ledger.cursor)


def _nothing_left() -> None:
    """All of the trainer's files are there already."""


class Checkpoints:
    """Writes the checkpoints of one run; keeps the newest `keep`, and the `keep_best` best by held-out evaluation.

    Only the newest are bases to resume from: the journal is kept for as long as one of them needs it, or whole.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        keep_best: int = 0,
        best_by: Metric = "accuracy",
        journal: RunLog | None = None,
        whole_journal: bool = False,
        signer: Signer | None = None,
        may_write: Callable[[], None] = anyone,
    ) -> None:
        """`may_write` is called before anything is written or removed, and raises once the folder is another's."""
        self._may_write = may_write
        self._folder = folder
        self._keep = keep
        self._keep_best = keep_best
        self._best_by: Metric = best_by
        self._journal = journal or NoJournal()
        self._whole_journal = whole_journal
        self._signer = signer
        self._size_then = self._journal.size()
        self._lock = threading.Lock()
        self._begun: int | None = None
        self._early: VersionScore | None = None

    def write(
        self,
        *,
        version: int,
        save_trainer: Callable[[Path], None],
        ledger: LedgerSnapshot | None = None,
        guard: GuardState = NEW_GUARD,
        progress: Mapping[str, object] = _NOTHING,
    ) -> Path:
        """Writes a checkpoint of `version`, whose journal segment has begun; then removes what is not kept.

        Training on files has no ledger. `progress` is what else a resume needs, as JSON. Raises OSError, and then there
        is no such checkpoint; and what `may_write` does: what another process has in the folder is left alone.
        """

        def saved(folder: Path) -> Callable[[], None]:
            save_trainer(folder)
            return _nothing_left

        return self.begin(version=version, begin_save=saved, ledger=ledger, guard=guard, progress=progress)()

    def begin(
        self,
        *,
        version: int,
        begin_save: Callable[[Path], Callable[[], None]],
        ledger: LedgerSnapshot | None = None,
        guard: GuardState = NEW_GUARD,
        progress: Mapping[str, object] = _NOTHING,
    ) -> Callable[[], Path]:
        """Begins a checkpoint as `write` does; the function returned writes it, in any thread, and returns its path.

        `begin_save` takes what is to be in the trainer's folder, and returns what writes it. Until all of it is on the
        disk the former checkpoints are there, and the journal that they need. One checkpoint after the other.
        """
        self._may_write()
        self._remove_drafts()
        self._check_room()
        draft = unused(self._folder / f"{_DRAFT}{version}")
        with self._removing_failed(draft):
            make_folder(draft)
            write_rest = begin_save(draft / "trainer")
            if ledger is not None:
                (draft / "ledger.json").write_text(json.dumps(asdict(ledger)), encoding="utf-8")
            (draft / _PROGRESS).write_text(json.dumps(progress), encoding="utf-8")
            (draft / "guard.json").write_text(json.dumps(asdict(guard)), encoding="utf-8")
            with self._lock:
                self._begun = version
                self._early = None
        return partial(self._finish, draft, version, write_rest)

    def _finish(self, draft: Path, version: int, write_rest: Callable[[], None]) -> Path:
        final = self._folder / f"{_PREFIX}{version:08d}"
        with self._removing_failed(draft):
            self._journal.sync()  # a checkpoint never reaches the disk before the segment that it needs
            write_rest()
            segment = Segment.named(self._folder / FOLDER, version).path.name
            write_manifest(draft, version=version, journal=segment, signer=self._signer)
            sync_tree(draft)
            self._may_write()  # saving takes long enough to lose the folder meanwhile
            former = [self._set_aside(final)] if final.exists() else []
            draft.rename(final)
            sync_folder(self._folder)
        with self._lock:
            self._may_write()
            self._begun = None
            if self._early is not None:
                self._note(self._early)
            former += self._set_old_aside()
        self._prune(former)
        return final

    @contextmanager
    def _removing_failed(self, draft: Path) -> Iterator[None]:
        try:
            yield
        except OSError:
            self._begun = None
            shutil.rmtree(draft, ignore_errors=True)
            raise
        finally:
            self._size_then = self._journal.size()

    def outgrown(self, most_bytes: int) -> bool:
        """True if the journal has grown by so much since the last attempt at a checkpoint: a resume reads all of it."""
        return self._journal.size() - self._size_then >= most_bytes

    def evaluated(self, result: VersionScore) -> None:
        """Notes an evaluation beside the checkpoint of its version, if there is one or will be. Raises OSError."""
        with self._lock:
            self._may_write()
            if result.version == self._begun:
                self._early = result
            else:
                self._note(result)

    def _note(self, result: VersionScore) -> None:
        checkpoint = self.at(result.version)
        if checkpoint is not None:
            write_atomically(checkpoint.evaluation, json.dumps(asdict(result)) + "\n")

    def at(self, version: int) -> Checkpoint | None:
        """The checkpoint of a version, if there is one."""
        return next((each for each in checkpoints_of(self._folder) if each.version == version), None)

    def best(self) -> list[Checkpoint]:
        """The `keep_best` best of those that were evaluated, the best first; of equal ones the newest."""
        scored = [(score, each) for each in checkpoints_of(self._folder) if (score := self._score(each)) is not None]
        ranked = sorted(scored, key=lambda pair: (pair[0], pair[1].version), reverse=True)
        return [each for _, each in ranked[: self._keep_best]]

    def _score(self, checkpoint: Checkpoint) -> float | None:
        try:
            return float(json.loads(checkpoint.evaluation.read_text(encoding="utf-8"))[self._best_by])
        except (FileNotFoundError, ValueError, KeyError):
            return None

    def _set_old_aside(self) -> list[Path]:
        """Takes their names from those that are not kept; returns where they are now. One that cannot be moved stays
        for the next time: the new checkpoint is whole without that.
        """
        found = checkpoints_of(self._folder)
        kept = {each.version for each in (*found[-self._keep :], *self.best())}
        aside: list[Path] = []
        for each in found:
            if each.version not in kept:
                try:
                    aside.append(self._set_aside(each.path))
                    each.evaluation.unlink(missing_ok=True)
                except OSError as error:
                    _say_kept(each.path, error)
        return aside

    def _prune(self, aside: Iterable[Path]) -> None:
        """Removes what was set aside, and the journal that no checkpoint needs; without the lock, for it takes long."""
        for path in aside:
            _delete(path)
        newest = checkpoints_of(self._folder)[-self._keep :]
        # While fewer than `keep` are there, the initial model is one to fall back to.
        if not self._whole_journal:
            try:
                self._journal.trim(version=newest[0].version if len(newest) == self._keep else 0)
            except OSError as error:
                _say_kept(self._folder / FOLDER, error)

    def _check_room(self) -> None:
        """Better before the ranks begin to write than when one of them fails and the others wait for it."""
        found = checkpoints_of(self._folder)
        if not found:
            return
        needed = sum(path.stat().st_size for path in found[-1].path.rglob("*") if path.is_file())
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise OSError(
                errno.ENOSPC, f"the disk of {self._folder} has room for {free} bytes, a checkpoint takes {needed}"
            )

    def _set_aside(self, path: Path) -> Path:
        """Takes the name away first, so that no crash leaves a part under it."""
        aside = unused(self._folder / f"{_DRAFT}removed")
        return path.rename(aside)

    def _remove_drafts(self) -> None:
        for draft in self._folder.glob(f"{_DRAFT}*"):
            _delete(draft)


def _delete(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        _say_kept(folder, error)


def _say_kept(path: Path, error: OSError) -> None:
    logger.warning("%s cannot be removed, which the next checkpoint tries again: %s", path, error)
