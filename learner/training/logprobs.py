"""Log-probabilities of chosen tokens from hidden states, never holding the logits of all tokens.

Logits are computed for a chunk of tokens by a chunk of the vocabulary, reduced in float32 (float64 for float64 inputs)
by a running log-sum-exp (Milakov and Gimelshein, arXiv 1805.02867), and computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Chunking:
    """At most `tokens` x `vocabulary` logits are held at once."""

    tokens: int = 1024
    vocabulary: int = 65536


@dataclass(frozen=True)
class TokenLogprobs:
    """`logprobs` [T] in nats; `entropy` [T] in nats, without gradient, if asked for."""

    logprobs: Tensor
    entropy: Tensor | None


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _spans(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, span: slice, temperature: float) -> Tensor:
    """[t, H] x [V, H] to the logits of the vocabulary span, [t, v], in the accumulation type, over the temperature."""
    logits = nn.functional.linear(hidden, weight[span], None if bias is None else bias[span])
    logits = logits.to(_accumulation_dtype(hidden.dtype))
    return logits if temperature == 1.0 else logits.div_(temperature)


def _target_column(target: Tensor, span: slice) -> tuple[Tensor, Tensor]:
    """The column of each target within the span, 0 where it is outside, and whether it is inside. Both [t, 1]."""
    column = target - span.start
    inside = (column >= 0) & (column < span.stop - span.start)
    return torch.where(inside, column, 0)[:, None], inside[:, None]


def _forward_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    temperature: float,
    vocabulary: int,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprob, log-sum-exp and entropy (zeros if not wanted) of each of t rows, each [t]."""
    dtype = _accumulation_dtype(hidden.dtype)
    highest = hidden.new_full((hidden.shape[0], 1), -torch.inf, dtype=dtype)
    total = hidden.new_zeros((hidden.shape[0], 1), dtype=dtype)
    # Sum of exp(logit - highest) * (logit - highest): with the total it gives the entropy in the same pass.
    moment = torch.zeros_like(total)
    chosen = torch.zeros_like(total)
    for span in _spans(weight.shape[0], vocabulary):
        logits = _logits(hidden, weight, bias, span, temperature)
        column, inside = _target_column(target, span)
        chosen += torch.where(inside, logits.gather(1, column), 0)
        raised = torch.maximum(highest, logits.amax(dim=1, keepdim=True))
        shift = torch.where(highest.isinf(), 0, highest - raised)
        scale = torch.where(highest.isinf(), 0, shift.exp())
        logits -= raised
        if with_entropy:
            exponentials = logits.exp()
            moment = scale * (moment + shift * total) + torch.linalg.vecdot(exponentials, logits)[:, None]
        else:
            exponentials = logits.exp_()
        total = scale * total + exponentials.sum(dim=1, keepdim=True)
        highest = raised
    # Both differences are small where the logits are large: subtracting the normalizer itself would lose digits.
    logprob = (chosen - highest) - total.log()
    entropy = total.log() - moment / total if with_entropy else moment
    return logprob[:, 0], (highest + total.log())[:, 0], entropy[:, 0]


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        temperature: float,
        chunking: Chunking,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        rows = [
            _forward_rows(
                hidden[span],
                weight,
                bias,
                target[span],
                temperature=temperature,
                vocabulary=chunking.vocabulary,
                with_entropy=with_entropy,
            )
            for span in _spans(hidden.shape[0], chunking.tokens)
        ]
        empty = hidden.new_zeros(0, dtype=_accumulation_dtype(hidden.dtype))
        logprobs, normalizer, entropy = (
            (torch.cat(parts) for parts in zip(*rows, strict=True)) if rows else (empty,) * 3
        )
        ctx.save_for_backward(hidden, weight, bias, target, normalizer)  # type: ignore[arg-type]
        ctx.temperature, ctx.chunking = temperature, chunking  # type: ignore[attr-defined]
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight, bias, target, normalizer = ctx.saved_tensors  # type: ignore[attr-defined]
        temperature: float = ctx.temperature  # type: ignore[attr-defined]
        chunking: Chunking = ctx.chunking  # type: ignore[attr-defined]
        sums = _GradientSums(hidden, weight, bias)
        for rows in _spans(hidden.shape[0], chunking.tokens):
            # d logprob / d logit is onehot - softmax; the temperature divides both.
            scale = (grads[0][rows] / temperature)[:, None]
            for span in _spans(weight.shape[0], chunking.vocabulary):
                logits = _logits(hidden[rows], weight, bias, span, temperature)
                logits -= normalizer[rows][:, None]
                slope = logits.exp_().mul_(-scale)
                column, inside = _target_column(target[rows], span)
                slope.scatter_add_(1, column, torch.where(inside, scale, 0))
                sums.add(slope.to(hidden.dtype), rows=rows, span=span)
        return *sums.results(), None, None, None, None


class _GradientSums:
    """Gradients of hidden [T, H], weight [V, H] and bias [V], summed over chunks in the accumulation type."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        dtype = _accumulation_dtype(hidden.dtype)
        self._hidden, self._weight, self._bias = hidden, weight, bias
        self._to_hidden = torch.zeros_like(hidden, dtype=dtype)
        self._to_weight = torch.zeros_like(weight, dtype=dtype) if weight.requires_grad else None
        self._to_bias = None if bias is None else torch.zeros_like(bias, dtype=dtype)

    def add(self, slope: Tensor, *, rows: slice, span: slice) -> None:
        """Adds the part of the chunk whose gradient with respect to its logits is `slope` [t, v]."""
        self._to_hidden[rows] += slope @ self._weight[span]
        if self._to_weight is not None:
            self._to_weight[span] += slope.T @ self._hidden[rows]
        if self._to_bias is not None:
            self._to_bias[span] += slope.sum(dim=0)

    def results(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The three gradients in the types of their tensors."""
        return (
            self._to_hidden.to(self._hidden.dtype),
            None if self._to_weight is None else self._to_weight.to(self._weight.dtype),
            None if self._to_bias is None or self._bias is None else self._to_bias.to(self._bias.dtype),
        )


def token_logprobs(
    *,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperature: float,
    chunking: Chunking,
    with_entropy: bool,
) -> TokenLogprobs:
    """log softmax((hidden weight^T + bias) / temperature) at `target`.

    hidden [T, H], weight [V, H], bias [V] or none, target int64 [T]. Gradients reach hidden, weight and bias.
    """
    logprobs, entropy = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, target, temperature, chunking, with_entropy
    )
    return TokenLogprobs(logprobs=logprobs, entropy=entropy if with_entropy else None)


class LogprobHead(nn.Linear):
    """A model's output projection that can also give logprobs of targets.

    It is a module, and computes in `forward`, so that hooks which gather sharded parameters see it called.
    """

    @classmethod
    def sharing(cls, linear: nn.Linear) -> LogprobHead:
        """A head with the very parameters of `linear`, so that ties to an embedding stay."""
        head = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        head.weight = linear.weight
        head.bias = linear.bias
        return head

    def forward(  # type: ignore[override]
        self,
        input: Tensor,
        target: Tensor | None = None,
        *,
        temperature: float = 1.0,
        chunking: Chunking = Chunking(),
        with_entropy: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Without `target`, logits of `input` [..., H]; with it, logprobs [T] and entropy [T] of `input` [T, H]."""
        if target is None:
            return super().forward(input)
        result = token_logprobs(
            hidden=input,
            weight=self.weight,
            bias=self.bias,
            target=target,
            temperature=temperature,
            chunking=chunking,
            with_entropy=with_entropy,
        )
        return result.logprobs, result.entropy
