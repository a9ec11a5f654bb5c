import json
import random
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithms import shaping
from learner.algorithms.shaping import RunningMoments
from tests.learner.algorithms.steps import DrawnStep, floats, integers, random_trajectories, step_of


def test_rewards_are_bounded_on_the_sides_that_have_a_bound() -> None:
    rewards = floats([-3.0, 0.5, 3.0])
    assert shaping.clip(rewards=rewards, low=-1.0, high=2.0).tolist() == [-1.0, 0.5, 2.0]
    assert shaping.clip(rewards=rewards, high=2.0).tolist() == [-3.0, 0.5, 2.0]
    assert shaping.scale(rewards=rewards, factor=0.5).tolist() == [-1.5, 0.25, 1.5]


def test_running_normalisation_counts_every_reward_so_far() -> None:
    # First step 0, 2: mean 1, deviation 1. Then 4, 6: of 0, 2, 4, 6 the mean is 3, the squares 9 + 1 + 1 + 9 = 20, the
    # deviation sqrt(5).
    first, moments = shaping.running_normalisation(rewards=floats([0.0, 2.0]), moments=RunningMoments(), centre=True)
    assert first.tolist() == pytest.approx([-1.0, 1.0], rel=1e-5)
    second, moments = shaping.running_normalisation(rewards=floats([4.0, 6.0]), moments=moments, centre=True)
    assert moments == RunningMoments(count=4, mean=3.0, squares=20.0)
    assert second.tolist() == pytest.approx([1 / 5**0.5, 3 / 5**0.5], rel=1e-5)


def test_without_centring_rewards_keep_their_signs() -> None:
    scaled, _ = shaping.running_normalisation(rewards=floats([1.0, 3.0]), moments=RunningMoments(), centre=False)
    assert scaled.tolist() == pytest.approx([1.0, 3.0], rel=1e-5)  # mean 2, deviation 1


@pytest.mark.parametrize("centre", [True, False])
@pytest.mark.parametrize("rewards", [[0.5], [0.1] * 7, [0.1 + 0.2, 0.3]])
def test_rewards_that_differ_by_rounding_at_most_are_not_blown_up(centre: bool, rewards: list[float]) -> None:
    normal, _ = shaping.running_normalisation(rewards=floats(rewards), moments=RunningMoments(), centre=centre)
    assert normal.tolist() == pytest.approx([0.0] * len(rewards) if centre else rewards, abs=1e-12)


def test_a_step_without_rewards_leaves_the_moments_alone() -> None:
    moments = RunningMoments(count=2, mean=1.0, squares=2.0)
    assert moments.including(floats([])) == moments


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**9))
def test_moments_do_not_depend_on_how_rewards_came_in_or_on_a_restart_between(seed: int) -> None:
    chance = random.Random(seed)
    rewards = [chance.uniform(-100, 100) for _ in range(chance.randint(1, 20))]
    cut = chance.randint(0, len(rewards))
    whole = RunningMoments().including(floats(rewards))
    before = RunningMoments().including(floats(rewards[cut:]))
    restored = RunningMoments(**json.loads(json.dumps(asdict(before))))
    assert restored == before
    parts = restored.including(floats(rewards[:cut]))
    assert parts.count == whole.count
    assert parts.mean == pytest.approx(whole.mean, abs=1e-9)
    assert parts.deviation == pytest.approx(whole.deviation, abs=1e-5)


def test_the_overlong_penalty_starts_at_the_buffer_and_has_its_floor_at_minus_one() -> None:
    # Limit 100, buffer 20: nothing up to 80, half way at 90, -1 at 100 and beyond.
    lengths = integers([0, 80, 81, 90, 100, 101, 5000])
    penalty = shaping.overlong_penalty(lengths=lengths, max_length=100, buffer=20)
    assert penalty.tolist() == pytest.approx([0.0, 0.0, -0.05, -0.5, -1.0, -1.0, -1.0], rel=1e-12)


def test_the_length_penalty_grows_with_every_token_down_to_minus_one() -> None:
    penalty = shaping.length_penalty(lengths=integers([0, 25, 100, 300]), max_length=100)
    assert penalty.tolist() == [0.0, -0.25, -1.0, -1.0]


