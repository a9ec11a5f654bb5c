"""A run's folder: who has it, what the run is called towards env_services, and which policy versions belong to it.

One living learner has a folder, a fresh run never writes over an old one, and every start has an incarnation.

hold_run_folder     takes the lock; nothing else in the folder is touched
open_run_folder     once the ports are bound: an old run goes aside, the journal begins, the incarnation is counted
keep_template       the chat template that the run was given, for its exports

Every run counts its leases and incarnations from the start, and two runs may have folders of the same name.

A learner whose batch log was damaged takes up its run at an earlier version than the one it had published. What its
former lives published beyond that has no part in the weights that are trained now, though the numbers come again.
"""

import json
import logging
import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from learner.journal.checkpoints import checkpoints_of
from learner.journal.files import unused, write_atomically
from learner.journal.journal import FOLDER
from learner.journal.segments import Segment, segments_of
from protocol.model import PolicyVersion
from protocol.trajectories import TrajectoryGroup
from services.append_file import sync_folder
from services.config.made_with import TEMPLATE, Difference, changes_of_a_resume, refusal, since_last_start
from services.process import WrongSettings
from services.run_lock import RunLock

logger = logging.getLogger(__name__)

_MARKER = "incarnation"
_OF_ONE_START = ("resume", "accept_changes")
_FILE = "history.json"


class NothingToResume(WrongSettings, RuntimeError):
    """The folder holds nothing from which its run could go on. The text names what was found."""


async def hold_run_folder(folder: Path, *, resume: bool) -> RunLock:
    """Takes the folder for the life of this process. Raises FolderTaken, and NothingToResume if there is no run."""
    if resume:
        _check_there_is_a_folder(folder)
    return await RunLock.held(folder)


def _check_there_is_a_folder(folder: Path) -> None:
    if not folder.exists():
        raise NothingToResume(f"there is no run to resume in {folder}: start it without --resume")


def open_run_folder(lock: RunLock, folder: Path, *, resume: bool, journal: bool) -> int:
    """Makes the folder ready and returns this start's incarnation, from 1. `journal`: whether the run keeps one.

    Without `resume` an earlier run of the same name is moved aside. Raises NothingToResume for a folder that has lost
    what its run kept, and FileNotFoundError for one that has lost its incarnation; a run that was killed before it had
    written anything begins anew.
    """
    marker = folder / _MARKER
    if resume:
        _check_there_is_something(folder, marker, journal=journal)
    elif marker.exists() or _history(folder) or (folder / "metrics.jsonl").exists():
        began = time.strftime("%Y%m%d-%H%M%S", time.localtime((marker if marker.exists() else folder).stat().st_mtime))
        aside = unused(folder.with_name(f"{folder.name}.{began}"))
        lock.move_aside(aside)
        logger.info("an earlier run of this name is kept in %s", aside)
    if journal and not marker.exists():
        _begin_journal(folder / FOLDER)
    incarnation = 1 + (int(marker.read_text(encoding="utf-8")) if marker.exists() else 0)
    write_atomically(marker, f"{incarnation}\n")
    return incarnation


def keep_template(folder: Path, text: str) -> None:
    """Keeps the chat template that a run was given, so that its checkpoints can be exported with it; none if empty."""
    if text:
        write_atomically(folder / TEMPLATE, text)
    else:
        (folder / TEMPLATE).unlink(missing_ok=True)


def changed_settings(
    folder: Path, settings: Mapping[str, object], *, resume: bool, accepted: bool, usual: Collection[str] = ()
) -> list[Difference]:
    """Differences of this start's settings from the run's so far; `usual` are the keys that have their defaults. Raises
    WrongSettings if it would be another training.
    """
    if not resume:
        return []
    return changes_of_a_resume(
        folder,
        settings,
        accepted=accepted,
        ignored=_ignored(settings),
        more=_other_training(settings),
        usual=usual,
    )


