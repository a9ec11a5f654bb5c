"""Worth of a group that was trained: how much there may be to learn from it once more."""

import statistics

from protocol.trajectories import TrajectoryGroup


def worth_of(group: TrajectoryGroup) -> float:
    """Mean distance of the trajectories' rewards to the mean of their player's: the size of an advantage that is
    divided by nothing. 0 where all are equal; trajectories without a reward do not count.
    """
    distances: list[float] = []
    for alike in group.by_player.values():
        given = [group.trajectories[index].reward.reward for index in alike]
        rewards = [reward for reward in given if reward is not None]
        mean = statistics.fmean(rewards) if rewards else 0.0
        distances += [abs(reward - mean) for reward in rewards]
    return statistics.fmean(distances) if distances else 0.0