def test_relative_length_rewards_the_shortest_correct_answer_and_no_wrong_one() -> None:
    # Lengths 10, 20, 30: 0.5 - 0, 0.5 - 0.5, 0.5 - 1. A wrong answer of 10 tokens gets 0 instead of 0.5, a wrong one of
    # 30 keeps its -0.5. Equal lengths: nothing.
    reward = shaping.relative_length(
        lengths=integers([10, 20, 30, 10, 30, 7, 7]),
        groups=integers([0, 0, 0, 1, 1, 2, 2]),
        correct=torch.tensor([True, True, True, False, False, True, False]),
    )
    assert reward.tolist() == [0.5, 0.0, -0.5, 0.0, -0.5, 0.0, 0.0]


def repetition(*tokens: int, ngram: int, turns: tuple[int, ...] = ()) -> float:
    penalty = shaping.repetition_penalty(
        token_ids=integers(tokens),
        sequences=integers([0] * len(tokens)),
        turns=integers(turns or [0] * len(tokens)),
        trajectories=1,
        ngram=ngram,
    )
    return float(penalty)


def test_the_repetition_penalty_is_the_share_of_ngrams_seen_before() -> None:
    # 1 2 1 2 1: bigrams 12, 21, 12, 21: two of four are new.
    assert repetition(1, 2, 1, 2, 1, ngram=2) == -0.5
    # Trigrams 121, 212, 121: two of three.
    assert repetition(1, 2, 1, 2, 1, ngram=3) == pytest.approx(-1 / 3, rel=1e-12)
    assert repetition(1, 2, 3, ngram=2) == 0.0
    assert repetition(7, 7, 7, 7, ngram=1) == -0.75


def test_a_trajectory_without_an_ngram_is_not_penalised() -> None:
    assert repetition(5, 5, ngram=3) == 0.0
    assert repetition(ngram=2) == 0.0


def test_tokens_of_different_turns_make_no_ngram() -> None:
    # With the turns apart: 12 and 12, one of two repeated. In one turn: 12, 21, 12, one of three.
    assert repetition(1, 2, 1, 2, ngram=2, turns=(0, 0, 1, 1)) == -0.5
    assert repetition(1, 2, 1, 2, ngram=2) == pytest.approx(-1 / 3, rel=1e-12)


def test_a_trajectory_may_say_what_another_one_said() -> None:
    penalty = shaping.repetition_penalty(
        token_ids=integers([1, 2, 1, 2, 1, 2, 1]),
        sequences=integers([0, 0, 2, 2, 2, 2, 2]),
        turns=integers([0, 0, 1, 1, 1, 1, 1]),
        trajectories=3,
        ngram=2,
    )
    assert penalty.tolist() == [0.0, 0.0, -0.5]  # the middle one has no tokens; the last is 12, 21, 12, 21


def counted_repetition(step: DrawnStep, ngram: int) -> list[float]:
    """The same by hand: n-grams of each turn in a set and in a list."""
    result = []
    for sequence in range(len(step.rewards)):
        grams: list[tuple[int, ...]] = []
        for turn in torch.unique(step.turns[step.sequences == sequence]).tolist():
            tokens = step.token_ids[step.turns == turn].tolist()
            grams += [tuple(tokens[at : at + ngram]) for at in range(len(tokens) - ngram + 1)]
        result.append(len(set(grams)) / len(grams) - 1.0 if grams else 0.0)
    return result


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**9), ngram=st.integers(1, 4))
def test_repetition_is_counted_right_in_random_steps(seed: int, ngram: int) -> None:
    step = step_of(random_trajectories(random.Random(seed)))
    penalty = shaping.repetition_penalty(
        token_ids=step.token_ids,
        sequences=step.sequences,
        turns=step.turns,
        trajectories=len(step.rewards),
        ngram=ngram,
    )
    assert penalty.tolist() == pytest.approx(counted_repetition(step, ngram), abs=1e-12)


