"""Logprobs of chosen tokens and the most probable next tokens from hidden states, never holding all logits.

Logits are computed for a chunk of tokens by a chunk of the vocabulary, reduced in float32 (float64 for float64 inputs)
by a running log-sum-exp over spans of the vocabulary, and computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from learner.training.logits import LogitRules

_PLAIN = LogitRules()


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of sums over values of `dtype`: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def spans(total: int, size: int) -> list[slice]:
    """0 to `total` in slices of at most `size`."""
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


@dataclass(frozen=True)
class LowRankLogits:
    """A low-rank term of the output matrix: `features` [T, R] `up`^T [V, R] is added to the products."""

    features: Tensor
    up: Tensor

    def of(self, rows: slice) -> LowRankLogits:
        """The term of some of the tokens."""
        return LowRankLogits(self.features[rows], self.up)


def span_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    span: slice,
    *,
    temperature: float,
    rules: LogitRules = _PLAIN,
    low_rank: LowRankLogits | None = None,
) -> Tensor:
    """[t, H] x [V, H] to the logits of the vocabulary span, [t, v], in the accumulation type, over the temperature.

    The result is the caller's to overwrite.
    """
    products = _products(hidden, weight[span], None if bias is None else bias[span], unrounded=rules.unrounded)
    if low_rank is not None:
        products.addmm_(low_rank.features.to(products.dtype), low_rank.up[span].T.to(products.dtype))
    # A copy where the types are the same would be one more tensor of this size, and nobody else has the product.
    logits = rules.apply_(products.to(accumulation_dtype(hidden.dtype)))
    return logits if temperature == 1.0 else logits.div_(temperature)


def _products(hidden: Tensor, weight: Tensor, bias: Tensor | None, *, unrounded: bool) -> Tensor:
    """[t, H] x [v, H] to [t, v], in the inputs' type, or `unrounded` in the accumulation type: as vLLM's head does."""
    dtype = accumulation_dtype(hidden.dtype)
    if not unrounded or dtype == hidden.dtype:
        return nn.functional.linear(hidden, weight, bias)
    if hidden.is_cuda:
        # Factors in 16 bits, sums in 32: what the product computes within anyway, at its full speed.
        products = torch.mm(hidden, weight.t(), out_dtype=dtype)
        return products if bias is None else products.add_(bias)
    return nn.functional.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


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


@dataclass(frozen=True)
class Chunking:
    """At most `tokens` x `vocabulary` logits are held at once."""

    tokens: int = 1024
    vocabulary: int = 65536


@dataclass(frozen=True)
class TokenLogprobs:
    """In nats: `logprobs` [T] of the targets, `entropy` [T] and `candidates` [T, C] if asked for."""

    logprobs: Tensor
    entropy: Tensor | None
    candidates: Tensor | None


def token_logprobs(
    *,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    candidates: Tensor | None = None,
    temperature: float,
    chunking: Chunking,
    with_entropy: bool,
    entropy_gradient: bool = False,
    rules: LogitRules = _PLAIN,
    low_rank: LowRankLogits | None = None,
) -> TokenLogprobs:
    """log softmax(rules(hidden weight^T + bias) / temperature) at `target`, and at each of `candidates`.

    hidden [T, H], weight [V, H], bias [V] or none, target int64 [T], candidates int64 [T, C] or none; a token may occur
    several times in a row, and one beyond the vocabulary is impossible: -inf, without gradient. Gradients reach hidden,
    weight, bias and the two factors of `low_rank`, which is added to the products, from the entropy only with
    `entropy_gradient`, which costs the backward pass another pass over the logits.
    """
    tokens = target[:, None] if candidates is None else torch.cat([target[:, None], candidates], dim=1)
    logprobs, entropy = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden,
        weight,
        bias,
        tokens,
        temperature,
        chunking,
        with_entropy or entropy_gradient,
        entropy_gradient,
        rules,
        None if low_rank is None else low_rank.features,
        None if low_rank is None else low_rank.up,
    )
    return TokenLogprobs(
        logprobs=logprobs[:, 0],
        entropy=entropy if with_entropy or entropy_gradient else None,
        candidates=None if candidates is None else logprobs[:, 1:],
    )


def _forward_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    *,
    temperature: float,
    vocabulary: int,
    with_entropy: bool,
    rules: LogitRules,
    low_rank: LowRankLogits | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of t rows the logprobs of `tokens` [t, P], the log-sum-exp [t] and the entropy [t] (zeros if not wanted)."""
    softmax = RunningSoftmax(hidden, with_entropy=with_entropy)
    chosen = torch.zeros_like(tokens, dtype=accumulation_dtype(hidden.dtype))
    for span in spans(weight.shape[0], vocabulary):
        logits = span_logits(hidden, weight, bias, span, temperature=temperature, rules=rules, low_rank=low_rank)
        columns, inside = span_columns(tokens, span)
        chosen += torch.where(inside, logits.gather(1, columns), 0)
        softmax.add(logits)
    chosen.masked_fill_(tokens >= weight.shape[0], -torch.inf)
    return softmax.logprobs(chosen), softmax.normalizer(), softmax.entropy()


