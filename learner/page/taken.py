"""Groups that a trainer hands over to be kept, and which of them are worth it where not all can be.

A group is notable by its best or worst reward, its length, its lag, its largest ratio, or since it failed. Of each kind
the most notable one is held until its turn comes to be written: the kinds take turns, and a lot is one of them.
"""

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from learner.leases.lease_times import LeaseTimes
from protocol.model import PolicyVersion
from protocol.trajectories import TrajectoryGroup

_NEVER = float("-inf")


class SequencePlace(NamedTuple):
    """Place of a sequence's tokens: a group of the step, its trajectory, from the token `start` on."""

    group: int
    trajectory: int
    start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class TakenStep:
    """Groups of one step. `values` are the learner's own, float32 over the tokens of all `places` end to end; `why` is
    why they were left out of training, empty if they were not; `spent_s`, what making the values took already. `times`
    are those of each group, none where nobody noted them.
    """

    step: int
    groups: Sequence[TrajectoryGroup]
    places: Sequence[SequencePlace] = ()
    values: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    why: str = ""
    spent_s: float = 0.0
    times: Sequence[LeaseTimes] = ()

    @property
    def trajectories(self) -> int:
        """Of all groups."""
        return sum(len(group.trajectories) for group in self.groups)


def only(taken: TakenStep, kept: int) -> TakenStep:
    """A single group of the step, with its tokens' values."""
    starts = np.cumsum([0, *(place.length for place in taken.places)])
    chosen = [number for number, place in enumerate(taken.places) if place.group == kept]
    values = {
        name: np.concatenate([whole[starts[each] : starts[each + 1]] for each in chosen]) if chosen else whole[:0]
        for name, whole in taken.values.items()
    }
    places = [taken.places[each] for each in chosen]
    moved = [SequencePlace(0, place.trajectory, place.start, place.length) for place in places]
    return TakenStep(
        step=taken.step,
        groups=(taken.groups[kept],),
        places=moved,
        values=values,
        why=taken.why,
        times=taken.times[kept : kept + 1],
    )


def lot(lease_id: int) -> int:
    """The lot of a lease, which is the same in every life of a learner: the least is drawn."""
    return zlib.crc32(struct.pack("<q", lease_id))


class NotableGroups:
    """Holds the most notable group of each kind, of those that were offered and have not been taken."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[float, TakenStep]] = {}
        self._turns: list[str] = []

    def offer(self, taken: TakenStep) -> list[tuple[TakenStep, int]]:
        """Looks at the groups of a step. Returns what will not be kept: steps, and how many trajectories of a group."""
        found = {**notability(taken), "lot": [-float(lot(group.lease_id)) for group in taken.groups]}
        self._turns = self._turns or list(found)
        former = {id(held): held for _, held in self._held.values()}
        singles: dict[int, TakenStep] = {}
        for kind, measures in found.items():
            number = max(range(len(measures)), key=measures.__getitem__)
            least = _NEVER if kind == "lot" else self._held.get(kind, (_NEVER, taken))[0]
            if measures[number] > least:
                single = singles.setdefault(number, only(taken, number))
                self._held[kind] = (measures[number], single)
        kept = {id(held) for _, held in self._held.values()}
        lost = [held for each, held in former.items() if each not in kept]
        unheld = [group for number, group in enumerate(taken.groups) if number not in singles]
        return [(held, held.trajectories) for held in lost] + [(taken, len(group.trajectories)) for group in unheld]

    def take(self) -> TakenStep | None:
        """The group whose kind's turn it is; None if none is held."""
        for kind in list(self._turns):
            self._turns.append(self._turns.pop(0))
            if kind in self._held:
                chosen = self._held[kind][1]
                self._held = {each: pair for each, pair in self._held.items() if pair[1] is not chosen}
                return chosen
        return None


def notability(taken: TakenStep) -> dict[str, list[float]]:
    """Measures of each group of a step, by kind: the higher, the more notable. Training waits for them."""
    rewards = [
        [each.reward.reward for each in group.trajectories if each.reward.reward is not None] for group in taken.groups
    ]
    failing = [
        sum(each.truncated or each.reward.reward is None for each in group.trajectories) for group in taken.groups
    ]
    return {
        "best": [max(given, default=_NEVER) for given in rewards],
        "worst": [-min(given, default=-_NEVER) for given in rewards],
        "longest": [float(max(len(each.token_ids) for each in group.trajectories)) for group in taken.groups],
        "stalest": [float(taken.step - _oldest(group)) for group in taken.groups],
        "ratio": _largest_gaps(taken),
        "failing": [float(count) if count else _NEVER for count in failing],
    }


def _oldest(group: TrajectoryGroup) -> int:
    """The number of the oldest version that a trajectory of a group began with: nearly always that of its tokens."""
    versions = {one.version_spans[0].version for one in group.trajectories if one.version_spans}
    return min((PolicyVersion.parse(version).number for version in versions), default=0)


def _largest_gaps(taken: TakenStep) -> list[float]:
    """The largest logprob gap of each group's trained tokens, learner minus sampling."""
    found, learner = [_NEVER] * len(taken.groups), taken.values.get("learner_logprobs")
    if learner is None or not len(learner):
        return found
    sampled: list[NDArray[np.float32]] = []
    masks: list[NDArray[np.uint8]] = []
    for place in taken.places:
        trajectory, part = (
            taken.groups[place.group].trajectories[place.trajectory],
            slice(place.start, place.start + place.length),
        )
        sampled.append(trajectory.behavior_logprobs[part])
        masks.append(trajectory.loss_mask[part])
    gaps = learner - np.concatenate(sampled)
    gaps[(np.concatenate(masks) == 0) | np.isnan(gaps)] = _NEVER
    starts = np.cumsum([0, *(place.length for place in taken.places)])[:-1]
    for place, largest in zip(taken.places, np.maximum.reduceat(gaps, starts).tolist(), strict=True):
        found[place.group] = max(found[place.group], largest)
    return found
