"""Gradients two ways: by autograd, and by central differences in float64."""

from collections.abc import Callable

import torch
from torch import Tensor

Scalar = Callable[[Tensor], Tensor]


def gradient(function: Scalar, at: Tensor) -> Tensor:
    """The gradient that autograd finds for `function`, which maps [N] to a scalar."""
    leaf = at.detach().clone().requires_grad_()
    found: Tensor = torch.autograd.grad(function(leaf), leaf)[0]
    return found


def central_differences(function: Scalar, at: Tensor, step: float = 1e-6) -> Tensor:
    """(f(x + step) - f(x - step))/(2 step) along each axis of `at` [N]."""
    axes = torch.eye(len(at), dtype=at.dtype) * step
    return torch.stack([(function(at + axis) - function(at - axis)) / (2 * step) for axis in axes])


def logs(*probabilities: float) -> Tensor:
    """Logs of `probabilities`, float64."""
    return torch.tensor(probabilities, dtype=torch.float64).log()


def doubles(*values: float) -> Tensor:
    """`values` as float64."""
    return torch.tensor(values, dtype=torch.float64)
