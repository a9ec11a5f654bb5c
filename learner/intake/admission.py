"""What a group must be before the ledger sees it: whole, scored, and made of tokens that this run's policy sampled."""

from collections.abc import Callable
from dataclasses import dataclass

from learner.intake.filters import GroupFilter
from protocol.messages import Failed
from protocol.trajectories import Trajectory, TrajectoryGroup
from protocol.versions import PolicyVersion


@dataclass(frozen=True)
class GroupRules:
    """`vocabulary_size` bounds token ids; a group of fewer than `min_group_size` scored trajectories is a failure.

    `filters` say which of the groups that are in order are left out.
    """

    vocabulary_size: int
    min_group_size: int
    filters: GroupFilter


def admissible(
    group: TrajectoryGroup, *, rules: GroupRules, belongs: Callable[[PolicyVersion], bool]
) -> TrajectoryGroup | Failed:
    """The group without the trajectories that could not be scored, or the failure that it amounts to.

    A reward that could not be computed is not a reward of 0: its trajectory leaves the group. `belongs` tells whether a
    version is of this learner's history; a group with a token of another one is a fault of the generators.
    """
    fault = _fault(group, rules=rules)
    if fault is not None:
        return _failed(group, reason=fault, data_fault=True)
    strange = _strange_version(group, belongs)
    if strange is not None:
        return _failed(group, reason=strange, data_fault=False)
    scored = tuple(trajectory for trajectory in group.trajectories if trajectory.reward.reward is not None)
    unscored = [trajectory for trajectory in group.trajectories if trajectory.reward.reward is None]
    if len(scored) >= rules.min_group_size:
        return group.model_copy(update={"trajectories": scored}) if unscored else group
    if not unscored:
        reason = f"the group has {len(scored)} trajectories; at least {rules.min_group_size} are needed"
        return _failed(group, reason=reason, data_fault=False)
    reason = f"{len(unscored)} of {len(group.trajectories)} rewards failed: {_error(unscored[0])}"
    # One that might work at another time is worth a retry, whatever ails the others.
    transient = any(trajectory.reward.error_kind == "infrastructure" for trajectory in unscored)
    return _failed(group, reason=reason, data_fault=not transient)


def _strange_version(group: TrajectoryGroup, belongs: Callable[[PolicyVersion], bool]) -> str | None:
    texts = {span.version for trajectory in group.trajectories for span in trajectory.version_spans}
    for version in sorted(map(PolicyVersion.parse, texts), reverse=True):
        if not belongs(version):
            return f"a token is stamped with policy version {version}, which is not in this learner's history"
    return None


def _fault(group: TrajectoryGroup, *, rules: GroupRules) -> str | None:
    for trajectory in group.trajectories:
        largest = int(trajectory.token_ids.max())
        if largest >= rules.vocabulary_size:
            return f"token id {largest} is outside the model's vocabulary of {rules.vocabulary_size}"
        if not trajectory.loss_mask.any():
            return "a trajectory holds no sampled token"
        if trajectory.loss_mask[0]:
            return "a trajectory's first token is marked as sampled, yet nothing precedes it"
    return None


def _error(trajectory: Trajectory) -> str:
    return trajectory.reward.error or "no reason was given"


def _failed(group: TrajectoryGroup, *, reason: str, data_fault: bool) -> Failed:
    return Failed(
        incarnation=group.incarnation,
        lease_id=group.lease_id,
        attempt=group.attempt,
        purpose=group.purpose,
        data_fault=data_fault,
        reason=reason[:4096],
    )
