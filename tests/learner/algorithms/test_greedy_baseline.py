"""ReMax: numbers by hand, from groups to advantages, and groups that cannot be compared."""

import pytest
import torch

from learner.algorithms.preset import Advantages, CarriedState
from learner.algorithms.presets.grpo import GrpoConfig
from learner.algorithms.presets.remax import RemaxConfig
from learner.training.batch import BaselineMissing, flatten, sequences_of
from learner.training.models import TokenScores, credit
from protocol.trajectories import GreedyBaseline, RewardRecord, TrajectoryGroup, VersionSpan
from tests.learner.algorithms.test_stale_tokens import POLICY, batch_of
from tests.learner.samples import group, trajectory

REMAX = RemaxConfig().preset()


def compared(made: TrajectoryGroup, reward: float) -> TrajectoryGroup:
    spans = (VersionSpan(version="3.4", start=2, end=5),)
    record = RewardRecord(verifier="test", reward=reward)
    return made.model_copy(
        update={"greedy_baseline": GreedyBaseline(reward=record, version_spans=spans, sampled_tokens=3)}
    )


def advantages_of(**knobs: object) -> Advantages:
    preset = RemaxConfig.model_validate(knobs).preset()
    assert preset.advantages is not None
    return preset.advantages(batch_of(POLICY, POLICY))


def test_the_advantage_is_the_reward_less_the_greedy_answers() -> None:
    """Rewards 1, 0 against 0.25, and 0, 1 against 1, of 2, 3, 2 and 1 tokens. The mean of the baselines is 0.625."""
    made = advantages_of()
    assert made.advantages.tolist() == [0.75] * 2 + [-0.25] * 3 + [-1.0] * 2 + [0.0]
    assert made.means == {"greedy_reward": 0.625}


def test_a_penalty_in_the_reward_is_of_the_whole_trajectory_and_of_no_baseline() -> None:
    """The reference at -1, the policy at -1, -0.5 | -2, -0.7, -1.2 | -0.9, -1.5 | -0.4: log ratios of 0.5, -0.9, -0.4
    and 0.6 over the trajectories. With a coefficient of 0.1: 0.75 - 0.05, -0.25 + 0.09, -1 + 0.04, 0 - 0.06.
    """
    made = advantages_of(kl_coefficient=0.1)
    expected = torch.tensor([0.70, 0.70, -0.16, -0.16, -0.16, -0.96, -0.96, -0.06], dtype=torch.float64)
    torch.testing.assert_close(made.advantages, expected)


def test_a_completion_that_was_cut_off_may_be_left_out() -> None:
    preset = RemaxConfig(truncated="mask").preset()
    assert preset.advantages is not None
    made = preset.advantages(batch_of(POLICY, POLICY, truncated=torch.tensor([False, True, False, False])))
    assert made.kept is not None
    assert made.kept.tolist() == [True] * 2 + [False] * 3 + [True] * 3


def test_a_groups_greedy_answer_is_compared_with_and_not_trained() -> None:
    """A group of 1 and 0 against 1, and one of 0.5 against 0.25, of 2, 1 and 1 tokens: 0, -1 and 0.25."""
    groups = [
        compared(group(0, trajectory(4, 4, reward=1.0), trajectory(4, reward=0.0)), 1.0),
        compared(group(1, trajectory(4, reward=0.5)), 0.25),
    ]
    sequences = sequences_of(groups, version=4, max_lag=0, preset=REMAX)
    assert [(each.reward, each.greedy_reward) for each in sequences] == [(1.0, 1.0), (0.0, 1.0), (0.5, 0.25)]
    made = credit(flatten(sequences), TokenScores(), preset=REMAX, carried=CarriedState())
    assert made.advantages.tolist() == [0.0] * 4 + [0.0, 0.0, -1.0] + [0.0, 0.0, 0.25]


def test_a_group_without_a_greedy_answer_is_refused_by_name_and_others_do_not_ask_for_one() -> None:
    plain = group(7, trajectory(4, reward=1.0), trajectory(4, reward=0.0))
    with pytest.raises(BaselineMissing, match=r"algo remax compares with .* greedy answer, and lease 7 has none"):
        sequences_of([plain], version=4, max_lag=0, preset=REMAX)
    others = sequences_of([compared(plain, 1.0)], version=4, max_lag=0, preset=GrpoConfig().preset())
    assert [each.greedy_reward for each in others] == [0.0, 0.0]
