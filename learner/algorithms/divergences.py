"""The divergence of the policy from a teacher that an algorithm's settings name, at each token of a microbatch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from learner.algorithms import ratios
from learner.algorithms.knobs import Divergence, DivergenceKnobs
from learner.algorithms.preset import LossTokens


def gaps_of(knobs: DivergenceKnobs, tokens: LossTokens) -> Tensor:
    """The divergence at each token, [N], in nats, over the teacher's candidates and what is left of the mass."""
    assert tokens.candidate_logprobs is not None, "the batch holds a teacher's candidates"
    assert tokens.teacher_logprobs is not None, "the batch holds a teacher's candidates"
    assert knobs.compared_by is not None, "the preset asked for candidates"
    of: dict[Divergence, Callable[..., Tensor]] = {
        "forward_kl": ratios.forward_kl,
        "reverse_kl": ratios.reverse_kl,
        "jsd": partial(ratios.jensen_shannon, beta=knobs.jsd_beta),
        "skewed_forward_kl": partial(ratios.skewed_forward_kl, skew=knobs.skew),
        "skewed_reverse_kl": partial(ratios.skewed_reverse_kl, skew=knobs.skew),
        "adaptive_kl": partial(ratios.adaptive_kl, head_mass=knobs.head_mass),
    }
    divergence = of[knobs.compared_by]
    return divergence(student_logprobs=tokens.candidate_logprobs, teacher_logprobs=tokens.teacher_logprobs, tail=True)
