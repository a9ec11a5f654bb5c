"""Rewards on their way to the estimator: in which order the knobs act, and what is carried from step to step."""

from dataclasses import replace

import pytest
import torch

from learner.algorithms import shaping
from learner.algorithms.preset import CarriedState, ScoredBatch, shaped
from learner.algorithms.presets.dr_grpo import DrGrpoConfig
from learner.algorithms.presets.gigpo import GigpoConfig
from learner.algorithms.presets.grpo import GrpoConfig
from learner.algorithms.presets.opd import OpdConfig
from learner.algorithms.presets.rloo import RlooConfig
from learner.algorithms.shaping import RunningMoments
from tests.learner.algorithms.steps import floats, integers


def batch(**changes: object) -> ScoredBatch:
    """Two groups of two; trajectories of 1, 2, 1 and 4 tokens."""
    sequences = integers([0, 1, 1, 2, 3, 3, 3, 3])
    made = ScoredBatch(
        rewards=floats([1.0, 0.0, 4.0, 7.0]),
        groups=integers([0, 0, 1, 1]),
        truncated=torch.tensor([False, True, False, False]),
        components=torch.zeros(4, 0),
        sequences=sequences,
        token_ids=integers([5, 6, 7, 5, 8, 9, 8, 9]),
        turns=sequences,
        turn_states=integers([0, 0, 1, 1]),
        lags=torch.zeros_like(sequences),
        behavior_logprobs=torch.zeros(8, dtype=torch.float64),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_rewards_are_normalised_then_scaled_then_clipped_then_penalised() -> None:
    # Before: 0 and 2, so mean 1 and squares 2. With 1, 0, 4, 7: n = 6, mean 14/6 = 7/3, squares
    # (0, 2, 1, 0, 4, 7): 0 + 4 + 1 + 0 + 16 + 49 - 6 x 49/9 = 70 - 98/3 = 112/3; deviation sqrt(112/18) = 2.494438.
    config = GrpoConfig(
        reward_normalisation="standardise", reward_scale=2.0, reward_clip=1.5, truncated="penalise", truncated_penalty=3
    )
    before = CarriedState(rewards=RunningMoments(count=2, mean=1.0, squares=2.0))
    found = shaped(config, batch(carried=before))
    # (1 - 7/3) / 2.494438 x 2 = -1.069045; (0 - 7/3) x 2 / 2.494438 = -1.870829, clipped to -1.5, less 3;
    # (4 - 7/3) x 2 / 2.494438 = 1.336306; (7 - 7/3) x 2 / 2.494438 = 3.741657, clipped.
    assert found.rewards.of_trajectories.tolist() == pytest.approx([-1.069045, -4.5, 1.336306, 1.5], abs=1e-5)
    moments = found.carried.rewards
    assert (moments.count, moments.mean, moments.squares) == pytest.approx((6, 7 / 3, 112 / 3))


def test_bounds_need_not_be_alike_and_the_overlong_penalty_has_a_weight() -> None:
    """1, 0, 4, 7 within 0.5 and 5: 1, 0.5, 4, 5. Lengths 1, 2, 1, 4; whole at 4, from 2 on: 0, 0, 0, -1, times 0.25."""
    config = GrpoConfig(
        reward_clip=5.0, reward_clip_low=0.5, overlong_length=4, overlong_buffer=2, overlong_factor=0.25
    )
    assert shaped(config, batch()).rewards.of_trajectories.tolist() == [1.0, 0.5, 4.0, 4.75]
    assert shaped(GrpoConfig(reward_clip_low=0.5), batch()).rewards.of_trajectories.tolist() == [1.0, 0.5, 4.0, 7.0]


def test_normalisation_to_scale_leaves_the_mean() -> None:
    found = shaped(GrpoConfig(reward_normalisation="scale"), batch())
    # 1, 0, 4, 7: mean 3, squares 4 + 9 + 1 + 16 = 30, deviation sqrt(7.5) = 2.738613.
    assert found.rewards.of_trajectories.tolist() == pytest.approx([0.365148, 0.0, 1.460593, 2.556039], abs=1e-5)


def test_without_normalisation_nothing_is_counted() -> None:
    found = shaped(GrpoConfig(), batch())
    assert found.carried == CarriedState()
    assert found.rewards.of_trajectories.tolist() == [1.0, 0.0, 4.0, 7.0]


def test_length_and_repetition_cost_their_weights() -> None:
    # Lengths 1, 2, 1, 4 of at most 2: -0.5, -1, -0.5, -1, times 0.2. The bigrams of 8 9 8 9 are 89, 98, 89: two of
    # three different, -1/3, times 0.3. The other trajectories repeat nothing.
    config = GrpoConfig(length_penalty=0.2, length_limit=2, repetition_penalty=0.3, repetition_ngram=2)
    found = shaped(config, batch()).rewards.of_trajectories
    assert found.tolist() == pytest.approx([1 - 0.1, 0 - 0.2, 4 - 0.1, 7 - 0.2 - 0.1])


def test_the_shortest_right_answer_of_a_group_gains_and_a_wrong_one_never_does() -> None:
    # Group 0: lengths 1 and 2; group 1: 1 and 4. A reward of at least 4 is right: only group 1 has right ones.
    config = GrpoConfig(relative_length=0.4, relative_length_reward=4.0)
    found = shaped(config, batch()).rewards.of_trajectories
    assert found.tolist() == pytest.approx([1.0, 0.0 - 0.2, 4.0 + 0.2, 7.0 - 0.2])


KL = {"proximal_logprobs": torch.full((8,), -1.0, dtype=torch.float64), "reference_logprobs": torch.full((8,), -2.0)}
"""A gap of one nat at each of 8 tokens, of 4 trajectories: 2 nats a trajectory."""


def test_a_fixed_penalty_stays_and_is_measured() -> None:
    found = shaped(RlooConfig(kl_coefficient=0.1), batch(**KL))
    assert found.rewards.of_tokens is not None
    assert found.rewards.of_tokens.tolist() == pytest.approx([-0.1] * 8)
    assert found.means == pytest.approx({"kl_coefficient": 0.1, "trajectory_kl": 2.0})
    assert found.carried.kl_coefficient is None


def test_an_adaptive_penalty_uses_what_was_carried_and_moves_it_towards_the_target() -> None:
    # 2 nats against a target of 1.9: an error of 2 / 1.9 - 1 = 1 / 19. 4 of 40 trajectories: a tenth of it.
    config = RlooConfig(kl_coefficient=0.1, kl_control="adaptive", kl_target=1.9, kl_horizon=40)
    first = shaped(config, batch(**KL))
    assert first.means["kl_coefficient"] == 0.1
    assert first.carried.kl_coefficient == pytest.approx(0.1 * (1 + 0.1 / 19), rel=1e-12)
    second = shaped(config, batch(**KL, carried=first.carried))
    assert second.means["kl_coefficient"] == first.carried.kl_coefficient
    assert second.rewards.of_tokens is not None
    assert second.rewards.of_tokens.tolist() == pytest.approx([-(first.carried.kl_coefficient or 0)] * 8)


def test_a_preset_hands_on_what_is_carried_and_what_was_measured() -> None:
    config = RlooConfig(kl_coefficient=0.1, kl_control="adaptive", reward_normalisation="scale")
    estimate = config.preset().advantages
    assert estimate is not None
    made = estimate(batch(**KL))
    assert made.carried is not None
    assert made.carried.rewards.count == 4
    assert made.carried.kl_coefficient != 0.1
    assert made.means["trajectory_kl"] == pytest.approx(2.0)


def test_an_algorithm_that_looks_at_no_rewards_leaves_them() -> None:
    found = shaped(OpdConfig(), batch())
    assert found.rewards.of_trajectories.tolist() == [1.0, 0.0, 4.0, 7.0]


def test_a_turn_that_comes_later_counts_for_less() -> None:
    """Two trajectories: turns 0, 1 and 3 (2 is nobody's), which earn 1, 0 and 2 of 7; turn 4, which earns 0 of 5."""
    found = shaping.turn_discounted(
        rewards=torch.tensor([7.0, 5.0, 3.0], dtype=torch.float64),
        sequences=torch.tensor([0, 0, 0, 0, 1]),
        turns=torch.tensor([0, 0, 1, 3, 4]),
        turn_rewards=torch.tensor([1.0, 0.0, 9.0, 2.0, 0.0], dtype=torch.float64),
        discount=0.5,
    )
    # 1 + 0.5 x 0 + 0.25 x (2 + 4); one turn is not discounted; the third has no trained tokens.
    assert found.tolist() == [2.5, 5.0, 3.0]


def test_the_discount_of_turns_reaches_the_advantages_and_a_discount_of_1_changes_nothing() -> None:
    def rewards(discount: float) -> list[float]:
        config = DrGrpoConfig(turn_discount=discount)
        given = batch(
            rewards=torch.tensor([1.0, 1.0], dtype=torch.float64),
            groups=torch.tensor([0, 0]),
            truncated=torch.tensor([False, False]),
            sequences=torch.tensor([0, 0, 1]),
            token_ids=torch.tensor([5, 5, 5]),
            turns=torch.tensor([0, 1, 2]),
            turn_rewards=torch.zeros(3, dtype=torch.float64),
        )
        return shaped(config, given).rewards.of_trajectories.tolist()

    assert rewards(1.0) == [1.0, 1.0]
    assert rewards(0.5) == [0.5, 1.0]


def test_gigpo_has_a_discount_of_its_own() -> None:
    with pytest.raises(ValueError, match="turn_discount is set but has no effect: gigpo discounts by step_discount"):
        GigpoConfig(turn_discount=0.9)
