"""KL and Jensen-Shannon divergences of teacher and student per position, and estimates of KL from sampled tokens.

Logprobs are [N, C]: at each of N positions, those of C different candidate tokens, of teacher and student in the same
order, both normalised over the whole vocabulary and at the same temperature. -inf is a token that the model calls
impossible. The student's carry the gradient. Results are [N], in nats.

The candidates are the whole vocabulary, or some of it, as a rule the teacher's most likely. Then `tail = True` adds one
bucket for all other tokens, with the mass that each side leaves them. Merging outcomes can only lower a divergence of
this family (data processing), so the result is at least 0, at most the divergence over the whole vocabulary, and 0
where the student matches the teacher. Without the tail the sum over the candidates alone has none of these properties,
and in `reverse_kl` and `jensen_shannon` the student can lower it by moving mass off the candidates; leave it out only
where the candidates are the whole vocabulary.

Sources: sequence-level and forward KL, arXiv 1503.02531; reverse KL, MiniLLM (arXiv 2306.08543); the generalised
Jensen-Shannon divergence, GKD (arXiv 2306.13649).

The estimates take logprobs of sampled tokens, tensors [N], and are in nats. All three average to KL(policy ||
reference), or nearly so (k2), over tokens that the policy sampled, as they are in a reward. As a term of a loss what
counts is the gradient: that of k1 averages to 0, that of k2 to the gradient of KL(policy || reference), that of k3 to
the gradient of KL(reference || policy). No estimate is beyond 10 either way, and there it has no gradient.

Source of k1, k2 and k3: John Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html (2020).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from learner.algorithms.knobs import KlForm
from learner.algorithms.ratios import bounded, finite, ratio

# The least probability that float32 holds. A teacher is not believed when it calls a token less likely than that: an
# infinite divergence teaches nothing.
TEACHER_FLOOR = -100.0
# The most mass that the candidates are taken to have, as a logprob: float32 sums of probabilities err by 1e-7.
CANDIDATE_CEILING = -1e-6


def forward_kl(*, student_logprobs: Tensor, teacher_logprobs: Tensor, tail: bool) -> Tensor:
    """KL(teacher || student) = sum p_teacher (log p_teacher - log p_student): covers all that the teacher does."""
    teacher, student = _outcomes(student_logprobs, teacher_logprobs, tail=tail)
    return _divergence(teacher, student)


def reverse_kl(*, student_logprobs: Tensor, teacher_logprobs: Tensor, tail: bool) -> Tensor:
    """KL(student || teacher) = sum p_student (log p_student - log p_teacher): avoids what the teacher does not do."""
    teacher, student = _outcomes(student_logprobs, teacher_logprobs, tail=tail)
    return _divergence(student, teacher)


def jensen_shannon(*, student_logprobs: Tensor, teacher_logprobs: Tensor, beta: float, tail: bool) -> Tensor:
    """beta KL(teacher || m) + (1 - beta) KL(student || m), m = beta teacher + (1 - beta) student, 0 < beta < 1.

    Never above the entropy of (beta, 1 - beta). Over beta it tends to the forward KL as beta falls to 0, over 1 - beta
    to the reverse KL as it rises to 1.
    """
    assert 0 < beta < 1, f"beta {beta}: at 0 and at 1 the divergence is 0 everywhere"
    teacher, student = _outcomes(student_logprobs, teacher_logprobs, tail=tail)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _divergence(teacher, mixture) + (1 - beta) * _divergence(student, mixture)


def _divergence(of: Tensor, against: Tensor) -> Tensor:
    return (torch.exp(of) * (of - against)).sum(dim=-1)


def _outcomes(student: Tensor, teacher: Tensor, *, tail: bool) -> tuple[Tensor, Tensor]:
    """Teacher and student, finite, with a last column for the tail if asked: [N, C] or [N, C + 1]."""
    assert student.shape == teacher.shape, f"student {tuple(student.shape)}, teacher {tuple(teacher.shape)}"
    teacher, student = teacher.detach(), finite(student)
    if tail:
        teacher, student = _with_tail(teacher), _with_tail(student)
    return teacher.clamp(min=TEACHER_FLOOR), student


def _with_tail(logprobs: Tensor) -> Tensor:
    """`logprobs` [N, C] and log(1 - sum of their exponentials): [N, C + 1]."""
    mass = torch.logsumexp(logprobs, dim=-1, keepdim=True).clamp(max=CANDIDATE_CEILING)
    return torch.cat([logprobs, torch.log(-torch.expm1(mass))], dim=-1)


# No estimate of a single token is larger: one wild token would outweigh the rest of the batch.
ESTIMATE_BOUND = 10.0


def k1(*, policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """policy - reference, bounded by 10 either way: unbiased, of either sign."""
    return _gap(policy_logprobs, reference_logprobs).clamp(-ESTIMATE_BOUND, ESTIMATE_BOUND)


def k2(*, policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """(policy - reference)² / 2, at most 10: never negative, biased by third-order terms."""
    return (0.5 * _gap(policy_logprobs, reference_logprobs).square()).clamp(max=ESTIMATE_BOUND)


def k3(*, policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(d) - 1 - d, d = reference - policy, never negative, at most 10: unbiased, of less variance than k1."""
    gap = -_gap(policy_logprobs, reference_logprobs)
    return (torch.expm1(gap) - gap).clamp(max=ESTIMATE_BOUND)


def penalty(*, form: KlForm, policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """The estimate that `form` names."""
    estimate = {"k1": k1, "k2": k2, "k3": k3}[form]
    return estimate(policy_logprobs=policy_logprobs, reference_logprobs=reference_logprobs)


def weighted(*, form: KlForm, policy_logprobs: Tensor, reference_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """The estimate times rho = exp(policy - behavior), at most 10, gradient and all.

    Averages to KL(policy || reference) over tokens that the behavior policy sampled, and so does its gradient to the
    gradient of that, whatever the form but k2. Source: the unbiased estimate of DeepSeek-V3.2 (arXiv 2512.02556).
    """
    rho = ratio(numerator=policy_logprobs, denominator=behavior_logprobs).clamp(max=ESTIMATE_BOUND)
    return rho * penalty(form=form, policy_logprobs=policy_logprobs, reference_logprobs=reference_logprobs)


def mismatch(*, proximal_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """k3 for tokens that the behavior policy sampled: estimates KL(behavior || proximal), without gradient."""
    return k3(policy_logprobs=behavior_logprobs.detach(), reference_logprobs=proximal_logprobs.detach())


def _gap(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """policy - reference, within 20 either way so that its exponential is finite."""
    return bounded(policy_logprobs - reference_logprobs)
