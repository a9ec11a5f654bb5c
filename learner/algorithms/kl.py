"""Estimates of a Kullback-Leibler divergence from logprobs of sampled tokens. Tensors are [N], results in nats.

All three average to KL(policy || reference), or nearly so (k2), over tokens that the policy sampled, as they are in a
reward. As a term of a loss what counts is the gradient: that of k1 averages to 0, that of k2 to the gradient of
KL(policy || reference), that of k3 to the gradient of KL(reference || policy).

Source of k1, k2 and k3: John Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html (2020).
"""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithms.choices import KlForm

# Beyond this the exponential is not an estimate of anything, and its gradient would drown the batch.
LOG_RATIO_BOUND = 10.0


def k1(*, policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """policy - reference, bounded by 10 either way: unbiased, of either sign."""
    return (policy_logprobs - reference_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def k2(*, policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """(policy - reference)² / 2, the difference bounded by 10: never negative, biased by third-order terms."""
    return 0.5 * k1(policy_logprobs=policy_logprobs, reference_logprobs=reference_logprobs).square()


def k3(*, policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(d) - 1 - d, never negative, d = reference - policy bounded by 10: unbiased, of less variance than k1."""
    gap = (reference_logprobs - policy_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.expm1(gap) - gap


def penalty(*, form: KlForm, policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """The estimate that `form` names."""
    estimate = {"k1": k1, "k2": k2, "k3": k3}[form]
    return estimate(policy_logprobs=policy_logprobs, reference_logprobs=reference_logprobs)


def mismatch(*, proximal_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """k3 for tokens that the behavior policy sampled: estimates KL(behavior || proximal), without gradient."""
    return k3(policy_logprobs=behavior_logprobs.detach(), reference_logprobs=proximal_logprobs.detach())
