"""An evaluation's numbers from its samples, worked by hand."""

import dataclasses

import pytest

from learner.evaluation.results import EvaluationResult, Sample, TaskSamples, result_of


def task(index: int, *rewards: float, answers: str = "", length: int = 2, truncated: bool = False) -> TaskSamples:
    """A task with a sample for each reward; `answers` are letters, x for no answer."""
    letters = answers or "a" * len(rewards)
    return TaskSamples(
        task_index=index,
        prompt="which letter?",
        samples=tuple(
            Sample(
                completion=letter,
                reward=reward,
                answer=None if letter == "x" else letter,
                length=length,
                truncated=truncated,
            )
            for reward, letter in zip(rewards, letters, strict=True)
        ),
    )


def result(*tasks: TaskSamples, ks: tuple[int, ...] = (1, 2, 4)) -> EvaluationResult:
    return result_of(tasks, version=7, failed=1, sampled_by=(6, 7), success=1.0, ks=ks)


def test_an_evaluation_by_hand() -> None:
    found = result(
        task(0, 1.0, 0.0, 0.0, 0.0, answers="abbc", length=3),
        task(1, 1.0, 1.0, 0.5, 0.0, answers="aabx", length=5, truncated=True),
    )
    assert (found.version, found.tasks, found.failed, found.samples) == (7, 2, 1, 8)
    assert (found.oldest_version, found.newest_version) == (6, 7)
    assert found.accuracy == pytest.approx((1 / 4 + 2 / 4) / 2)
    assert found.reward == pytest.approx((1 / 4 + 2.5 / 4) / 2)
    assert (found.length_mean, found.truncated_share) == (4.0, 0.5)
    # pass@2: 1 − C(3,2)/C(4,2) = 1/2 and 1 − C(2,2)/C(4,2) = 5/6.
    assert found.pass_at_k == pytest.approx({1: 3 / 8, 2: (1 / 2 + 5 / 6) / 2, 4: 1.0})
    # cons@2: (a b → ½, b c → 0) and (a a → 1, b alone → 0); cons@4: b wins and is wrong, a wins and is right.
    assert found.cons_at_k == pytest.approx({1: 3 / 8, 2: (0.25 + 0.5) / 2, 4: 0.5})
    assert found.accuracy_low < found.accuracy < found.accuracy_high


def test_tasks_are_the_units_of_the_interval_and_not_samples() -> None:
    one = result(task(0, 1.0), task(1, 0.0))
    many = result(task(0, *[1.0] * 50), task(1, *[0.0] * 50))
    assert (one.accuracy_low, one.accuracy_high) == (many.accuracy_low, many.accuracy_high)


def test_a_task_with_fewer_samples_than_k_is_left_out_there() -> None:
    found = result(task(0, 1.0, 0.0), task(1, 0.0), ks=(1, 2, 4))
    assert found.pass_at_k == pytest.approx({1: 0.25, 2: 1.0})
    assert found.cons_at_k.keys() == {1, 2}


def test_an_evaluation_of_nothing_has_no_numbers() -> None:
    found = result()
    assert (found.tasks, found.accuracy, found.reward, found.samples) == (0, 0.0, 0.0, 0)
    assert (found.accuracy_low, found.accuracy_high) == (0.0, 1.0)
    assert (found.pass_at_k, found.cons_at_k) == ({}, {})


def test_accuracy_is_told_by_verifier() -> None:
    found = result(
        dataclasses.replace(task(0, 1.0, 0.0), verifier="math"),
        dataclasses.replace(task(1, 1.0, 1.0), verifier="math"),
        dataclasses.replace(task(2, 0.0), verifier="code"),
    )
    assert found.accuracy_by_verifier == {"code": 0.0, "math": 0.75}
