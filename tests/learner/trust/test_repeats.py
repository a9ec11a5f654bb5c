"""Repeats: a bet that is fair for any policy, and rich where something improbable comes twice."""

import math

import numpy as np
import pytest

from learner.trust.repeats import RepeatMemory
from learner.trust.tokens import WholeText


def text(whole: int, *, probability: float = 1e-9, prompt: int = 0) -> WholeText:
    """A trajectory of process 0."""
    return WholeText(process=0, prompt=prompt, whole=whole, logprob=math.log(probability))


def test_the_first_of_a_prompt_is_no_bet() -> None:
    memory = RepeatMemory()

    assert memory.bet(text(1, prompt=1)) == 0.0
    assert memory.bet(text(1, prompt=2)) == 0.0


@pytest.mark.parametrize("probabilities", [(0.98, 0.02), (1e-6, 1e-3, 1 - 1e-3 - 1e-6), (1e-9, 1e-9, 1 - 2e-9)])
def test_the_bet_is_worth_at_most_one_whatever_the_policy(probabilities: tuple[float, ...]) -> None:
    """All completions but the last have come before; each next one is looked at, by its probability."""
    value = 0.0
    for whole, probability in enumerate(probabilities):
        memory = RepeatMemory()
        for former in range(len(probabilities) - 1):
            memory.bet(text(former, probability=probabilities[former]))
        value += probability * math.exp(memory.bet(text(whole, probability=probability)))

    assert value <= 1.0


def test_groups_that_are_chosen_by_what_is_rare_in_them_do_not_pay_either() -> None:
    """A repeat that comes a hundred times as often as the policy samples it, as the bet allows for."""
    memory = RepeatMemory()
    memory.bet(text(1, probability=1e-4))

    won, lost = memory.bet(text(1, probability=1e-4)), memory.bet(text(2, probability=1e-4))

    assert 1e-2 * math.exp(won) + (1 - 1e-2) * math.exp(lost) <= 1.0


def test_an_answer_that_the_policy_is_sure_of_may_come_again_and_again() -> None:
    memory = RepeatMemory()

    assert all(memory.bet(text(1, probability=0.5)) <= 0 for _ in range(100))


def test_three_improbable_repeats_are_sure_and_one_is_not() -> None:
    memory = RepeatMemory()
    memory.bet(text(1))

    grown = np.cumsum([memory.bet(text(1)) for _ in range(3)])

    assert grown[0] < 8
    assert grown[2] > 18


def test_the_memory_forgets_the_prompts_that_were_seen_longest_ago() -> None:
    memory = RepeatMemory(most=4)
    memory.bet(text(1, prompt=0))
    for prompt in range(1, 5):
        memory.bet(text(1, prompt=prompt))

    assert memory.bet(text(1, prompt=0)) == 0.0
    assert memory.bet(text(1, prompt=4)) > 0
