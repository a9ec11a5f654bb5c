"""The origin of a released version: its steps, their leases and rewards, and its trajectories as far as the journal has
them.

`metrics.jsonl` has a line for each step, with its leases, for as long as the run's folder lives. The journal has the
trajectories themselves since the oldest checkpoint that may be resumed, or all of them with `checkpoint.whole_journal`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner.journal.journal import FOLDER
from learner.journal.records import JournalDamaged
from learner.journal.segments import segments_of
from learner.recovery import LoggedStep, readable_steps
from learner.reports.history import RunHistory, lines_of
from protocol.model import PolicyVersion

_TRIES = 5


@dataclass(frozen=True)
class ReleaseOrigin:
    """Steps that led to a version, by number, each a line of `metrics.jsonl`; and those of them that the journal has.
    `disagree` are steps of which the two name other leases. `damage` says where the journal cannot be read from on.
    """

    version: PolicyVersion
    steps: Mapping[int, Mapping[str, Any]]
    logged: tuple[LoggedStep, ...]
    disagree: tuple[int, ...]
    damage: str = ""

    @property
    def missing(self) -> list[int]:
        """Steps of which nothing is known."""
        return [step for step in range(1, self.version.number + 1) if step not in self.steps]

    def trajectories(self) -> Iterator[dict[str, Any]]:
        """A row for each trajectory in the journal, in training order. Steps that a learner removes from it meanwhile
        have none.
        """
        for logged in self.logged:
            try:
                groups = logged.read().groups
            except FileNotFoundError:
                continue
            for group, lag in zip(groups, logged.lags, strict=True):
                for one in group.trajectories:
                    yield {
                        "step": logged.version + 1, "lease_id": group.lease_id, "environment": group.environment,
                        "task_index": group.task_index, "prompt": group.prompt_text, "completion": one.completion_text,
                        "reward": one.reward.reward, "verifier": one.reward.verifier, "lag": lag,
                        "versions": sorted({span.version for span in one.version_spans}),
                    }  # fmt: skip


def origin_of(run: Path, version: PolicyVersion) -> ReleaseOrigin:
    """The origin of a version of a run, also of one whose later steps were lost: what an incarnation after its own has
    written does not count. Raises JournalUnknown.
    """
    history = RunHistory[Mapping[str, Any]](dict)
    for line in lines_of(run / "metrics.jsonl"):
        if _is_of_a_later_life(line, version):
            break
        history.add(line)
    steps = {step: entry for step, entry in history.steps.items() if step <= version.number}
    logged, damage = _logged(run, until=version.number)
    disagree = tuple(
        step.version + 1
        for step in logged
        if (entry := steps.get(step.version + 1)) is not None and tuple(entry["lease_ids"]) != step.lease_ids
    )
    agreeing = tuple(step for step in logged if step.version + 1 not in disagree)
    return ReleaseOrigin(
        version=version, steps=steps, logged=agreeing, disagree=disagree, damage="" if damage is None else str(damage)
    )


def _logged(run: Path, *, until: int) -> tuple[tuple[LoggedStep, ...], JournalDamaged | None]:
    """The steps up to a version that the journal has; a learner may remove its oldest segments meanwhile."""
    for tried in range(_TRIES):
        begun = [segment.start for segment in segments_of(run / FOLDER) if segment.start < until]
        try:
            return readable_steps(run, version=min(begun), until=until) if begun else ((), None)
        except FileNotFoundError:
            if tried == _TRIES - 1:
                raise
    raise AssertionError("the last try returns or raises")


def _is_of_a_later_life(line: bytes, version: PolicyVersion) -> bool:
    if b'"resume"' not in line[:64]:
        return False
    try:
        entry = json.loads(line)
    except ValueError:
        return False
    return entry.get("kind") == "resume" and int(entry.get("incarnation", 0)) > version.incarnation
