"""Settings of evaluations, and those that do not go together."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from learner.evaluation.config import EvaluationConfig


def test_the_ks_are_powers_of_two_and_the_number_of_samples_unless_they_are_named() -> None:
    assert EvaluationConfig().ks == (1,)
    assert EvaluationConfig(samples=8).ks == (1, 2, 4, 8)
    assert EvaluationConfig(samples=6).ks == (1, 2, 4, 6)
    assert EvaluationConfig(samples=6, k=(5, 1)).ks == (1, 5)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"samples": 2, "k": (4,)}, "k holds 4 and samples is 2"),
        ({"samples": 2, "temperature": 0.0}, "greedy samples are all the same"),
        ({"checkpoint": Path("c")}, "checkpoint needs an evaluation by itself, and only is false"),
        ({"against": Path("c")}, "against needs an evaluation by itself"),
        ({"only": True, "judge": {"verifier": "pairs"}}, "judge.verifier is set and against is not"),
        ({"only": True, "against": Path("c.jsonl")}, "c.jsonl, which has no rewards: set judge.verifier"),
        ({"only": True, "final_tasks": 0}, "nothing would be evaluated"),
        ({"k": (0,)}, "greater than or equal to 1"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        EvaluationConfig.model_validate(settings)
