"""Which policy versions belong to the history of the present weights: `history.json` in the run's folder.

A learner whose batch log was damaged takes up its run at an earlier version than the one it had published. What its
former lives published beyond that has no part in the weights that are trained now, though the numbers come again.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from learner.history.durable_files import write_atomically
from protocol.trajectories import TrajectoryGroup
from protocol.versions import PolicyVersion

_FILE = "history.json"


@dataclass(frozen=True)
class History:
    """The learner's present incarnation, and for each former one the last version number that still holds."""

    incarnation: int
    last_valid: Mapping[int, int]

    def contains(self, version: PolicyVersion) -> bool:
        """Whether the present weights descend from this version, or are it."""
        if version.incarnation == self.incarnation:
            return True
        return version.number <= self.last_valid.get(version.incarnation, -1)

    def sampled(self, group: TrajectoryGroup) -> bool:
        """Whether every token of the group was sampled by a version of this history."""
        versions = {span.version for one in group.trajectories for span in one.version_spans}
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
