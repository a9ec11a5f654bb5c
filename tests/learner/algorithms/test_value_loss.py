import pytest
import torch
from torch import Tensor

from learner.algorithms.policy_loss import ValueLoss, explained_variance, value_loss
from tests.learner.algorithms.differences import doubles, gradient


def clipped_loss(values: Tensor, returns: Tensor) -> ValueLoss:
    """Around old values of 1, by 0.2."""
    return value_loss(values=values, old_values=torch.ones_like(values), returns=returns, clip=0.2)


def test_the_plain_value_loss_is_half_the_squared_error() -> None:
    loss = value_loss(values=doubles(3, -1), old_values=doubles(0, 0), returns=doubles(1, 1), clip=None)
    assert loss.losses.tolist() == [2, 2]
    assert loss.clipped is None


@pytest.mark.parametrize(
    ("value", "target", "expected", "clipped"),
    [
        (1.1, 2.0, 0.405, False),  # within 0.2 of the old value: 0.9^2/2
        (1.5, 2.0, 0.32, True),  # counted as 1.2, whose error of 0.8 is larger than 0.5
        (0.5, 2.0, 1.125, False),  # counted as 0.8, whose error of 1.2 is smaller than 1.5
        (0.5, 0.0, 0.32, True),  # counted as 0.8
        (3.0, 0.0, 4.5, False),
    ],
)
def test_the_clipped_value_loss_takes_the_larger_error(
    value: float, target: float, expected: float, clipped: bool
) -> None:
    loss = clipped_loss(doubles(value), doubles(target))
    assert loss.losses.tolist() == pytest.approx([expected])
    assert loss.clipped is not None
    assert loss.clipped.tolist() == [clipped]
    slope = gradient(lambda v: clipped_loss(v, doubles(target)).losses.sum(), doubles(value))
    assert slope.tolist() == pytest.approx([0.0 if clipped else value - target])


def test_the_value_loss_has_the_gradient_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    values = (1 + torch.randn(30, generator=generator, dtype=torch.float64)).requires_grad_()
    returns = torch.randn(30, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda v: clipped_loss(v, returns).losses, (values,))


def test_explained_variance_is_1_for_a_perfect_critic_and_0_for_a_constant_one() -> None:
    returns = doubles(0, 1, 2, 3)
    assert explained_variance(values=returns, returns=returns) == pytest.approx(1)
    assert explained_variance(values=torch.full_like(returns, 7), returns=returns) == pytest.approx(0)
    # Residuals 0, 0, 0, 2: variance 0.75 of 1.25.
    assert explained_variance(values=doubles(0, 1, 2, 1), returns=returns) == pytest.approx(1 - 0.75 / 1.25)
    # The opposite of the returns: residuals 2R, four times the variance.
    assert explained_variance(values=-returns, returns=returns) == pytest.approx(-3)


def test_explained_variance_is_absent_where_returns_do_not_vary() -> None:
    assert explained_variance(values=doubles(1, 2), returns=doubles(0.1, 0.1)) is None
    assert explained_variance(values=doubles(1), returns=doubles(0.1)) is None
    assert explained_variance(values=doubles(), returns=doubles()) is None
