import pytest
from torch import Tensor

from learner.algorithms import advantages
from tests.learner.algorithms.steps import DrawnStep, DrawnToken, DrawnTrajectory, DrawnTurn, floats, step_of

TOKEN = DrawnToken(number=0, reward=0.0, value=0.0, token_id=0)


def trajectory(reward: float, *states: int, group: int = 0, tokens: tuple[int, ...] = ()) -> DrawnTrajectory:
    """Turns from `states`, with `tokens` trained tokens each, or one where nothing is said."""
    lengths = tokens or (1,) * len(states)
    turns = tuple(
        DrawnTurn(state=state, tokens=(TOKEN,) * length) for state, length in zip(states, lengths, strict=True)
    )
    return DrawnTrajectory(reward=reward, group=group, components=(0.0, 0.0), turns=turns)


def step_group(step: DrawnStep, *, gamma_step: float, omega: float) -> Tensor:
    return advantages.step_group(
        rewards=step.rewards,
        groups=step.groups,
        sequences=step.sequences,
        turns=step.turns,
        turn_states=step.turn_states,
        gamma_step=gamma_step,
        omega=omega,
        scale="none",
    )


def test_a_turn_is_compared_with_the_turns_that_started_from_the_same_state() -> None:
    # Rewards 1, 0, 1: mean 2/3, so 1/3, -2/3, 1/3 for the trajectories.
    # State 10: returns 0.5 x 1, 0.5 x 0 (one later turn each) and 1 (none): mean 0.5, so 0, -0.5, 0.5.
    # State 11: returns 1 and 0: mean 0.5, so 0.5, -0.5. With omega 2 these are doubled. The first turn has two tokens.
    step = step_of([trajectory(1.0, 10, 11, tokens=(2, 1)), trajectory(0.0, 10, 11), trajectory(1.0, 10)])
    result = step_group(step, gamma_step=0.5, omega=2.0)
    expected = [1 / 3, 1 / 3, 1 / 3 + 1, -2 / 3 - 1, -2 / 3 - 1, 1 / 3 + 1]
    assert result.tolist() == pytest.approx(expected, rel=1e-12)


def test_equal_states_of_different_groups_are_not_compared() -> None:
    # Each group has one trajectory: nothing to compare with, although the states are equal over the groups.
    step = step_of([trajectory(1.0, 10, group=0), trajectory(0.0, 10, group=1)])
    assert step_group(step, gamma_step=0.95, omega=1.0).tolist() == [0.0, 0.0]


def test_a_state_met_once_leaves_the_advantage_of_the_trajectory() -> None:
    step = step_of([trajectory(1.0, 1, 2), trajectory(0.0, 3)])
    assert step_group(step, gamma_step=0.95, omega=1.0).tolist() == [0.5, 0.5, -0.5]


def test_a_state_that_a_trajectory_comes_back_to_is_compared_with_itself() -> None:
    # One trajectory, twice in state 5: returns 0.5 and 1, mean 0.75.
    assert step_group(step_of([trajectory(1.0, 5, 5)]), gamma_step=0.5, omega=1.0).tolist() == [-0.25, 0.25]


def test_without_omega_what_is_left_is_the_group_advantage() -> None:
    step = step_of([trajectory(1.0, 1, 2), trajectory(0.0, 1)])
    assert step_group(step, gamma_step=0.5, omega=0.0).tolist() == [0.5, 0.5, -0.5]


def test_turns_without_trained_tokens_are_not_counted_as_steps() -> None:
    # Without its middle turn the first trajectory has one later turn: its return in state 1 is 0.5, against 1.
    # Mean 0.75: -0.25 and 0.25. Both rewards are 1, so the trajectories' own advantages are 0.
    step = step_of([trajectory(1.0, 1, 2, 3, tokens=(1, 0, 1)), trajectory(1.0, 1)])
    assert step_group(step, gamma_step=0.5, omega=1.0).tolist() == [-0.25, 0.0, 0.25]


def test_a_trajectory_without_trained_tokens_stays_in_the_baseline_of_its_group() -> None:
    step = step_of([trajectory(1.0, 1, tokens=(0,)), trajectory(0.0, 1)])
    assert step_group(step, gamma_step=0.5, omega=1.0).tolist() == [-0.5]


def test_a_step_without_tokens_has_no_advantages() -> None:
    step = step_of([trajectory(1.0, 1, tokens=(0,))])
    assert step_group(step, gamma_step=0.5, omega=1.0).tolist() == floats([]).tolist()


def test_turns_with_rewards_of_their_own_are_compared_by_what_came_from_them_on() -> None:
    """Discount 0.5. Trajectory 0: reward 1, turns 0.4 and 0.1, so that 0.5 is left for the last: returns 0.4 + 0.5 x
    0.6 = 0.7 and 0.6. Trajectory 1: reward 0, turns 0 and 0: returns 0. State 10: 0.7 and 0, so +-0.35; state 11:
    +-0.3. The trajectories: +-0.5.
    """
    step = step_of([trajectory(1.0, 10, 11), trajectory(0.0, 10, 11)])
    result = advantages.step_group(
        rewards=step.rewards,
        groups=step.groups,
        sequences=step.sequences,
        turns=step.turns,
        turn_states=step.turn_states,
        gamma_step=0.5,
        omega=1.0,
        scale="none",
        turn_rewards=floats([0.4, 0.1, 0.0, 0.0]),
    )
    assert result.tolist() == pytest.approx([0.85, 0.8, -0.85, -0.8])


def test_what_a_turn_without_trained_tokens_earned_comes_with_the_last_turn() -> None:
    """Of turns 0.2, 0.3 and 0.1 of a reward of 1 the second said nothing: 0.2, then 1 - 0.3 + 0.1 - 0.1 = 0.8, its own
    0.1 and the 0.7 that are left: returns 0.2 + 0.5 x 0.8 = 0.6 and 0.8 in one state: mean 0.7.
    """
    step = step_of([trajectory(1.0, 5, 6, 5, tokens=(1, 0, 1))])
    result = advantages.step_group(
        rewards=step.rewards,
        groups=step.groups,
        sequences=step.sequences,
        turns=step.turns,
        turn_states=step.turn_states,
        gamma_step=0.5,
        omega=1.0,
        scale="none",
        turn_rewards=floats([0.2, 0.3, 0.1]),
    )
    assert result.tolist() == pytest.approx([-0.1, 0.1])
