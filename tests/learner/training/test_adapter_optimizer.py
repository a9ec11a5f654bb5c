"""AdamW of an adapter against torch's own, and steps that are refused."""

import math

import pytest
import torch
from torch import Tensor

from learner.training.adapter_optimizer import AdamState
from learner.training.client_operations import AdamStep, OperationError

NUMBERS = 40


def values(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(NUMBERS, generator=torch.Generator().manual_seed(0), dtype=dtype)


def step_of(number: int) -> AdamStep:
    """Every parameter changes from step to step."""
    return AdamStep(
        "a",
        learning_rate=1e-2 / (1 + number % 5),
        beta1=0.9 - 0.01 * (number % 7),
        beta2=0.95 + 0.001 * (number % 11),
        eps=10.0 ** -(12 - number % 6),
        weight_decay=0.1 * (number % 3),
        grad_clip_norm=0.5 * (number % 4),
    )


def gradient_of(number: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(NUMBERS, generator=torch.Generator().manual_seed(100 + number)).to(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_fifty_steps_are_those_of_torch(dtype: torch.dtype, tolerance: float) -> None:
    """Some are without a gradient, some have the sum of two."""
    ours = AdamState(values(dtype))
    theirs = values(dtype).requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=0.0, foreach=False)
    for number in range(50):
        step, parts = step_of(number), range(number, number + (number % 3))
        theirs.grad = torch.zeros_like(theirs)
        for part in parts:
            ours.add(gradient_of(part, dtype))
            theirs.grad += gradient_of(part, dtype)
        norm = torch.nn.utils.clip_grad_norm_([theirs], step.grad_clip_norm or math.inf)
        for group in optimizer.param_groups:
            group.update(lr=step.learning_rate, betas=(step.beta1, step.beta2), eps=step.eps)
            group.update(weight_decay=step.weight_decay)
        optimizer.step()
        assert ours.take(step) == pytest.approx(float(norm), rel=1e-6)
        torch.testing.assert_close(ours.values, theirs.detach(), rtol=tolerance, atol=tolerance)
        assert ours.gradient is None
    assert ours.steps == 50


def test_a_step_without_gradients_counts_and_moves_by_the_moments() -> None:
    state = AdamState(values())
    state.add(gradient_of(1))
    state.take(AdamStep("a"))
    before = state.values.clone()
    assert state.take(AdamStep("a")) == 0.0
    assert state.steps == 2
    assert not torch.equal(before, state.values)


def unchanged(state: AdamState, step: AdamStep, *, match: str) -> None:
    known = [None if each is None else each.clone() for each in (state.values, state.mean, state.square)]
    steps = state.steps
    with pytest.raises(OperationError, match=match):
        state.take(step)
    for before, after in zip(known, (state.values, state.mean, state.square), strict=True):
        assert (before is None and after is None) or torch.equal(before, after)  # type: ignore[arg-type]
    assert state.steps == steps


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradients_that_are_not_finite_are_dropped_and_nothing_moves(bad: float) -> None:
    state = AdamState(values())
    state.add(gradient_of(1))
    state.take(AdamStep("a"))
    state.add(torch.full((NUMBERS,), bad))
    unchanged(state, AdamStep("a"), match="the accumulated gradients are not finite")
    assert state.gradient is None


@pytest.mark.parametrize(
    "far",
    [
        AdamStep("a", learning_rate=1e30, weight_decay=1e30),
        AdamStep("a", learning_rate=1e300),
        AdamStep("a", learning_rate=1e30, beta1=1 - 1e-16),
    ],
    ids=["of the weights", "of the rate", "of the rate without its bias"],
)
def test_a_step_that_leaves_the_numbers_is_refused_and_can_be_taken_again(far: AdamStep) -> None:
    state = AdamState(values())
    state.add(gradient_of(1))
    unchanged(state, far, match="with learning_rate 1e\\+300? and eps 1e-12. Nothing was changed")
    assert state.take(AdamStep("a")) > 0
