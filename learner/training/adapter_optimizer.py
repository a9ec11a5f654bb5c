"""AdamW of one adapter, whose every parameter is the client's and may change from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from learner.training.client_operations import AdamStep, OperationError

# As torch.nn.utils.clip_grad_norm_ has it.
_CLIP_EPSILON = 1e-6


@dataclass
class AdamMoments:
    """The state of AdamW: how many steps it has made, and by the names of parameters the means of gradients and of
    their squares, none before the first step.
    """

    steps: int = 0
    means: dict[str, Tensor] = field(default_factory=dict)
    squares: dict[str, Tensor] = field(default_factory=dict)


def take_step(parameters: Mapping[str, Tensor], moments: AdamMoments, step: AdamStep) -> float:
    """Moves the parameters by the gradients in their `.grad`, 0 where there are none, and clears these; returns the
    gradients' global L2 norm, before it was bounded.

    It is torch's AdamW: decoupled decay, corrected for bias, eps outside of the root. A step without gradients is one
    with zeros, and counts. Raises OperationError, and changes nothing, if something would not be finite; gradients that
    are not finite themselves are dropped.
    """
    gradients = [
        torch.zeros_like(value) if value.grad is None else value.grad.detach() for value in parameters.values()
    ]
    norm = torch.stack([torch.linalg.vector_norm(each, dtype=torch.float64) for each in gradients]).norm()
    if not bool(norm.isfinite()):
        clear_gradients(parameters)
        raise OperationError(
            "the accumulated gradients are not finite: expected finite numbers. They were dropped; the weights are as "
            "they were. Weigh the data less, and send them again."
        )
    if step.grad_clip_norm > 0:
        factor = (step.grad_clip_norm / (norm + _CLIP_EPSILON)).clamp(max=1.0)
        gradients = [each * factor.to(each.dtype) for each in gradients]
    values = [each.detach().clone() for each in parameters.values()]
    means = [_known(moments.means, name, value) for name, value in parameters.items()]
    squares = [_known(moments.squares, name, value) for name, value in parameters.items()]
    counts = [torch.tensor(float(moments.steps)) for _ in values]
    with torch.no_grad():
        adamw(
            values,
            gradients,
            means,
            squares,
            [],
            counts,
            foreach=values[0].device.type != "cpu",
            amsgrad=False,
            beta1=step.beta1,
            beta2=step.beta2,
            lr=step.learning_rate,
            weight_decay=step.weight_decay,
            eps=step.eps,
            maximize=False,
        )
    if not all(bool(each.isfinite().all()) for each in (*values, *means, *squares)):
        raise OperationError(
            f"the step would make weights or moments that are not finite, with learning_rate {step.learning_rate:g} "
            f"and eps {step.eps:g}. Nothing was changed: step again with a smaller learning_rate or a larger eps."
        )
    with torch.no_grad():
        for parameter, value in zip(parameters.values(), values, strict=True):
            parameter.copy_(value)
    moments.steps += 1
    moments.means = dict(zip(parameters, means, strict=True))
    moments.squares = dict(zip(parameters, squares, strict=True))
    clear_gradients(parameters)
    return float(norm)


def clear_gradients(parameters: Mapping[str, Tensor]) -> None:
    """Begins a new sum of gradients."""
    for parameter in parameters.values():
        parameter.grad = None


def _known(moments: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    return moments[name].clone() if name in moments else torch.zeros_like(like, requires_grad=False)
