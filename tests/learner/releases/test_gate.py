"""The gate: hand-worked numbers, and that noise, a regression and a reward hack do not come through."""

import math
import random
import statistics

import pytest

from learner.releases.config import ReleaseConfig
from learner.releases.gate import judge_canary, judge_evaluation


def test_the_difference_is_taken_task_by_task() -> None:
    """d is 1 of 10 times 1 and else 0: mean 0.1, variance (0.81 + 9·0.01)/9 = 0.1, error √(0.1/10) = 0.1."""
    released = {task: float(task % 2) for task in range(10)}
    candidate = {**released, 0: 1.0}
    found = judge_evaluation(candidate, released, standard_errors=1.0)
    assert found.gain == pytest.approx(0.1)
    assert found.error == pytest.approx(0.1)
    assert found.passes
    assert not judge_evaluation(candidate, released, standard_errors=1.1).passes


def test_without_common_tasks_the_errors_of_both_add_up() -> None:
    ours = {task: float(task % 2) for task in range(20)}
    theirs = {100 + task: float(task % 4 == 0) for task in range(40)}
    found = judge_evaluation(ours, theirs, standard_errors=2.0)
    of_each = [statistics.variance(list(one.values())) / len(one) for one in (ours, theirs)]
    assert found.gain == pytest.approx(0.25)
    assert found.error == pytest.approx(math.sqrt(sum(of_each)))
    assert "20 tasks of one and 40 others" in found.text


def test_the_same_scores_do_not_pass() -> None:
    scores = dict.fromkeys(range(50), 0.5)
    assert not judge_evaluation(scores, scores, standard_errors=1e-9).passes


@pytest.mark.parametrize(
    ("candidate", "said"),
    [({0: math.nan, **dict.fromkeys(range(1, 20), 1.0)}, "task 0 has a score that is no number"),
     ({0: 1.0, 1: 1.0}, "too few tasks to compare: 2 of the candidate and 20 of the released version")],
)  # fmt: skip
def test_what_cannot_be_compared_does_not_pass(candidate: dict[int, float], said: str) -> None:
    found = judge_evaluation(candidate, dict.fromkeys(range(20), 0.0), standard_errors=2.0)
    assert not found.passes
    assert said in found.text


def _evaluated(share: float, *, tasks: int, draw: random.Random) -> dict[int, float]:
    """Each task has a difficulty of its own, which both versions meet."""
    return {task: float(draw.random() < min(1.0, 2 * share * (task + 0.5) / tasks)) for task in range(tasks)}


def test_a_regression_is_not_released_and_a_large_gain_is() -> None:
    draw = random.Random(7)
    worse = better = 0
    for _ in range(200):
        released = _evaluated(0.40, tasks=200, draw=draw)
        worse += judge_evaluation(_evaluated(0.30, tasks=200, draw=draw), released, standard_errors=2.0).passes
        better += judge_evaluation(_evaluated(0.60, tasks=200, draw=draw), released, standard_errors=2.0).passes
    assert worse == 0
    assert better > 180


def test_users_are_asked_until_both_have_enough_and_then_once() -> None:
    waits = judge_canary([1.0] * 9, [1.0] * 50, wanted=10, margin=0.1, standard_errors=2.0)
    assert (waits.state, waits.text[:25]) == ("waits", "9 of 10 rewards of users ")
    passes = judge_canary([1.0] * 10 + [-9.0] * 90, [1.0] * 50, wanted=10, margin=0.1, standard_errors=2.0)
    assert passes.state == "passes", "what comes later does not count"


def test_a_candidate_whose_users_are_worse_off_falls_though_its_evaluation_was_better() -> None:
    draw = random.Random(3)
    hacked = fine = 0
    for _ in range(200):
        liked = [float(draw.random() < 0.7) for _ in range(400)]
        hack = [float(draw.random() < 0.5) for _ in range(400)]
        same = [float(draw.random() < 0.75) for _ in range(400)]
        hacked += judge_canary(hack, liked, wanted=400, margin=0.1, standard_errors=2.0).state == "passes"
        fine += judge_canary(same, liked, wanted=400, margin=0.1, standard_errors=2.0).state == "passes"
    assert hacked == 0
    assert fine > 180


def test_a_single_reward_which_has_no_error_is_refused_as_a_trial() -> None:
    with pytest.raises(ValueError, match="canary_rewards is 1: a single reward has no standard error"):
        ReleaseConfig(enabled=True, canary_rewards=1)
    two = judge_canary([1.0] * 2, [1.0] * 2, wanted=2, margin=0.1, standard_errors=2.0)
    assert two.state == "passes"
