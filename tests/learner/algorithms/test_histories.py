"""Turns among those of equal histories: numbers by hand."""

import pytest

from learner.algorithms.histories import by_history
from tests.learner.algorithms.steps import DrawnStep, floats, step_of
from tests.learner.algorithms.test_step_group import trajectory

THREE = step_of([trajectory(1.0, 1, 2, 3, tokens=(1, 2, 1)), trajectory(0.0, 1, 2, 3), trajectory(1.0, 4, 2)])
"""Returns, at a discount of a half: 1/4, 1/2, 1; 0, 0, 0; 1/2, 1. State 1: 1/8 and -1/8. State 2: 0, -1/2 and 1/2.
State 3: 1/2 and -1/2. State 4: nothing. After each other 1, 2: 1/4 and -1/4; 2, 3: 1/2 and -1/2; 4, 2: nothing. 1, 2,
3: 1/2 and -1/2.
"""


def made_of(step: DrawnStep, *, history: int = 2, power: float = 1.0, scale: str = "none") -> list[float]:
    found: list[float] = by_history(
        rewards=step.rewards,
        groups=step.groups,
        sequences=step.sequences,
        turns=step.turns,
        turn_states=step.turn_states,
        gamma_step=0.5,
        history=history,
        power=power,
        scale="std" if scale == "std" else "none",
    ).tolist()
    return found


@pytest.mark.parametrize(
    ("history", "power", "second"),
    [
        (0, 1.0, -1 / 2),
        (1, 1.0, (2 * -1 / 2 + 3 * -1 / 4) / 5),
        (2, 1.0, (2 * -1 / 2 + 3 * -1 / 4) / 5),  # it has one turn before it
        (1, 0.0, -3 / 8),
        (1, 2.0, (4 * -1 / 2 + 9 * -1 / 4) / 13),
    ],
)
def test_a_turn_is_compared_more_by_those_that_began_like_it(history: int, power: float, second: float) -> None:
    """Of the first trajectory the second turn, of two tokens, is at the mean of its state, which does not count."""
    first = 1 / 4 if history else 0.0
    expected = [1 / 8, first, first, 1 / 2, -1 / 8, second, -1 / 2, 0.0, 1 / 2]
    assert made_of(THREE, history=history, power=power) == pytest.approx(expected)


def test_the_longest_history_counts_where_the_shorter_ones_differ() -> None:
    """State 3 after 1, 2 and after 5, 2: returns 1, 0 | 0. By state 3 alone 2/3, -1/3, -1/3; by 2, 3 the same; by all
    three 1/2, -1/2 and nothing. (2 + 3) x 2/3 + 4 x 1/2 = 16/3, over 9; -5/3 - 2 = -11/3, over 9; -1/3.
    """
    step = step_of([trajectory(1.0, 1, 2, 3), trajectory(0.0, 1, 2, 3), trajectory(0.0, 5, 2, 3)])
    made = made_of(step)
    assert [made[2], made[5], made[8]] == pytest.approx([16 / 27, -11 / 27, -1 / 3])


def test_states_of_another_trajectory_are_no_history() -> None:
    """The second trajectory begins in state 2 after the first ended in 1: only state 2 counts, not 1, 2."""
    step = step_of([trajectory(1.0, 1, 2), trajectory(0.0, 1), trajectory(0.0, 2)])
    assert made_of(step) == pytest.approx([1 / 4, 1 / 2, -1 / 4, -1 / 2])
    there = step_of([trajectory(0.0, 1, 2), trajectory(0.0, 1), trajectory(1.0, 2), trajectory(1.0, 2)])
    # State 2 of returns 0, 1 and 1, and no turn but the first has one before it.
    assert made_of(there) == pytest.approx([0.0, -2 / 3, 0.0, 1 / 3, 1 / 3])


def test_groups_are_not_compared_and_a_deviation_divides() -> None:
    apart = step_of([trajectory(1.0, 1, 2, group=0), trajectory(0.0, 1, 2, group=1)])
    assert made_of(apart) == [0.0] * 4
    together = step_of([trajectory(1.0, 1), trajectory(0.0, 1)])
    assert made_of(together, scale="std") == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-5)


def test_a_step_without_tokens_has_no_advantages_of_histories() -> None:
    assert made_of(step_of([trajectory(1.0, 1, tokens=(0,))])) == floats([]).tolist()