def test_kl_in_the_reward_costs_beta_per_nat_and_carries_no_gradient() -> None:
    # k1 of 0.5 against 0.25 is ln 2; beta 0.1.
    policy = floats([0.5, 0.2]).log().requires_grad_()
    rewards = shaping.kl_rewards(
        policy_logprobs=policy, reference_logprobs=floats([0.25, 0.2]).log(), beta=0.1, form="k1"
    )
    assert rewards.tolist() == pytest.approx([-0.1 * torch.log(torch.tensor(2.0)).item(), 0.0], rel=1e-6)
    assert not rewards.requires_grad


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (6.0, 0.1),  # on target
        (6.6, 0.1 * (1 + 0.1 * 0.25)),  # a tenth above, 100 of 400 trajectories
        (60.0, 0.1 * (1 + 0.2 * 0.25)),  # far above: as a fifth above
        (0.0, 0.1 * (1 - 0.2 * 0.25)),
    ],
)
def test_beta_rises_while_the_policy_is_too_far_away_and_falls_while_it_is_too_near(
    measured: float, expected: float
) -> None:
    beta = shaping.adapted_beta(beta=0.1, measured_kl=measured, target=6.0, horizon=400, trajectories=100)
    assert beta == pytest.approx(expected, rel=1e-12)


def test_a_step_of_more_trajectories_than_the_horizon_never_turns_beta_around() -> None:
    beta = shaping.adapted_beta(beta=0.1, measured_kl=0.0, target=6.0, horizon=10, trajectories=10_000)
    assert beta == pytest.approx(0.08, rel=1e-12)


def test_beta_brings_the_divergence_to_its_target() -> None:
    # A policy whose divergence is 1 / beta has the fixed point beta = 1 / target.
    beta = 5.0
    for _ in range(400):
        beta = shaping.adapted_beta(beta=beta, measured_kl=1 / beta, target=4.0, horizon=1000, trajectories=100)
    assert beta == pytest.approx(0.25, rel=1e-3)


@pytest.mark.parametrize(
    ("weight", "measured", "now", "following"),
    [
        (0.0, 0.1, 0.0, 0.01),
        (0.02, 0.1, 0.02, 0.03),
        (0.03, 0.1, 0.03, 0.035),  # not above the limit
        (0.02, 0.3, 0.0, 0.01),  # not in the loss where there is entropy enough
        (0.005, 0.3, 0.0, 0.0),
        (0.02, 0.2, 0.02, 0.02),
    ],
)
def test_the_weight_of_the_entropy_grows_step_by_step_while_there_is_too_little(
    weight: float, measured: float, now: float, following: float
) -> None:
    found = shaping.entropy_weight(weight=weight, measured=measured, target=0.2, step=0.01, limit=0.035)
    assert (found.now, found.following) == pytest.approx((now, following))


def test_token_rewards_add_up_per_trajectory_and_a_reward_sits_on_the_last_token() -> None:
    sequences = integers([0, 0, 2])
    sums = shaping.to_trajectories(token_rewards=floats([1.0, 2.0, 4.0]), sequences=sequences, trajectories=3)
    assert sums.tolist() == [3.0, 0.0, 4.0]
    assert shaping.to_tokens(rewards=floats([5.0, 6.0, 7.0]), sequences=sequences).tolist() == [0.0, 5.0, 7.0]


def test_truncated_trajectories_are_kept_masked_or_penalised() -> None:
    rewards, truncated = floats([1.0, 1.0]), torch.tensor([True, False])
    kept = shaping.truncation(rewards=rewards, truncated=truncated, rule="keep", penalty=0.1)
    assert (kept.rewards.tolist(), kept.trained.tolist()) == ([1.0, 1.0], [True, True])
    masked = shaping.truncation(rewards=rewards, truncated=truncated, rule="mask", penalty=0.1)
    assert (masked.rewards.tolist(), masked.trained.tolist()) == ([1.0, 1.0], [False, True])
    penalised = shaping.truncation(rewards=rewards, truncated=truncated, rule="penalise", penalty=0.1)
    assert (penalised.rewards.tolist(), penalised.trained.tolist()) == ([0.9, 1.0], [True, True])
