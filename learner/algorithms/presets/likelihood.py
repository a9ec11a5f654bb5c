"""Presets that raise the likelihood of given tokens: examples, the best of a group, or a teacher's distribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from learner.algorithms import ratios
from learner.algorithms.config import BestOfKConfig, DistillConfig, SftConfig
from learner.algorithms.knobs import AggregationKnobs
from learner.algorithms.policy_loss import negative_log_likelihood, token_weights
from learner.algorithms.presets.policy_gradient import mean_of
from learner.algorithms.presets.preset import Loss, LossTokens, Preset


def sft(config: SftConfig) -> Preset:
    """Negative log-likelihood of the tokens in the loss mask."""
    return Preset(name=config.type, loss=_likelihood, weights=_weights(config))


def best_of_k(config: BestOfKConfig) -> Preset:
    """The same, of the best trajectory of each group with spread."""
    return Preset(name=config.type, loss=_likelihood, weights=_weights(config), select=best, samples_policy=True)


def distill(config: DistillConfig) -> Preset:
    """A divergence from the teacher at each token, over the teacher's candidates and what is left of the mass."""

    def loss(tokens: LossTokens) -> Loss:
        gaps = _divergences(config, tokens)
        losses = gaps + config.sft_weight * negative_log_likelihood(policy_logprobs=tokens.policy_logprobs)
        return Loss(total=(tokens.weights * losses).sum(), means={"teacher_divergence": mean_of(gaps)})

    return Preset(name=config.type, loss=loss, weights=_weights(config), candidates=config.teacher_tokens)


def best(rewards: Sequence[float]) -> Sequence[int]:
    """The first best of a group's rewards; nothing if all are equal, as where the whole group failed."""
    return (int(np.argmax(rewards)),) if max(rewards) > min(rewards) else ()


def _likelihood(tokens: LossTokens) -> Loss:
    return Loss(total=(tokens.weights * negative_log_likelihood(policy_logprobs=tokens.policy_logprobs)).sum())


def _weights(config: AggregationKnobs) -> Callable[[NDArray[np.int64]], NDArray[np.float64]]:
    return lambda lengths: token_weights(
        trained_lengths=lengths, aggregation=config.aggregation, constant_length=config.constant_length
    )


def _divergences(config: DistillConfig, tokens: LossTokens) -> Tensor:
    assert tokens.candidate_logprobs is not None, "the batch holds a teacher's candidates"
    assert tokens.teacher_logprobs is not None, "the batch holds a teacher's candidates"
    student, teacher = tokens.candidate_logprobs, tokens.teacher_logprobs
    if config.divergence == "forward_kl":
        return ratios.forward_kl(student_logprobs=student, teacher_logprobs=teacher, tail=True)
    if config.divergence == "reverse_kl":
        return ratios.reverse_kl(student_logprobs=student, teacher_logprobs=teacher, tail=True)
    return ratios.jensen_shannon(student_logprobs=student, teacher_logprobs=teacher, beta=config.jsd_beta, tail=True)