def refused_resume(folder: Path, settings: Mapping[str, object], *, usual: Collection[str] = ()) -> str:
    """Reason why these settings cannot go on with the run in the folder; empty if they can. Known without a start.
    `usual` as in `changed_settings`.
    """
    changes = since_last_start(folder, settings, ignored=_ignored(settings))
    return refusal(folder, changes, more=_other_training(settings), usual=usual)


def _other_training(settings: Mapping[str, object]) -> tuple[str, ...]:
    """Where groups that are trained again have a bound of their own, `max_lag` says which tokens' second moment is
    bounded: the logged batches would be trained otherwise than they were.
    """
    return ("max_lag",) if settings.get("reuse.max_lag") is not None else ()


def _ignored(settings: Mapping[str, object]) -> tuple[str, ...]:
    """The same model or file in another place is the same, and the steps that epochs come to follow from these."""
    ignored = (*_OF_ONE_START, "model") if settings.get("model_fingerprint") else _OF_ONE_START
    ignored = (*ignored, "demonstrations.path") if settings.get("demonstrations_fingerprint") else ignored
    ignored = (*ignored, "steps") if settings.get("data.epochs") is not None else ignored
    return (*ignored, "run.chat_template") if settings.get("template_fingerprint") else ignored


def _begin_journal(folder: Path) -> None:
    """Before the marker: so a folder with a marker and without a journal has lost it."""
    folder.mkdir(exist_ok=True)
    Segment.named(folder, 0).path.touch()
    sync_folder(folder)


def _check_there_is_something(folder: Path, marker: Path, *, journal: bool) -> None:
    if marker.exists():
        if journal and not (segments_of(folder / FOLDER) or checkpoints_of(folder)):
            raise NothingToResume(
                f"the run in {folder} has begun, and its journal and its checkpoints are gone: it would silently begin "
                "at version 0. Restore them, or start without --resume"
            )
        return
    if kept := _history(folder):
        raise FileNotFoundError(
            f"{marker} is missing, though {folder} holds {kept[0].name}: write the number of the run's starts so far "
            "into that file, or start without --resume"
        )
    logger.info("the run in %s was stopped before its first step: it begins now", folder)


def _history(folder: Path) -> list[Path]:
    """Files of a run that has begun: checkpoints, and segments of the journal that hold something."""
    segments = [
        segment.path for segment in segments_of(folder / FOLDER) if segment.start or segment.path.stat().st_size
    ]
    return [*segments, *(each.path for each in checkpoints_of(folder))]


def run_name(folder: Path) -> str:
    """The random name of the run in this folder; it is made when it is first asked for."""
    path = folder / "run_name"
    if not path.exists():
        write_atomically(path, f"{secrets.token_hex(8)}\n")
    return path.read_text(encoding="utf-8").strip()


@dataclass(frozen=True)
class History:
    """The learner's present incarnation, and for each former one the last version number that still holds."""

    incarnation: int
    last_valid: Mapping[int, int]

    def contains(self, version: PolicyVersion) -> bool:
        """True if the present weights descend from this version, or are it."""
        if version.incarnation == self.incarnation:
            return True
        return version.number <= self.last_valid.get(version.incarnation, -1)

    def sampled(self, group: TrajectoryGroup) -> bool:
        """True if every token of the group was sampled by a version of this history."""
        versions = {version for _, version in group.stamps}
        return all(self.contains(PolicyVersion.parse(version)) for version in versions)


def resume_history(folder: Path, *, incarnation: int, version: int) -> History:
    """The history of a life that begins at `version`: no former one reaches beyond it. Writes it, whole or not at all.

    Raises ValueError for a file that was not written by this function.
    """
    path = folder / _FILE
    former = _read(path) if path.exists() else {}
    last_valid = {each: min(version, former.get(each, version)) for each in range(1, incarnation)}
    write_atomically(path, json.dumps({"last_valid": last_valid}, indent=2) + "\n")
    return History(incarnation=incarnation, last_valid=last_valid)


def _read(path: Path) -> dict[int, int]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["last_valid"].items()
        return {int(incarnation): int(number) for incarnation, number in entries}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is damaged ({error!r}): restore it; or, if no journal of this run was ever damaged, remove it"
        ) from error
