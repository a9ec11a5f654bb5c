"""Filters of groups that teach nothing, and the count of what they leave out on the way to a batch.

A left-out group gives its place back, and sampling goes on until a batch is full. It may never become full; so the
groups that are left out on the way to a batch are counted, and too many of them end the run.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from learner.leases.dead_letters import RunAborted
from protocol.trajectories import TrajectoryGroup


class FilterReason(StrEnum):
    """Reason to leave a group out."""

    UNIFORM = "uniform"
    """All its rewards are equal, that of a greedy answer too: a baseline leaves nothing to learn."""
    TOO_HARD = "mean_reward_low"
    TOO_EASY = "mean_reward_high"


@dataclass(frozen=True, kw_only=True)
class GroupFilter:
    """Filter of groups: left out are those without spread of rewards, and those of a mean reward outside of a range. A
    game of several players is left out if it is so for each of them.

    A bound that is None does not count; a mean equal to a bound is inside. `rounds`: how many times `groups_per_step`
    groups may be left out on the way to one batch. `greedy_baseline`: a greedy answer's reward counts to the spread.
    """

    drop_uniform: bool = False
    min_mean_reward: float | None = None
    max_mean_reward: float | None = None
    rounds: int = 10
    greedy_baseline: bool = False

    def reason(self, group: TrajectoryGroup) -> FilterReason | None:
        """Reason to leave the group out; None if it is taken. All its trajectories have a reward."""
        rewards = rewards_of(group)
        baseline = group.greedy_baseline if self.greedy_baseline else None
        greedy = () if baseline is None else (baseline.reward.reward,)
        reasons = [
            self._reason([rewards[index] for index in alike], compared_with=greedy)
            for alike in group.by_player.values()
        ]
        return reasons[0] if all(reasons) else None

    def _reason(self, rewards: Sequence[float], *, compared_with: Sequence[float | None]) -> FilterReason | None:
        mean = sum(rewards) / len(rewards)
        if self.min_mean_reward is not None and mean < self.min_mean_reward:
            return FilterReason.TOO_HARD
        if self.max_mean_reward is not None and mean > self.max_mean_reward:
            return FilterReason.TOO_EASY
        return FilterReason.UNIFORM if self.drop_uniform and len({*rewards, *compared_with}) == 1 else None


class FilterRounds:
    """Counts the groups that were left out since the last batch, while the next one lacked groups."""

    def __init__(self, rules: GroupFilter, *, groups_per_step: int) -> None:
        self._rules = rules
        self._groups_per_step = groups_per_step
        self._reasons: Counter[FilterReason] = Counter()
        self._rewards = 0.0

    def batch_taken(self) -> None:
        """A batch became full: the count begins anew."""
        self._reasons.clear()
        self._rewards = 0.0

    def left_out(self, group: TrajectoryGroup, reason: FilterReason, *, buffered: int) -> RunAborted | None:
        """Counts a group, unless a whole batch is `buffered` already. Returns why the run must stop, if it must."""
        if buffered >= self._groups_per_step:
            return None
        rewards = rewards_of(group)
        self._reasons[reason] += 1
        self._rewards += sum(rewards) / len(rewards)
        most = self._rules.rounds * self._groups_per_step
        return self._failure(most, buffered=buffered) if self._reasons.total() > most else None

    def _failure(self, most: int, *, buffered: int) -> RunAborted:
        count = self._reasons.total()
        found = ", ".join(f"{self._described(reason)}: {number}" for reason, number in self._reasons.most_common())
        return RunAborted(
            f"{count} groups were filtered since the last batch, and {buffered} of {self._groups_per_step} are there; "
            f"at most {most} may be ({self._rules.rounds} rounds of {self._groups_per_step}). {found}. The mean reward "
            f"of these groups is {self._rewards / count:.3g}. Choose tasks that the policy solves sometimes, not "
            "always or never, or raise rollouts.group_size; or allow more by rollouts.filter_rounds, or filter less by "
            "rollouts.drop_uniform_groups, rollouts.min_mean_reward and rollouts.max_mean_reward"
        )

    def _described(self, reason: FilterReason) -> str:
        return {
            FilterReason.UNIFORM: "without spread of rewards",
            FilterReason.TOO_HARD: f"with a mean reward under {self._rules.min_mean_reward}",
            FilterReason.TOO_EASY: f"with a mean reward over {self._rules.max_mean_reward}",
        }[reason]


def rewards_of(group: TrajectoryGroup) -> Sequence[float]:
    """The rewards of a group that was admitted: every trajectory has one."""
    rewards = [trajectory.reward.reward for trajectory in group.trajectories]
    scored = [reward for reward in rewards if reward is not None]
    assert len(scored) == len(rewards), "a trajectory without a reward leaves its group before"
    return scored
