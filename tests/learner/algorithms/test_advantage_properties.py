"""Properties of an estimator at every step: no order of trajectories matters, and the identities that define it."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from learner.algorithms import advantages, histories, token_baseline
from tests.learner.algorithms.steps import DrawnStep, integers, random_trajectories, step_of

Estimator = Callable[[DrawnStep], Tensor]
seeds = st.integers(min_value=0, max_value=10**9)


def by_group_deviation(step: DrawnStep) -> Tensor:
    return advantages.group(rewards=step.rewards, groups=step.groups, scale="std")


def by_group(step: DrawnStep) -> Tensor:
    return advantages.group(rewards=step.rewards, groups=step.groups, scale="none")


def by_group_mean(step: DrawnStep) -> Tensor:
    return advantages.group(rewards=step.rewards, groups=step.groups, scale="mean")


def leave_one_out(step: DrawnStep) -> Tensor:
    return advantages.leave_one_out(rewards=step.rewards, groups=step.groups)


def per_component(step: DrawnStep) -> Tensor:
    return advantages.per_component(components=step.components, groups=step.groups, weights=[1.0, 0.3])


def batch(step: DrawnStep, *, baseline: bool = False) -> Tensor:
    return advantages.batch(
        rewards=step.rewards,
        groups=step.groups,
        sequences=step.sequences,
        subtract_group_mean=baseline,
        token_rewards=step.token_rewards,
    )


def batch_with_baseline(step: DrawnStep) -> Tensor:
    return batch(step, baseline=True)


def gae(step: DrawnStep) -> advantages.Gae:
    return advantages.gae(
        rewards=step.token_rewards,
        values=step.values,
        sequences=step.sequences,
        gamma=0.9,
        policy_lambda=advantages.length_adaptive_lambda(sequences=step.sequences, alpha=0.4),
        value_lambda=0.95,
        whiten=True,
    )


def step_group(step: DrawnStep) -> Tensor:
    return advantages.step_group(
        rewards=step.rewards,
        groups=step.groups,
        sequences=step.sequences,
        turns=step.turns,
        turn_states=step.turn_states,
        gamma_step=0.95,
        omega=0.5,
        scale="std",
    )


def length_weighted(step: DrawnStep) -> Tensor:
    return advantages.length_weighted(rewards=step.rewards, groups=step.groups, lengths=step.lengths)


def group_variance(step: DrawnStep) -> Tensor:
    return advantages.group_variance(
        rewards=step.rewards, groups=step.groups, log_ratios=step.components[:, 1], beta=0.3
    )


def pass_at_2(step: DrawnStep) -> Tensor:
    return advantages.pass_at_k(right=step.rewards > 0.5, groups=step.groups, k=2)


def optimal_token(step: DrawnStep) -> Tensor:
    return token_baseline.optimal_token(
        rewards=step.rewards,
        groups=step.groups,
        sequences=step.sequences,
        norms=step.values.square(),
        token_rewards=step.token_rewards,
    )


def by_history(step: DrawnStep) -> Tensor:
    return histories.by_history(
        rewards=step.rewards,
        groups=step.groups,
        sequences=step.sequences,
        turns=step.turns,
        turn_states=step.turn_states,
        gamma_step=0.95,
        history=2,
        power=1.0,
        scale="std",
    )


TRAJECTORY_ESTIMATORS = (
    by_group_deviation,
    by_group,
    by_group_mean,
    leave_one_out,
    per_component,
    length_weighted,
    pass_at_2,
    group_variance,
)
TOKEN_ESTIMATORS: tuple[Estimator, ...] = (
    batch,
    batch_with_baseline,
    lambda step: gae(step).advantages,
    lambda step: gae(step).returns,
    step_group,
    optimal_token,
    by_history,
)


def relabelled(step: DrawnStep) -> DrawnStep:
    """The groups' numbers are names only: others, in another order."""
    return replace(step, groups=1000 - 3 * step.groups)


