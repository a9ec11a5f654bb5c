"""Answers of completions, as they count when samples vote."""

import pytest

from learner.evaluation.results import answer_of


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("085", "085"),
        ("  two \n words ", "two words"),
        ("", None),
        (" \n", None),
        (r"so it is \boxed{12}", "12"),
        (r"first \boxed{1}, no: \boxed{ 2 }.", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"cut off in \boxed{1", r"cut off in \boxed{1"),
        ("<answer>4</answer> and <answer> 5\n6 </answer>", "5 6"),
        (r"\boxed{1} <answer>it is \boxed{2}</answer>", "2"),
        (r"<think>\boxed{1} <answer>2</answer></think> 3", "3"),
        ("thinking</think>4", "4"),
    ],
)
def test_the_answer_of_a_completion(completion: str, answer: str | None) -> None:
    assert answer_of(completion, components={}) == answer


def test_where_the_verifier_found_no_answer_there_is_none() -> None:
    assert answer_of("5", components={"parsed": 0.0}) is None
    assert answer_of("5", components={"extracted": 0.0}) is None
    assert answer_of("5", components={"parsed": 1.0, "format": 0.0}) == "5"


def test_boxes_that_never_close_take_no_quadratic_time() -> None:
    assert answer_of(r"\boxed{" * 100_000, components={}) is not None
