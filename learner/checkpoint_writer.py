"""Checkpoints as the trainer's thread has them written: beside training, one at a time.

begin    ─▶ copies of what the files hold ─▶ training goes on
             └ a thread: files ─▶ manifest ─▶ the checkpoint's name
settle   ─▶ in the trainer's thread again: what came of it
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from learner.journal.checkpoints import Checkpoints
from learner.ledger import LedgerSnapshot
from learner.training.guard import NEW_GUARD, GuardState

logger = logging.getLogger(__name__)


class SavingTrainer(Protocol):
    """The part of a trainer that is used here."""

    def save(self, directory: Path) -> None:
        """See Trainer."""

    def begin_save(self, directory: Path) -> Callable[[], None]:
        """See Trainer."""


@dataclass(frozen=True)
class _Underway:
    """A checkpoint that is being written; `waited_s`: what training has waited for it."""

    version: int
    start: float
    waited_s: float
    path: Future[Path]


class CheckpointWriter:
    """Of one run; each method is called in the trainer's thread.

    `written` is told of each checkpoint the version, and how many seconds it took; `failed` the version, and the error.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        trainer: SavingTrainer,
        *,
        beside_training: bool,
        written: Callable[[int, float], None],
        failed: Callable[[int, OSError], None],
    ) -> None:
        self._checkpoints = checkpoints
        self._trainer = trainer
        self._beside_training = beside_training
        self._written = written
        self._failed = failed
        self._underway: _Underway | None = None

    def begin(
        self,
        *,
        version: int,
        ledger: LedgerSnapshot | None = None,
        guard: GuardState = NEW_GUARD,
        progress: Mapping[str, object],
    ) -> None:
        """Has a checkpoint of `version` written, once the former one is. An error of the disk is told, not raised."""
        start = time.monotonic()
        self.settle(wait=True)
        save = self._trainer.begin_save if self._beside_training else partial(_saved, self._trainer.save)
        try:
            finish = self._checkpoints.begin(
                version=version, ledger=ledger, guard=guard, progress=progress, begin_save=save
            )
        except OSError as error:
            self._failed(version, error)
            return
        path: Future[Path] = Future()
        # It does not keep a process that is to end: what it has not finished is no checkpoint.
        thread = threading.Thread(target=_run, args=(finish, path), name="checkpoint", daemon=True)
        if self._beside_training:
            thread.start()
        else:
            _run(finish, path)
        self._underway = _Underway(version=version, start=start, waited_s=time.monotonic() - start, path=path)
        self.settle(wait=False)

    def settle(self, *, wait: bool) -> None:
        """Tells what came of the checkpoint that is being written, if it is done, or once it is."""
        underway = self._underway
        if underway is None or not (wait or underway.path.done()):
            return
        self._underway = None
        try:
            path = underway.path.result()
        except OSError as error:
            self._failed(underway.version, error)
            return
        seconds = time.monotonic() - underway.start
        logger.info("checkpoint %s, %.1f s, of which training waited %.1f s", path, seconds, underway.waited_s)
        self._written(underway.version, seconds)


def _run(finish: Callable[[], Path], path: Future[Path]) -> None:
    try:
        path.set_result(finish())
    except BaseException as error:  # noqa: BLE001 -- it crosses to the trainer's thread, which raises it
        path.set_exception(error)


def _saved(save: Callable[[Path], None], folder: Path) -> Callable[[], None]:
    save(folder)
    return _nothing


def _nothing() -> None:
    """All files are written."""
