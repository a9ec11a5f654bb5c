"""The scripted policy of the benchmark of drawn tasks."""

import numpy as np
import pytest

from benchmarks.task_draws import Population, ScriptedPolicy, gradient_of, run


def test_a_group_moves_the_policy_by_its_spread() -> None:
    """Of rewards 1, 0, 0, 0 the deviation is √3/4: A is √3 and −1/√3, and the mean of A r is √3/4."""
    assert gradient_of(np.array([1.0, 0.0, 0.0, 0.0])) == pytest.approx(3**0.5 / 4)
    assert gradient_of(np.ones(4)) == gradient_of(np.zeros(4)) == 0.0
    policy = ScriptedPolicy(np.array([0.0, 1.0]))
    assert policy.pass_rate(0) == 0.5
    policy.train([(0, np.array([1.0, 0.0])), (1, np.zeros(2))])
    assert policy.skill == pytest.approx(0.1 * 0.5 / 2)
    assert policy.pass_rate(0) == pytest.approx(1 / (1 + np.exp(-(0.025 + 0.25))))


def test_drawn_tasks_have_more_spread_where_most_have_none() -> None:
    tasks = Population("mostly hopeless", 200, mean=2.0, deviation=1.0, target=0.045, hopeless=0.8)
    order, signal = (run(tasks, drawn=drawn, steps=40, seed=0) for drawn in (False, True))
    assert order.spread < 0.25
    assert signal.spread > 0.35
    assert signal.effective < order.effective
    assert (order.groups, signal.groups is not None) == (None, True)
