"""Divergences between a teacher's and a student's distribution of the next token, per position.

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
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from learner.algorithms.ratios import finite

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