@pytest.mark.parametrize("estimator", TRAJECTORY_ESTIMATORS)
@settings(deadline=None, max_examples=40)
@given(seed=seeds)
def test_trajectories_keep_their_advantages_in_every_order(estimator: Estimator, seed: int) -> None:
    chance = random.Random(seed)
    trajectories = random_trajectories(chance)
    order = chance.sample(range(len(trajectories)), len(trajectories))
    shuffled = relabelled(step_of([trajectories[index] for index in order]))
    torch.testing.assert_close(estimator(shuffled), estimator(step_of(trajectories))[order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("estimator", TOKEN_ESTIMATORS)
@settings(deadline=None, max_examples=40)
@given(seed=seeds)
def test_tokens_keep_their_advantages_in_every_order_of_their_trajectories(estimator: Estimator, seed: int) -> None:
    chance = random.Random(seed)
    trajectories = random_trajectories(chance)
    step = step_of(trajectories)
    shuffled = relabelled(step_of(chance.sample(trajectories, len(trajectories))))
    # `numbers` of the step in its first order are 0, 1, 2, ...: they say where each token of the shuffled one was.
    torch.testing.assert_close(estimator(shuffled), estimator(step)[shuffled.numbers], rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=40)
@given(seed=seeds)
def test_group_statistics_are_the_same_to_the_last_bit_in_every_order(seed: int) -> None:
    chance = random.Random(seed)
    trajectories = random_trajectories(chance)
    order = chance.sample(range(len(trajectories)), len(trajectories))
    shuffled = step_of([trajectories[index] for index in order])
    assert by_group_deviation(shuffled).tolist() == by_group_deviation(step_of(trajectories))[order].tolist()


SHIFT_INVARIANT: tuple[Estimator, ...] = (
    by_group_deviation,
    by_group,
    leave_one_out,
    per_component,
    batch,
    batch_with_baseline,
)


@pytest.mark.parametrize("estimator", SHIFT_INVARIANT)
@settings(deadline=None, max_examples=40)
@given(seed=seeds, shift=st.floats(-10, 10))
def test_adding_a_number_to_all_rewards_changes_no_advantage(estimator: Estimator, seed: int, shift: float) -> None:
    step = step_of(random_trajectories(random.Random(seed)))
    shifted = replace(step, rewards=step.rewards + shift, components=step.components + shift)
    torch.testing.assert_close(estimator(shifted), estimator(step), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("estimator", [by_group_deviation, by_group, by_group_mean, leave_one_out])
@settings(deadline=None, max_examples=40)
@given(seed=seeds)
def test_the_advantages_of_a_group_sum_to_zero(estimator: Estimator, seed: int) -> None:
    step = step_of(random_trajectories(random.Random(seed)))
    result = estimator(step)
    for label in torch.unique(step.groups).tolist():
        members = step.groups == label
        assert float(result[members].sum()) == pytest.approx(0.0, abs=1e-9 * (1.0 + float(result.abs().max())))


@settings(deadline=None, max_examples=40)
@given(seed=seeds)
def test_leaving_one_out_is_the_centred_reward_times_g_over_g_minus_one(seed: int) -> None:
    step = step_of(random_trajectories(random.Random(seed)))
    result = leave_one_out(step)
    for label in torch.unique(step.groups).tolist():
        members = step.groups == label
        rewards = step.rewards[members]
        size = len(rewards)
        expected = (rewards - rewards.mean()) * size / (size - 1) if size > 1 else torch.zeros_like(rewards)
        torch.testing.assert_close(result[members], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("estimator", [batch, batch_with_baseline, per_component, lambda step: gae(step).advantages])
@settings(deadline=None, max_examples=40)
@given(seed=seeds)
def test_what_is_normalised_over_the_step_has_mean_zero_and_deviation_one(estimator: Estimator, seed: int) -> None:
    result = estimator(step_of(random_trajectories(random.Random(seed))))
    assert float(result.sum()) == pytest.approx(0.0, abs=1e-6)
    assert result.numel() == 0 or float(result.square().mean()) <= 1.0 + 1e-9
    # Two values that happen to lie close together feel the 1e-6 in the divisor; ten do not.
    if result.numel() >= 10 and bool((result != 0).any()):
        assert float(result.square().mean()) == pytest.approx(1.0, abs=1e-3)


@settings(deadline=None, max_examples=40)
@given(seed=seeds)
def test_without_discount_a_single_turn_counts_twice_in_its_group(seed: int) -> None:
    # One turn and one state each: the turns of a state are the trajectories of the group, with the same returns.
    trajectories = [replace(t, turns=(replace(t.turns[0], state=0),)) for t in random_trajectories(random.Random(seed))]
    step = step_of([trajectory for trajectory in trajectories if trajectory.tokens])
    once = by_group_deviation(step)
    torch.testing.assert_close(step_group(step), (1.5 * once)[step.sequences], rtol=1e-12, atol=1e-12)


def test_random_steps_hold_what_the_properties_are_about() -> None:
    steps = [step_of(random_trajectories(random.Random(seed))) for seed in range(50)]
    assert any(bool((step.lengths == 0).any()) for step in steps)
    assert any(bool((torch.bincount(step.groups) == 1).any()) for step in steps)
    assert any(
        not torch.equal(torch.unique(step.turns), integers(list(range(len(step.turn_states))))) for step in steps
    )
