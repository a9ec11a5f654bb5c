"""Numbers that user code gives: whichever library they are of."""

import math

import numpy as np
import pytest
import torch

from env_service.agents.results import checked_result
from env_service.environments.interface import Step
from env_service.hosting.messages import step_reply
from reward_service.verifier.submission import Score, UserError, to_score
from services.user_code import number_of

NUMBERS = [
    0.5,
    np.float32(0.5),
    np.float64(0.5),
    np.array(0.5),
    np.array(0.5, dtype=np.float16),
    torch.tensor(0.5),
    torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True),
]


@pytest.mark.parametrize("given", NUMBERS, ids=repr)
def test_a_number_of_any_library_is_a_reward(given: float) -> None:
    assert to_score(given) == Score(reward=0.5)
    assert to_score(Score(reward=given, components={"part": given})) == Score(reward=0.5, components={"part": 0.5})
    assert checked_result(given).reward == 0.5
    step = step_reply(Step(reward=given, stop="done", metrics={"part": given})).step
    assert step is not None
    assert (step.reward, step.metrics) == (0.5, {"part": 0.5})


@pytest.mark.parametrize("given", [True, np.bool_(True), np.array(True), torch.tensor(True)], ids=repr)
def test_a_bool_is_one_or_nothing(given: bool) -> None:
    assert to_score(given) == Score(reward=1.0)


@pytest.mark.parametrize("given", ["1", None, 1j, np.complex64(1j), np.array([0.5]), torch.tensor([0.5, 1]), [0.5]])
def test_what_is_no_number_is_refused(given: object) -> None:
    with pytest.raises(UserError, match="expected a number or a Score"):
        to_score(given)


def test_a_number_too_large_for_a_float_is_infinite() -> None:
    assert (number_of(10**400), number_of(-(10**400))) == (math.inf, -math.inf)