class _ChunkedLogprobs(torch.autograd.Function):
    """Logprobs [T, P] of `tokens` [T, P] and the entropy [T]."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        temperature: float,
        chunking: Chunking,
        with_entropy: bool,
        entropy_gradient: bool,
        rules: LogitRules,
        features: Tensor | None,
        up: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        low_rank = None if features is None or up is None else LowRankLogits(features, up)
        parts = [
            _forward_rows(
                hidden[rows],
                weight,
                bias,
                tokens[rows],
                temperature=temperature,
                vocabulary=chunking.vocabulary,
                with_entropy=with_entropy,
                rules=rules,
                low_rank=None if low_rank is None else low_rank.of(rows),
            )
            # Without tokens there is one chunk all the same, of none.
            for rows in spans(hidden.shape[0], chunking.tokens) or [slice(0, 0)]
        ]
        logprobs, normalizer, entropy = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, bias, tokens, normalizer, entropy, features, up)  # type: ignore[arg-type]
        ctx.temperature, ctx.chunking, ctx.rules = temperature, chunking, rules  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens, normalizer, entropy, features, up = ctx.saved_tensors  # type: ignore[attr-defined]
        low_rank = None if features is None else LowRankLogits(features, up)
        temperature: float = ctx.temperature  # type: ignore[attr-defined]
        chunking: Chunking = ctx.chunking  # type: ignore[attr-defined]
        rules: LogitRules = ctx.rules  # type: ignore[attr-defined]
        to_logprobs = torch.zeros_like(tokens, dtype=normalizer.dtype)
        if grads[0] is not None:
            to_logprobs = torch.where(tokens < weight.shape[0], grads[0] / temperature, to_logprobs)
        slopes = _Slopes(
            tokens,
            normalizer=normalizer,
            entropy=entropy,
            to_logprobs=to_logprobs,
            to_entropy=None if grads[1] is None else grads[1] / temperature,
            to_products=lambda logits: rules.slope(logits, temperature=temperature),
        )
        wanted: Sequence[bool] = ctx.needs_input_grad  # type: ignore[attr-defined]
        sums = _GradientSums(hidden, weight, bias, low_rank, wanted=(*wanted[:3], *wanted[-2:]))
        for rows in spans(hidden.shape[0], chunking.tokens):
            for span in spans(weight.shape[0], chunking.vocabulary):
                # Without names, so that no chunk outlives its turn.
                sums.add(
                    slopes.of(
                        span_logits(
                            hidden[rows],
                            weight,
                            bias,
                            span,
                            temperature=temperature,
                            rules=rules,
                            low_rank=None if low_rank is None else low_rank.of(rows),
                        ),
                        rows=rows,
                        span=span,
                    ),
                    rows=rows,
                    span=span,
                )
        to_hidden, to_weight, to_bias, *to_low_rank = sums.results()
        return to_hidden, to_weight, to_bias, None, None, None, None, None, None, *to_low_rank


class _Slopes:
    """Gradients with respect to the products that logits are made of, from those of logprobs [T, P] and entropy [T].

    Those that are given are already over the temperature. `to_products` gives from logits what their gradient is
    multiplied by, None for 1.
    """

    def __init__(
        self,
        tokens: Tensor,
        *,
        normalizer: Tensor,
        entropy: Tensor,
        to_logprobs: Tensor,
        to_entropy: Tensor | None,
        to_products: Callable[[Tensor], Tensor | float | None],
    ) -> None:
        self._tokens = tokens
        self._normalizer = normalizer[:, None]
        self._entropy = entropy[:, None]
        self._to_logprobs = to_logprobs
        self._to_entropy = None if to_entropy is None else to_entropy[:, None]
        self._to_products = to_products

    def of(self, logits: Tensor, *, rows: slice, span: slice) -> Tensor:
        """The gradient [t, v] of a chunk with these `logits`, which are overwritten."""
        to_logprobs = self._to_logprobs[rows]
        factor = self._to_products(logits)
        # d logprob / d logit is onehot - softmax.
        common = -to_logprobs.sum(dim=1, keepdim=True)
        logits -= self._normalizer[rows]
        if self._to_entropy is None:
            slope = logits.exp_().mul_(common)
        else:
            # d entropy / d logit is -softmax (logprob + entropy).
            slope = logits.exp()
            slope *= logits.add_(self._entropy[rows]).mul_(-self._to_entropy[rows]).add_(common)
        columns, inside = span_columns(self._tokens[rows], span)
        slope.scatter_add_(1, columns, torch.where(inside, to_logprobs, 0))
        return slope if factor is None else slope.mul_(factor)


class _GradientSums:
    """Gradients of hidden [T, H], weight [V, H], bias [V] and the factors of a low-rank term, as far as wanted, summed
    in the accumulation type.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        low_rank: LowRankLogits | None,
        *,
        wanted: Sequence[bool],
    ) -> None:
        def zeros(tensor: Tensor | None, is_wanted: bool) -> Tensor | None:
            if tensor is None or not is_wanted:
                return None
            return torch.zeros_like(tensor, dtype=accumulation_dtype(tensor.dtype))

        self._hidden, self._weight, self._low_rank = hidden, weight, low_rank
        self._to_hidden = zeros(hidden, wanted[0])
        self._to_weight = zeros(weight, wanted[1])
        self._to_bias = zeros(bias, wanted[2])
        self._to_features = zeros(None if low_rank is None else low_rank.features, wanted[3])
        self._to_up = zeros(None if low_rank is None else low_rank.up, wanted[4])

    def add(self, slope: Tensor, *, rows: slice, span: slice) -> None:
        """Adds the part of the chunk whose gradient with respect to its logits is `slope` [t, v]."""
        slope = slope.to(self._hidden.dtype)
        if self._to_hidden is not None:
            self._to_hidden[rows] += slope @ self._weight[span]
        if self._to_weight is not None:
            self._to_weight[span] += slope.T @ self._hidden[rows]
        if self._to_bias is not None:
            self._to_bias[span] += slope.sum(dim=0)
        if self._low_rank is not None and self._to_features is not None:
            self._to_features[rows] += slope @ self._low_rank.up[span]
        if self._low_rank is not None and self._to_up is not None:
            self._to_up[span] += slope.T @ self._low_rank.features[rows]

    def results(self) -> tuple[Tensor | None, ...]:
        """The five gradients in the types of their tensors, which are all of one type."""
        totals = (self._to_hidden, self._to_weight, self._to_bias, self._to_features, self._to_up)
        return tuple(None if total is None else total.to(self._hidden.dtype) for total in totals)


