"""AdamW of an adapter against torch's own, and steps that are refused."""

import math

import pytest
import torch
from torch import Tensor

from learner.training.adapter_optimizer import AdamMoments, take_step
from learner.training.client_operations import AdamStep, OperationError

SHAPES = ((4, 8), (8, 4), (3,))


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"p{number}": torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()
        for number, shape in enumerate(SHAPES)
    }


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


def set_gradients(values: dict[str, Tensor], number: int) -> None:
    """Every seventh step has none, and some have none for a parameter."""
    generator = torch.Generator().manual_seed(100 + number)
    for place, value in enumerate(values.values()):
        drawn = torch.randn(value.shape, generator=generator).to(value.dtype)
        absent = number % 7 == 3 or (number % 5 == place)
        value.grad = None if absent else drawn


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_fifty_steps_are_those_of_torch(dtype: torch.dtype, tolerance: float) -> None:
    ours, theirs, moments = parameters(dtype), parameters(dtype), AdamMoments()
    optimizer = torch.optim.AdamW(list(theirs.values()), lr=0.0, foreach=False)
    for number in range(50):
        step = step_of(number)
        set_gradients(ours, number)
        set_gradients(theirs, number)
        for value in theirs.values():
            value.grad = torch.zeros_like(value) if value.grad is None else value.grad
        norm = torch.nn.utils.clip_grad_norm_(list(theirs.values()), step.grad_clip_norm or math.inf)
        for group in optimizer.param_groups:
            group.update(lr=step.learning_rate, betas=(step.beta1, step.beta2), eps=step.eps)
            group.update(weight_decay=step.weight_decay)
        optimizer.step()
        assert take_step(ours, moments, step) == pytest.approx(float(norm), rel=1e-6)
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], rtol=tolerance, atol=tolerance)
            assert value.grad is None
    assert moments.steps == 50


def test_a_step_without_gradients_counts_and_moves_by_the_moments() -> None:
    values, moments = parameters(), AdamMoments()
    set_gradients(values, 1)
    take_step(values, moments, AdamStep("a"))
    before = {name: value.detach().clone() for name, value in values.items()}
    assert take_step(values, moments, AdamStep("a")) == 0.0
    assert moments.steps == 2
    assert any(not torch.equal(before[name], value.detach()) for name, value in values.items())


def unchanged(values: dict[str, Tensor], moments: AdamMoments, step: AdamStep, *, match: str) -> None:
    before = {name: value.detach().clone() for name, value in values.items()}
    kept = {name: value.clone() for name, value in moments.means.items()}
    with pytest.raises(OperationError, match=match):
        take_step(values, moments, step)
    assert all(torch.equal(before[name], value.detach()) for name, value in values.items())
    assert all(torch.equal(kept[name], value) for name, value in moments.means.items())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradients_that_are_not_finite_are_dropped_and_nothing_moves(bad: float) -> None:
    values, moments = parameters(), AdamMoments()
    set_gradients(values, 1)
    take_step(values, moments, AdamStep("a"))
    values["p1"].grad = torch.full((8, 4), bad)
    unchanged(values, moments, AdamStep("a"), match="the accumulated gradients are not finite")
    assert moments.steps == 1
    assert all(value.grad is None for value in values.values())


def test_a_step_that_leaves_the_numbers_is_refused_and_can_be_taken_again() -> None:
    values, moments = parameters(), AdamMoments()
    set_gradients(values, 1)
    far = AdamStep("a", learning_rate=1e30, weight_decay=1e30)
    unchanged(values, moments, far, match="with learning_rate 1e\\+30 and eps 1e-12. Nothing was changed")
    assert moments.steps == 0
    assert values["p0"].grad is not None
    assert take_step(values, moments, AdamStep("a")) > 0
