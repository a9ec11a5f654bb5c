"""The measures of a step: sums over the trained tokens of this rank, then means over those of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.algorithms import corrections, divergences
from learner.algorithms.presets.preset import Mean
from learner.training.packing import Microbatch
from learner.training.ranks import summed_over_ranks


@dataclass(frozen=True)
class TokenMeans:
    """Means over the trained tokens of all ranks. Logprobs and entropies are in nats; what does not apply is None.

    `loss`: the mean over the step's updates. `mismatch_kl`: KL(behavior || learner) where both hold the same weights,
    so that engine numerics alone make it (tokens of lag 0 in sequences of a single version; None if there were none).
    `behavior_kl`: the same over all trained tokens, lag included. `importance_ratio_mean` and `_max`: exp(learner -
    behavior). `effective_sample_share`: (sum w)^2 / (n sum w^2) of those ratios, in (0, 1]. `clip_fraction`: share of
    tokens whose policy loss was clipped; None with one update per step, where the ratio to the proximal policy is
    always 1. `correction_fraction`: share of tokens whose correction weight was capped. `means`: measures that the
    algorithm names itself.
    """

    loss: float
    entropy: float | None
    mismatch_kl: float | None
    behavior_kl: float | None
    importance_ratio_mean: float | None
    importance_ratio_max: float | None
    effective_sample_share: float | None
    clip_fraction: float | None
    correction_fraction: float | None
    means: Mapping[str, float]


@dataclass(frozen=True)
class StepMetrics(TokenMeans):
    """One step, over all ranks.

    `grad_norm`: before clipping, the mean over the updates. `learning_rate`: of the last update. `microbatches`: of all
    ranks. `skipped_updates`: of policy and critic, left out since their gradient was not finite; `skipped_in_row`: how
    many of the newest ones, over steps. The times are this rank's, in seconds.
    """

    grad_norm: float
    learning_rate: float
    tokens: int
    trained_tokens: int
    sequences: int
    microbatches: int
    updates: int
    forward_backward_s: float
    optimizer_s: float
    skipped_updates: int = 0
    skipped_in_row: int = 0


@dataclass(frozen=True)
class MicrobatchRecord:
    """What is kept of a microbatch for the metrics, without gradient; each tensor [N] but the scalar `loss`."""

    loss: Tensor
    proximal_logprobs: Tensor
    entropy: Tensor | None
    clipped: Tensor | None
    corrected: Tensor | None
    means: Mapping[str, Mean]
    microbatch: Microbatch


def token_means(
    records: Sequence[MicrobatchRecord], *, updates: int, samples_policy: bool, ratio_moves: bool
) -> TokenMeans:
    """Means over the trained tokens of all ranks. Every rank must call it."""
    sums, largest = _rank_sums(records)
    if torch.distributed.get_world_size() > 1:
        torch.distributed.all_reduce(sums)
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    loss, count, entropy, clipped, corrected, ratio, squared, behavior_kl, fresh, fresh_kl = sums.tolist()
    first = records[0]
    tokens = max(count, 1.0)
    return TokenMeans(
        loss=loss / updates,
        entropy=None if first.entropy is None else entropy / tokens,
        mismatch_kl=fresh_kl / fresh if samples_policy and fresh else None,
        behavior_kl=behavior_kl / tokens if samples_policy else None,
        importance_ratio_mean=ratio / tokens if samples_policy else None,
        importance_ratio_max=float(largest) if samples_policy else None,
        effective_sample_share=ratio * ratio / (tokens * squared) if samples_policy and squared else None,
        clip_fraction=clipped / tokens if ratio_moves and first.clipped is not None else None,
        correction_fraction=None if first.corrected is None else corrected / tokens,
        means=_named_means(records),
    )


def _named_means(records: Sequence[MicrobatchRecord]) -> dict[str, float]:
    names = sorted(records[0].means)
    if not names:
        return {}
    rows = [[total for name in names for total in (r.means[name].total, r.means[name].count)] for r in records]
    sums = torch.stack([torch.stack([value.detach().double() for value in row]) for row in rows]).sum(dim=0)
    totals = summed_over_ranks(sums).reshape(-1, 2).tolist()
    return {name: total / count if count else 0.0 for name, (total, count) in zip(names, totals, strict=True)}


def _rank_sums(records: Sequence[MicrobatchRecord]) -> tuple[Tensor, Tensor]:
    """Ten sums, float64 [10], in the order that `token_means` unpacks, and the largest importance ratio."""
    proximal = torch.cat([record.proximal_logprobs for record in records]).double()
    behavior = torch.cat([record.microbatch.behavior_logprobs for record in records]).double()
    current = torch.cat([record.microbatch.current for record in records])
    ratio = corrections.importance_ratio(proximal_logprobs=proximal, behavior_logprobs=behavior)
    gaps = divergences.mismatch(proximal_logprobs=proximal, behavior_logprobs=behavior)
    zero = proximal.new_zeros(())
    sums = [
        torch.stack([record.loss for record in records]).sum(dtype=torch.float64),
        zero + len(proximal),
        _total([record.entropy for record in records], zero),
        _total([record.clipped for record in records], zero),
        _total([record.corrected for record in records], zero),
        ratio.sum(),
        ratio.square().sum(),
        gaps.sum(),
        current.sum(dtype=torch.float64),
        (gaps * current).sum(),
    ]
    return torch.stack(sums), ratio.max() if len(ratio) else zero


def _total(parts: Sequence[Tensor | None], zero: Tensor) -> Tensor:
    present = [part for part in parts if part is not None]
    return torch.cat(present).sum(dtype=torch.float64) if present else zero
