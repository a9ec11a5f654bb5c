"""AdamW of one adapter, whose every parameter is the client's and may change from step to step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from learner.training.client_operations import AdamStep, OperationError

# As torch.nn.utils.clip_grad_norm_ has it.
_CLIP_EPSILON = 1e-6
_LARGEST = float(torch.finfo(torch.float32).max)


@dataclass
class AdamState:
    """All that a step works on: `values`, the numbers of an adapter, and, as long as they are, `gradient`, their sum
    since the last step, and `mean` and `square`, the moments of AdamW after `steps` steps. None stands for zeros.
    """

    values: Tensor
    gradient: Tensor | None = None
    mean: Tensor | None = None
    square: Tensor | None = None
    steps: int = 0

    def add(self, gradient: Tensor) -> None:
        """Adds to the sum of gradients, and keeps `gradient` if it is the first."""
        self.gradient = gradient if self.gradient is None else self.gradient.add_(gradient)

    def take(self, step: AdamStep) -> float:
        """Moves the values by the gradient, and begins a new sum; returns the gradient's L2 norm before it is bounded.

        It is torch's AdamW: decoupled decay, corrected for bias, eps outside of the root. A step without gradients is
        one with zeros, and counts. Raises OperationError, and changes nothing, if something would not be finite; a sum
        of gradients that is not finite itself is dropped.
        """
        gradient = torch.zeros_like(self.values) if self.gradient is None else self.gradient
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
        if not bool(norm.isfinite()):
            self.gradient = None
            raise OperationError(
                "the accumulated gradients are not finite: expected finite numbers. They were dropped; the weights are "
                "as they were. Weigh the data less, and send them again."
            )
        if step.grad_clip_norm > 0:
            factor = (step.grad_clip_norm / (norm + _CLIP_EPSILON)).clamp(max=1.0)
            gradient = gradient * factor.to(gradient.dtype)
        if step.learning_rate / (1 - step.beta1 ** (self.steps + 1)) > _LARGEST:
            raise _beyond(step)
        values, mean, square = self._moved(gradient, step)
        if not all(bool(each.isfinite().all()) for each in (values, mean, square)):
            raise _beyond(step)
        self.values.copy_(values)
        self.gradient, self.mean, self.square, self.steps = None, mean, square, self.steps + 1
        return float(norm)

    def _moved(self, gradient: Tensor, step: AdamStep) -> tuple[Tensor, Tensor, Tensor]:
        """Values and moments after the step, new tensors."""
        values, mean, square = (
            torch.zeros_like(self.values) if known is None else known.clone()
            for known in (self.values, self.mean, self.square)
        )
        adamw(
            [values],
            [gradient],
            [mean],
            [square],
            [],
            [torch.tensor(float(self.steps))],
            foreach=False,
            amsgrad=False,
            beta1=step.beta1,
            beta2=step.beta2,
            lr=step.learning_rate,
            weight_decay=step.weight_decay,
            eps=step.eps,
            maximize=False,
        )
        return values, mean, square


def _beyond(step: AdamStep) -> OperationError:
    return OperationError(
        f"the step would make weights or moments that are not finite, with learning_rate {step.learning_rate:g} and "
        f"eps {step.eps:g}. Nothing was changed: step again with a smaller learning_rate or a larger eps."
    )
