"""Shared parts of presets that compare whole sequences: sides of pairs, sums over sequences, choices from a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from learner.algorithms.policy_loss import pair_weights
from learner.algorithms.preference_losses import PairLoss
from learner.algorithms.preset import Loss, LossTokens, ScoredBatch, mean_of
from learner.algorithms.ratios import sequence_sums


@dataclass(frozen=True)
class Sides:
    """A number for the chosen and for the rejected sequence of each pair, [P] each."""

    chosen: Tensor
    rejected: Tensor


def best_and_worst(rewards: Sequence[float]) -> Sequence[int]:
    """The first best and the first worst of a group's rewards; nothing if all are equal."""
    best, worst = int(np.argmax(rewards)), int(np.argmin(rewards))
    return (best, worst) if rewards[best] > rewards[worst] else ()


def best(rewards: Sequence[float]) -> Sequence[int]:
    """The first best of a group's rewards; nothing if all are equal, as where the whole group failed."""
    return (int(np.argmax(rewards)),) if max(rewards) > min(rewards) else ()


def per_pair(lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """Both sequences of a pair have the pair's weight: the loss is a mean over pairs. They stand next to each other."""
    return pair_weights(pairs=np.arange(len(lengths)).reshape(-1, 2), trained_lengths=lengths)


def sums(tokens: LossTokens, values: Tensor) -> Tensor:
    """The sum of values [N] over each of the K sequences, [K]."""
    return sequence_sums(values=values, sequences=tokens.sequences, count=len(tokens.sequence_weights))


def of_pairs(per_sequence: Tensor, tokens: LossTokens) -> Sides:
    """A number of each sequence [K] as those of the two sides of each pair."""
    chosen, rejected = tokens.pairs.unbind(dim=1)
    return Sides(chosen=per_sequence[chosen], rejected=per_sequence[rejected])


def sides(per_sequence: Tensor, tokens: LossTokens, what: str) -> dict[str, Tensor]:
    """The same as the arguments of a loss of pairs, `chosen_` and `rejected_` before the name `what`."""
    chosen, rejected = tokens.pairs.unbind(dim=1)
    return {f"chosen_{what}": per_sequence[chosen], f"rejected_{what}": per_sequence[rejected]}


def reference(tokens: LossTokens) -> Tensor:
    """The reference's logprobs [N], which the preset asked for."""
    assert tokens.reference_logprobs is not None, "the preset asked for a pass of the reference"
    return tokens.reference_logprobs


def pair_loss(made: PairLoss, tokens: LossTokens) -> Loss:
    """The loss of pairs by the weights of their sequences, with metrics."""
    weights = tokens.sequence_weights[tokens.pairs[:, 0]]
    better = (made.chosen_rewards > made.rejected_rewards).to(made.chosen_rewards.dtype)
    return Loss(
        total=(weights * made.losses).sum(),
        means={
            "pair_accuracy": mean_of(better),
            "chosen_reward": mean_of(made.chosen_rewards),
            "rejected_reward": mean_of(made.rejected_rewards),
        },
    )


def gaps(batch: ScoredBatch) -> Tensor:
    """Policy less reference, summed over each sequence, when the step began, [S]."""
    assert batch.proximal_logprobs is not None, "the preset asked for a pass of the policy"
    assert batch.reference_logprobs is not None, "the preset asked for a pass of the reference"
    gaps = batch.proximal_logprobs - batch.reference_logprobs
    return sequence_sums(values=gaps, sequences=batch.sequences, count=len(batch.rewards))
