"""The most probable next tokens, never holding the logits of all tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from learner.training.logprobs import Chunking
from learner.training.vocabulary import RunningSoftmax, accumulation_dtype, span_logits, spans


@dataclass(frozen=True)
class TopTokens:
    """At each of T positions C tokens by falling probability: `token_ids` int64, `logprobs` in nats, both [T, C]."""

    token_ids: Tensor
    logprobs: Tensor


def top_tokens(
    *, hidden: Tensor, weight: Tensor, bias: Tensor | None, count: int, temperature: float, chunking: Chunking
) -> TopTokens:
    """The `count` largest of log softmax((hidden weight^T + bias) / temperature), without gradient.

    hidden [T, H], weight [V, H], bias [V] or none, 1 <= count <= V. The logprobs are normalised over the whole
    vocabulary. Which of several equally probable tokens come first, and which are in, is not specified.
    """
    assert 1 <= count <= weight.shape[0], f"the top {count} of a vocabulary of {weight.shape[0]}"
    with torch.no_grad():
        parts = [
            _top_rows(hidden[rows], weight, bias, count=count, temperature=temperature, vocabulary=chunking.vocabulary)
            # Without tokens there is one chunk all the same, of none.
            for rows in spans(hidden.shape[0], chunking.tokens) or [slice(0, 0)]
        ]
    return TopTokens(
        token_ids=torch.cat([part.token_ids for part in parts]), logprobs=torch.cat([part.logprobs for part in parts])
    )


def _top_rows(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *, count: int, temperature: float, vocabulary: int
) -> TopTokens:
    softmax = RunningSoftmax(hidden, with_entropy=False)
    best = hidden.new_empty(hidden.shape[0], 0, dtype=accumulation_dtype(hidden.dtype))
    token_ids = torch.empty_like(best, dtype=torch.int64)
    for span in spans(weight.shape[0], vocabulary):
        logits = span_logits(hidden, weight, bias, span, temperature=temperature)
        highest, columns = logits.topk(min(count, logits.shape[1]))
        softmax.add(logits)
        token_ids = torch.cat([token_ids, columns + span.start], dim=1)
        best, kept = torch.cat([best, highest], dim=1).topk(min(count, token_ids.shape[1]))
        token_ids = token_ids.gather(1, kept)
    return TopTokens(token_ids=token_ids, logprobs=softmax.logprobs(best))