@dataclass(frozen=True)
class TopTokens:
    """At each of T positions C tokens by falling probability: `token_ids` int64, `logprobs` in nats, both [T, C]."""

    token_ids: Tensor
    logprobs: Tensor


def top_tokens(
    *,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    count: int,
    temperature: float,
    chunking: Chunking,
    rules: LogitRules = _PLAIN,
) -> TopTokens:
    """The `count` largest of log softmax(rules(hidden weight^T + bias) / temperature), without gradient.

    hidden [T, H], weight [V, H], bias [V] or none, 1 <= count <= V. The logprobs are normalised over the whole
    vocabulary. Which of several equally probable tokens come first, and which are in, is not specified.
    """
    assert 1 <= count <= weight.shape[0], f"the top {count} of a vocabulary of {weight.shape[0]}"
    with torch.no_grad():
        parts = [
            _top_rows(
                hidden[rows],
                weight,
                bias,
                count=count,
                temperature=temperature,
                vocabulary=chunking.vocabulary,
                rules=rules,
            )
            # Without tokens there is one chunk all the same, of none.
            for rows in spans(hidden.shape[0], chunking.tokens) or [slice(0, 0)]
        ]
    return TopTokens(
        token_ids=torch.cat([part.token_ids for part in parts]), logprobs=torch.cat([part.logprobs for part in parts])
    )


def _top_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    count: int,
    temperature: float,
    vocabulary: int,
    rules: LogitRules,
) -> TopTokens:
    softmax = RunningSoftmax(hidden, with_entropy=False)
    best = hidden.new_empty(hidden.shape[0], 0, dtype=accumulation_dtype(hidden.dtype))
    token_ids = torch.empty_like(best, dtype=torch.int64)
    for span in spans(weight.shape[0], vocabulary):
        logits = span_logits(hidden, weight, bias, span, temperature=temperature, rules=rules)
        highest, columns = logits.topk(min(count, logits.shape[1]))
        softmax.add(logits)
        token_ids = torch.cat([token_ids, columns + span.start], dim=1)
        best, kept = torch.cat([best, highest], dim=1).topk(min(count, token_ids.shape[1]))
        token_ids = token_ids.gather(1, kept)
    return TopTokens(token_ids=token_ids, logprobs=softmax.logprobs(best))


