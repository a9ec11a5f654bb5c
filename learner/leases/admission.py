"""Admission of groups: those that are whole, scored and made of this run's tokens."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from learner.leases.filters import GroupFilter
from learner.teachers.limits import TeachingLimits
from protocol.messages import FailedLease
from protocol.model import PolicyVersion
from protocol.trajectories import MAX_REWARD, RewardRecord, TrajectoryGroup


@dataclass(frozen=True)
class GroupRules:
    """`vocabulary_size` bounds token ids; a group of fewer than `min_group_size` scored trajectories is a failure. Of
    a game they are counted for each player, and a player that has fewer leaves the group. A group that branches may be
    smaller: one of its conversations that is over before it branches is a single trajectory in the place of several.
    One that was lost before its first turn is in nobody's place: without it the group has to be as large as others.

    A reward whose size is beyond `max_reward` does not count as one. `filters` say which of the groups that are in
    order are left out. With `greedy_baseline` a group without the reward of a greedy answer is a failure, and so is
    one that its teacher cannot be asked of, by `teaching`.
    """

    vocabulary_size: int
    min_group_size: int
    filters: GroupFilter
    max_reward: float = MAX_REWARD
    greedy_baseline: bool = False
    teaching: TeachingLimits = field(default_factory=TeachingLimits)

    def may_go_on(self, group: TrajectoryGroup) -> bool:
        """False for a group that a former life took in and that the settings of now would not: by its size, a reward,
        the filters, a missing greedy answer, or its teacher.
        """
        baseline = (group.greedy_baseline,) if self.greedy_baseline else ()
        if None in baseline or self.teaching.lack(group) or self.teaching.fault(group):
            return False
        records = [one.reward for one in group.trajectories]
        records += [one.reward for one in baseline if one is not None]
        if any(_reward_fault(record, max_reward=self.max_reward) for record in records):
            return False
        least = 1 if _branches(group) else self.min_group_size
        small = any(len(alike) < least for alike in group.by_player.values())
        return not small and self.filters.reason(group) is None


def admissible(
    group: TrajectoryGroup, *, rules: GroupRules, belongs: Callable[[PolicyVersion], bool]
) -> TrajectoryGroup | FailedLease:
    """The group without the trajectories that could not be scored, or the failure that it amounts to.

    A reward that could not be computed is not a reward of 0: its trajectory leaves the group. `belongs` tells whether a
    version is of this learner's history; a group with a token of another one is a fault of the generators.
    """
    fault = _fault(group, rules=rules)
    if fault is not None:
        return failure_of(group, reason=fault, data_fault=True)
    strange = _strange_version(group, belongs)
    if strange is not None:
        return failure_of(group, reason=strange, data_fault=False)
    if rules.greedy_baseline and (baseless := _without_baseline(group, rules=rules)) is not None:
        return baseless
    lack, unfit = rules.teaching.lack(group), rules.teaching.fault(group)
    if reason := lack or unfit:
        return failure_of(group, reason=reason, data_fault=not lack)
    faults = [_reward_fault(trajectory.reward, max_reward=rules.max_reward) for trajectory in group.trajectories]
    unscored = [one for one, fault in zip(group.trajectories, faults, strict=True) if fault is not None]
    scored = group
    if unscored:
        scorable = tuple(one for one, fault in zip(group.trajectories, faults, strict=True) if not fault)
        scored = group.model_copy(update={"trajectories": scorable})
    whole = _branches(group) and not unscored and not group.turnless
    least = 1 if whole else rules.min_group_size
    enough = {player for player, alike in scored.by_player.items() if len(alike) >= least}
    if enough:
        kept = tuple(one for one in scored.trajectories if one.player in enough)
        return scored.model_copy(update={"trajectories": kept}) if len(kept) < len(group.trajectories) else group
    if not unscored:
        most = max(map(len, scored.by_player.values()))
        lost = f", and {group.turnless} of its conversations had no turn" if group.turnless else ""
        reason = f"the group has {most} trajectories{lost}; at least {rules.min_group_size} are needed"
        return failure_of(group, reason=reason, data_fault=False)
    reason = f"{len(unscored)} of {len(group.trajectories)} rewards failed: {next(filter(None, faults))}"
    # One that might work at another time is worth a retry, whatever ails the others.
    transient = any(trajectory.reward.error_kind == "infrastructure" for trajectory in unscored)
    return failure_of(group, reason=reason, data_fault=not transient)


def _branches(group: TrajectoryGroup) -> bool:
    """True if its conversations may branch; they say so by the forks of each, also where they came to none."""
    return all(trajectory.forks for trajectory in group.trajectories)


def _without_baseline(group: TrajectoryGroup, *, rules: GroupRules) -> FailedLease | None:
    """The failure of a group whose trajectories have nothing to be compared with; None if they have."""
    baseline = group.greedy_baseline
    if baseline is None:
        reason = "the group has no greedy answer, with which the algorithm compares: it was granted for another one"
        return failure_of(group, reason=reason, data_fault=False)
    fault = _reward_fault(baseline.reward, max_reward=rules.max_reward)
    if fault is None:
        return None
    passing = baseline.reward.error_kind == "infrastructure"
    return failure_of(group, reason=f"the greedy answer has no reward: {fault}", data_fault=not passing)


def _strange_version(group: TrajectoryGroup, belongs: Callable[[PolicyVersion], bool]) -> str | None:
    texts = {version for _, version in group.stamps}
    for version in sorted(map(PolicyVersion.parse, texts), reverse=True):
        if not belongs(version):
            return f"a token is stamped with policy version {version}, which is not in this learner's history"
    return None


def _fault(group: TrajectoryGroup, *, rules: GroupRules) -> str | None:
    strange = max(group.teacher_prompt or (), default=0)
    if strange >= rules.vocabulary_size:
        return f"token id {strange} of teacher_prompt is outside the model's vocabulary of {rules.vocabulary_size}"
    masks = [trajectory.loss_mask for trajectory in group.trajectories]
    starts = np.array([0, *accumulate(map(len, masks))][:-1])
    largest = int(np.concatenate([trajectory.token_ids for trajectory in group.trajectories]).max())
    all_sampled = np.logical_or.reduceat(np.concatenate(masks), starts).all()
    if largest < rules.vocabulary_size and all_sampled and not any(mask[0] for mask in masks):
        return None  # as almost always; else each is looked at by itself
    for trajectory in group.trajectories:
        largest = int(trajectory.token_ids.max())
        if largest >= rules.vocabulary_size:
            return f"token id {largest} is outside the model's vocabulary of {rules.vocabulary_size}"
        if not trajectory.loss_mask.any():
            return "a trajectory holds no sampled token"
        if trajectory.loss_mask[0]:
            return "a trajectory's first token is marked as sampled, yet nothing precedes it"
    return None


def _reward_fault(record: RewardRecord, *, max_reward: float) -> str | None:
    if record.reward is None:
        return f"{record.verifier}: {record.error or 'no reason was given'}"
    if abs(record.reward) > max_reward:
        return (
            f"{record.verifier}: a reward of {record.reward:g} is beyond rollouts.max_reward, which is {max_reward:g}"
        )
    return None


def failure_of(group: TrajectoryGroup, *, reason: str, data_fault: bool) -> FailedLease:
    """The failure that its holder would have reported of an attempt that came to nothing."""
    return FailedLease(
        incarnation=group.incarnation,
        lease_id=group.lease_id,
        attempt=group.attempt,
        purpose=group.purpose,
        data_fault=data_fault,
        reason=reason[:4096],
    )
