"""Logits over spans of the vocabulary, and the softmax over all of it that builds up from span to span."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of sums over values of `dtype`: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def spans(total: int, size: int) -> list[slice]:
    """0 to `total` in slices of at most `size`."""
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def span_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, span: slice, *, temperature: float) -> Tensor:
    """[t, H] x [V, H] to the logits of the vocabulary span, [t, v], in the accumulation type, over the temperature.

    The result is the caller's to overwrite.
    """
    logits = nn.functional.linear(hidden, weight[span], None if bias is None else bias[span])
    logits = logits.to(accumulation_dtype(hidden.dtype))
    return logits if temperature == 1.0 else logits.div_(temperature)


def span_columns(tokens: Tensor, span: slice) -> tuple[Tensor, Tensor]:
    """The column of each token within the span, 0 where it is outside, and whether it is inside; shaped as `tokens`."""
    column = tokens - span.start
    inside = (column >= 0) & (column < span.stop - span.start)
    return torch.where(inside, column, 0), inside


class RunningSoftmax:
    """Maximum, sum and entropy of the softmax of t rows in one pass over the spans (arXiv 1805.02867)."""

    def __init__(self, hidden: Tensor, *, with_entropy: bool) -> None:
        shape, dtype = (hidden.shape[0], 1), accumulation_dtype(hidden.dtype)
        self._highest = hidden.new_full(shape, -torch.inf, dtype=dtype)
        self._total = hidden.new_zeros(shape, dtype=dtype)
        # Sum of exp(logit - highest) * (logit - highest): with the total it gives the entropy in the same pass.
        self._moment = torch.zeros_like(self._total) if with_entropy else None

    def add(self, logits: Tensor) -> None:
        """Takes in the logits [t, v] of the next span, and overwrites them."""
        raised = torch.maximum(self._highest, logits.amax(dim=1, keepdim=True))
        shift = torch.where(self._highest.isinf(), 0, self._highest - raised)
        scale = torch.where(self._highest.isinf(), 0, shift.exp())
        logits -= raised
        if self._moment is None:
            added = logits.exp_().sum(dim=1, keepdim=True)
        else:
            exponentials = logits.exp()
            added = exponentials.sum(dim=1, keepdim=True)
            # In place: torch's dot product of rows would hold a third tensor of the logits' size.
            moment = logits.mul_(exponentials).sum(dim=1, keepdim=True)
            self._moment = scale * (self._moment + shift * self._total) + moment
        self._total = scale * self._total + added
        self._highest = raised

    def logprobs(self, logits: Tensor) -> Tensor:
        """The logprobs of tokens with these logits, [t, n] to [t, n]."""
        # Both differences are small where the logits are large: subtracting the normalizer itself would lose digits.
        return (logits - self._highest) - self._total.log()

    def normalizer(self) -> Tensor:
        """The log of the sum of exponentials, [t]."""
        return (self._highest + self._total.log())[:, 0]

    def entropy(self) -> Tensor:
        """In nats, [t]; zeros if it was not asked for."""
        if self._moment is None:
            return torch.zeros_like(self._total)[:, 0]
        return (self._total.log() - self._moment / self._total)[:, 0]