def logprobs_with_norms(
    *,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperature: float,
    chunking: Chunking,
    rules: LogitRules = _PLAIN,
) -> tuple[Tensor, Tensor]:
    """log p of each `target` [T], and the squared norm of its gradient with respect to the logits; without gradient.

    The gradient is onehot - softmax, so the norm is 1 - 2 p + the sum of p^2 over the vocabulary: 0 for a token that is
    certain, at most 2. Both [T]; arguments as of `token_logprobs`.
    """
    with torch.no_grad():
        parts = [
            _norms_of_rows(
                hidden[rows],
                weight,
                bias,
                target[rows, None],
                temperature=temperature,
                vocabulary=chunking.vocabulary,
                rules=rules,
            )
            # Without tokens there is one chunk all the same, of none.
            for rows in spans(hidden.shape[0], chunking.tokens) or [slice(0, 0)]
        ]
    logprobs, norms = (torch.cat(part) for part in zip(*parts, strict=True))
    return logprobs, norms


def _norms_of_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    temperature: float,
    vocabulary: int,
    rules: LogitRules,
) -> tuple[Tensor, Tensor]:
    softmax, squares = (RunningSoftmax(hidden, with_entropy=False) for _ in range(2))
    chosen = torch.zeros_like(target, dtype=accumulation_dtype(hidden.dtype))
    for span in spans(weight.shape[0], vocabulary):
        logits = span_logits(hidden, weight, bias, span, temperature=temperature, rules=rules)
        columns, inside = span_columns(target, span)
        chosen += torch.where(inside, logits.gather(1, columns), 0)
        # The sum of p^2 is that of exp(2 logit), over the square of the sum of exp(logit).
        squares.add(2 * logits)
        softmax.add(logits)
    logprobs = softmax.logprobs(chosen)[:, 0]
    return logprobs, 1 - 2 * logprobs.exp() + (squares.normalizer() - 2 * softmax.normalizer()).exp()


_CHUNKING = Chunking()


class LogprobHead(nn.Linear):
    """A model's output projection that can also give logprobs of targets, or the most probable tokens.

    It is a module, and computes in `forward`, so that hooks which gather sharded parameters see it called, and it
    returns plain tuples, which those hooks look into.
    """

    rules: LogitRules = _PLAIN

    @classmethod
    def sharing(cls, linear: nn.Linear, *, rules: LogitRules = _PLAIN) -> LogprobHead:
        """A head with the very parameters of `linear`, so that ties to an embedding stay. `rules` are the model's for
        its logits, which plain logits are returned without: the model applies them itself.
        """
        head = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        head.weight = linear.weight
        head.bias = linear.bias
        head.rules = rules
        return head

    def forward(  # type: ignore[override]
        self,
        input: Tensor,
        target: Tensor | None = None,
        *,
        candidates: Tensor | None = None,
        top: int = 0,
        temperature: float = 1.0,
        chunking: Chunking = _CHUNKING,
        with_entropy: bool = False,
        entropy_gradient: bool = False,
        with_norms: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor | None, Tensor | None] | tuple[Tensor, Tensor]:
        """Logits of `input` [..., H], unless more is asked for. With `input` [T, H]:

        with `target` [T], the target's logprobs [T], the entropy [T] and the logprobs of `candidates` [T, C], or with
        `with_norms` what `logprobs_with_norms` gives; with `top`, the token ids [T, top] and logprobs [T, top] of the
        most probable tokens.
        """
        input = input.to(self.weight.dtype)  # Mamba 2 ends in float32
        if target is not None and with_norms:
            return logprobs_with_norms(
                hidden=input,
                weight=self.weight,
                bias=self.bias,
                target=target,
                temperature=temperature,
                chunking=chunking,
                rules=self.rules,
            )
        if target is not None:
            result = token_logprobs(
                hidden=input,
                weight=self.weight,
                bias=self.bias,
                target=target,
                candidates=candidates,
                temperature=temperature,
                chunking=chunking,
                with_entropy=with_entropy,
                entropy_gradient=entropy_gradient,
                rules=self.rules,
            )
            return result.logprobs, result.entropy, result.candidates
        if top:
            best = top_tokens(
                hidden=input,
                weight=self.weight,
                bias=self.bias,
                count=top,
                temperature=temperature,
                chunking=chunking,
                rules=self.rules,
            )
            return best.token_ids, best.logprobs
        return super().forward(input)
