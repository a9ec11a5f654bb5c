"""Two policies compared at the same tokens: ratios of probabilities, divergences, and corrections by ratios.

Ratios and means of them are finite however impossible a token is. Tensors of ratios have any shape; for sequences they
hold N tokens of K sequences, without padding, in any order.

Divergences
-----------
KL and Jensen-Shannon divergences of teacher and student per position, and estimates of KL from sampled tokens.

Logprobs are [N, C]: at each of N positions, those of C different candidate tokens, of teacher and student in the same
order, both normalised over the whole vocabulary and at the same temperature. -inf is a token that the model calls
impossible. The student's carry the gradient. Results are [N], in nats.

The candidates are the whole vocabulary, or some of it, as a rule the teacher's most likely. Then `tail = True` adds one
bucket for all other tokens, with the mass that each side leaves them. Merging outcomes can only lower a divergence of
this family (data processing), so the result is at least 0, at most the divergence over the whole vocabulary, and 0
where the student matches the teacher. Without the tail the sum over the candidates alone has none of these properties,
and in all but the forward ones the student can lower it by moving mass off the candidates; leave it out only where the
candidates are the whole vocabulary. `adaptive_kl` is a mean of two of the family, by weights that depend on the
candidates: at least 0, and at most the larger of the two over the whole vocabulary.

Sources: sequence-level and forward KL, arXiv 1503.02531; reverse KL, MiniLLM (arXiv 2306.08543); the generalised
Jensen-Shannon divergence, GKD (arXiv 2306.13649); skewed KL, DistiLLM (arXiv 2402.03898); adaptive KL, AKL (arXiv
2404.02657).

The estimates take logprobs of sampled tokens, tensors [N], and are in nats. All three average to KL(policy ||
reference), or nearly so (k2), over tokens that the policy sampled, as they are in a reward. As a term of a loss what
counts is the gradient: that of k1 averages to 0, that of k2 to the gradient of KL(policy || reference), that of k3 to
the gradient of KL(reference || policy). No estimate is beyond 10 either way, and there it has no gradient.

Source of k1, k2 and k3: John Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html (2020).

Corrections
-----------
Weights and filters for the gap between the proximal and the behavior policy (lag and engine numerics).

w = exp(proximal - behavior) of a token, never its inverse. Tensors are [N]: the tokens of one microbatch, or of a whole
step; `sequences` [N] int64 numbers the `count` sequences, each of which must be whole. No correction passes a gradient,
and everything is finite for every logprob, -inf included.

What is said of a trajectory is so of each of its sequences, where it has several contexts: a context is what the model
sees at once. The step's tokens and those of a microbatch must be numbered by the same unit.

A filtered token leaves the numerator and the denominator. The numerator is the caller's sum of weight x loss, where a
filtered token has weight 0. The denominator is a count over all microbatches and ranks, so it cannot come from inside a
loss: take `kept_tokens` of the whole step before its first update, count those, and compute the aggregation's weights
from these counts. Each microbatch then only multiplies. The same holds for the scale of `self_normalising_scale`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from learner.algorithms.knobs import KlForm

# exp(20) is far above every cap in use, and keeps a wild logprob from becoming infinity times zero.
LOG_RATIO_BOUND = 20.0
# Below the sum of any trajectory's logprobs, and far from where squares overflow in float32.
LOGPROB_FLOOR = -1e8
# The least probability that float32 holds. A teacher is not believed when it calls a token less likely than that: an
# infinite divergence teaches nothing.
TEACHER_FLOOR = -100.0
# The most mass that the candidates are taken to have, as a logprob: float32 sums of probabilities err by 1e-7.
CANDIDATE_CEILING = -1e-6
# No estimate of a single token is larger: one wild token would outweigh the rest of the batch.
ESTIMATE_BOUND = 10.0


def finite(logprobs: Tensor) -> Tensor:
    """`logprobs`, not below -1e8. A token that the model calls impossible (-inf) gets no gradient."""
    return logprobs.clamp(min=LOGPROB_FLOOR)


def log_gap(*, numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator - denominator in nats, with the gradient of `numerator` only. Two impossible tokens are 0 apart."""
    return finite(numerator) - finite(denominator.detach())


def bounded(gap: Tensor) -> Tensor:
    """A log ratio within 20 either way. Beyond, no gradient flows."""
    return gap.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def ratio(*, numerator: Tensor, denominator: Tensor) -> Tensor:
    """exp(numerator - denominator), the exponent within 20 either way, with the gradient of `numerator` only."""
    return torch.exp(bounded(log_gap(numerator=numerator, denominator=denominator)))


def capped(ratios: Tensor, cap: float | None) -> Tensor:
    """min(ratio, cap) of each of `ratios`, any shape; None is no bound."""
    return ratios if cap is None else ratios.clamp(max=cap)


def capped_by_sign(ratios: Tensor, cap: float | None, bad_cap: float | None, *, advantages: Tensor) -> Tensor:
    """min(ratio, cap), and min(ratio, bad_cap) where the advantage is negative; a `bad_cap` of None is `cap`."""
    if bad_cap is None:
        return capped(ratios, cap)
    return torch.where(advantages < 0, ratios.clamp(max=bad_cap), capped(ratios, cap))


def sequence_sums(*, values: Tensor, sequences: Tensor, count: int) -> Tensor:
    """The sum of each sequence's `values` [N], as [count]; `sequences` [N] int64 says whose each token is.

    A sequence without tokens has 0. Gradients flow to `values`.
    """
    return torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, sequences, values)


def sequence_lengths(*, sequences: Tensor, count: int) -> Tensor:
    """Number of tokens in each sequence, [count] int64."""
    return sequence_sums(values=torch.ones_like(sequences), sequences=sequences, count=count)


def sequence_means(*, values: Tensor, sequences: Tensor, count: int) -> Tensor:
    """The mean of each sequence's `values` [N], as [count]. A sequence without tokens has 0, not NaN."""
    lengths = sequence_lengths(sequences=sequences, count=count).clamp(min=1)
    return sequence_sums(values=values, sequences=sequences, count=count) / lengths


def binary_kl(*, logprobs: Tensor, against: Tensor) -> Tensor:
    """KL(b || c) of whether a token is sampled or another is, b its probability by `logprobs`, c by `against`; in nats.

    b log(b/c) + (1 - b) log((1 - b)/(1 - c)), any shape, without gradient. Merging all other tokens into one can only
    lower a divergence, so it is at most that over the vocabulary. No probability counts as above exp(-1e-6).
    """
    ours = finite(logprobs.detach()).clamp(max=CANDIDATE_CEILING)
    theirs = finite(against.detach()).clamp(max=CANDIDATE_CEILING)
    chance, other = torch.exp(ours), torch.expm1(ours).neg()
    log_others = torch.log(other) - torch.log(torch.expm1(theirs).neg())
    return (chance * (ours - theirs) + other * log_others).clamp(min=0.0)


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
    mixture = _mixture(teacher, student, share=beta)
    return beta * _divergence(teacher, mixture) + (1 - beta) * _divergence(student, mixture)


def skewed_forward_kl(*, student_logprobs: Tensor, teacher_logprobs: Tensor, skew: float, tail: bool) -> Tensor:
    """KL(teacher || skew teacher + (1 - skew) student), 0 <= skew < 1; at 0 it is the forward KL.

    Never above -log(skew). The gradient fades at tokens that the student gives much less than skew times the teacher's
    probability.
    """
    assert 0 <= skew < 1, f"skew {skew}: at 1 the divergence is 0 everywhere"
    teacher, student = _outcomes(student_logprobs, teacher_logprobs, tail=tail)
    return _divergence(teacher, _mixture(teacher, student, share=skew))


def skewed_reverse_kl(*, student_logprobs: Tensor, teacher_logprobs: Tensor, skew: float, tail: bool) -> Tensor:
    """KL(student || skew student + (1 - skew) teacher), 0 <= skew < 1; at 0 it is the reverse KL.

    Never above -log(skew), and neither is the log ratio of a token, which in the reverse KL has no bound. The gradient
    flows through both places of the student.
    """
    assert 0 <= skew < 1, f"skew {skew}: at 1 the divergence is 0 everywhere"
    teacher, student = _outcomes(student_logprobs, teacher_logprobs, tail=tail)
    return _divergence(student, _mixture(student, teacher, share=skew))


def adaptive_kl(*, student_logprobs: Tensor, teacher_logprobs: Tensor, head_mass: float, tail: bool) -> Tensor:
    """h KL(teacher || student) + (1 - h) KL(student || teacher), h how much of their gap is in the teacher's head.

    The gap is the sum of |p_teacher - p_student|. The head is the teacher's likeliest token, and the next ones while
    their mass together is at most `head_mass`; the bucket of the tail is never in it. h has no gradient.
    """
    teacher, student = _outcomes(student_logprobs, teacher_logprobs, tail=tail)
    gaps = (torch.exp(teacher) - torch.exp(student.detach())).abs()
    candidates = teacher_logprobs.shape[-1]
    head = _head(teacher[:, :candidates], mass=head_mass)
    of_head = (gaps[:, :candidates] * head).sum(dim=-1)
    # Where the two agree there is no gap to share, and both divergences are 0.
    share = of_head / gaps.sum(dim=-1).clamp(min=torch.finfo(gaps.dtype).tiny)
    return share * _divergence(teacher, student) + (1 - share) * _divergence(student, teacher)


def _head(logprobs: Tensor, *, mass: float) -> Tensor:
    """True at the likeliest token of each row of `logprobs` [N, C], and at the next ones up to `mass` in all."""
    order = logprobs.argsort(dim=-1, descending=True, stable=True)
    inside = torch.exp(logprobs.gather(-1, order)).cumsum(dim=-1) <= mass
    inside[:, 0] = True
    return torch.zeros_like(inside).scatter(-1, order, inside)


def _mixture(of: Tensor, rest: Tensor, *, share: float) -> Tensor:
    """The logs of share exp(of) + (1 - share) exp(rest), 0 <= share < 1."""
    return torch.logaddexp(of + (math.log(share) if share else -math.inf), rest + math.log1p(-share))


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


Weight = Literal["truncate", "sequence", "geometric", "none"]


@dataclass(frozen=True)
class RatioWindow:
    """The ratios that pass, `low` and `high` included. Dimensionless, 0 <= low <= high."""

    low: float
    high: float

    def holds(self, ratios: Tensor) -> Tensor:
        """True where `ratios` pass; bool of the same shape."""
        return (ratios >= self.low) & (ratios <= self.high)


@dataclass(frozen=True)
class RatioRules:
    """The corrections that apply, together.

    `weight`: `truncate`, `sequence` and `geometric` as the functions of these names, within `floor` and `cap`; `none`
    is 1 or, under a `token_window`, w itself, which is IcePop. The windows filter as `mask_token` and `mask_sequence`
    do, `token_veto` as `veto`, `divergence_limit` as `mask_divergence`, `binary_kl_limit` as `mask_binary_kl`.
    `bad_cap` is the cap of tokens of negative advantage; of None it is `cap`.
    """

    weight: Weight = "truncate"
    cap: float = 2.0
    bad_cap: float | None = None
    floor: float = 0.0
    token_window: RatioWindow | None = None
    sequence_window: RatioWindow | None = None
    token_veto: float | None = None
    divergence_limit: float | None = None
    binary_kl_limit: float | None = None


@dataclass(frozen=True)
class TokenCorrections:
    """`weights` [N], 0 where a token is filtered; `kept` [N] bool, which are not; `bounded` [N] bool, of which cap or
    floor took effect.
    """

    weights: Tensor
    kept: Tensor
    bounded: Tensor


@dataclass(frozen=True)
class Gap:
    """The tokens whose two policies are compared. `proximal_logprobs` and `behavior_logprobs` are [N]."""

    proximal_logprobs: Tensor
    behavior_logprobs: Tensor
    sequences: Tensor
    count: int

    @property
    def ratios(self) -> Tensor:
        """w of each token, [N]."""
        return importance_ratio(proximal_logprobs=self.proximal_logprobs, behavior_logprobs=self.behavior_logprobs)

    @property
    def logs(self) -> Tensor:
        """log w of each token, [N]."""
        return log_gap(numerator=self.proximal_logprobs, denominator=self.behavior_logprobs).detach()

    @property
    def log_means(self) -> Tensor:
        """The mean of log w over each trajectory, [count]."""
        return sequence_means(values=self.logs, sequences=self.sequences, count=self.count)


def importance_ratio(*, proximal_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """exp(proximal - behavior), without gradient, the exponent bounded by 20 either way."""
    return ratio(numerator=proximal_logprobs, denominator=behavior_logprobs).detach()


def truncate(gap: Gap) -> Tensor:
    """w of each token; within a cap, truncated importance sampling (Ionides 2008, doi 10.1198/106186008X320456).

    With a floor as well, the truncation is two-sided: no token is left without a gradient.
    """
    return gap.ratios


def sequence(gap: Gap) -> Tensor:
    """The product of w over the trajectory, the same for each of its tokens.

    The unbiased correction of a whole trajectory but for its bounds; its variance grows with the length.
    """
    sums = sequence_sums(values=gap.logs, sequences=gap.sequences, count=gap.count)
    return torch.exp(bounded(sums))[gap.sequences]


def geometric(gap: Gap) -> Tensor:
    """The geometric mean of w over the trajectory, the same for each of its tokens.

    Biased, but of a variance that falls with the length; GSPO's ratio (arXiv 2507.18071) taken to the behavior policy.
    """
    return torch.exp(bounded(gap.log_means))[gap.sequences]


def mask_token(gap: Gap, window: RatioWindow) -> Tensor:
    """True at the tokens that have w within `window`. Source: IcePop (arXiv 2510.18855), 0.5 to 5."""
    return window.holds(gap.ratios)


def mask_sequence(gap: Gap, window: RatioWindow) -> Tensor:
    """True at the tokens of a trajectory whose geometric mean of w is within `window`.

    The mean is over all its trained tokens, whatever another filter does to them; being per token, it means the same
    for a long trajectory as for a short one.
    """
    return window.holds(torch.exp(bounded(gap.log_means)))[gap.sequences]


def veto(gap: Gap, least: float) -> Tensor:
    """True at the tokens of a trajectory none of whose tokens has w below `least`: one that the learner's policy would
    hardly ever have sampled says that the rest was sampled from somewhere else. 1e-4 is usual.
    """
    extreme = (gap.ratios < least).to(gap.logs.dtype)
    return (sequence_sums(values=extreme, sequences=gap.sequences, count=gap.count) == 0)[gap.sequences]


def mask_divergence(gap: Gap, *, advantages: Tensor, limit: float) -> Tensor:
    """False at the tokens of a negative advantage in a trajectory whose mean of behavior - proximal is above `limit`.

    That mean estimates KL(behavior || proximal), in nats per token. What is good is learned however it came about; what
    is bad is pushed down only where the policy still does it. Source: the off-policy mask of DeepSeek-V3.2 (arXiv
    2512.02556).
    """
    far = (-gap.log_means > limit)[gap.sequences]
    return ~(far & (advantages < 0))


def mask_binary_kl(gap: Gap, limit: float) -> Tensor:
    """True at the tokens where the divergence of proximal and behavior policy is at most `limit` nats both ways.

    It is that of the token against all others. A window of ratios says nothing of a common token, which no ratio of
    probabilities can carry far, and much of a rare one, whose ratio is noise. Source: KPop (arXiv 2606.15079).
    """
    proximal, behavior = gap.proximal_logprobs, gap.behavior_logprobs
    there = binary_kl(logprobs=proximal, against=behavior)
    back = binary_kl(logprobs=behavior, against=proximal)
    return torch.maximum(there, back) <= limit


def within_second_moment(gap: Gap, *, limit: float, among: Tensor) -> Tensor:
    """Of the tokens `among` (bool [N], the whole step's) those with the smallest (log w)^2, as many as have a mean of
    these squares of at most `limit`: bool [N].

    Tokens that are equally far stay or go together. Unlike a mean of log w, that of squares has no signs that cancel;
    unlike a window, the bound reacts to how far the step is as a whole, and takes out few tokens. Source: M2PO (arXiv
    2510.01161), without its condition that a token moved where its advantage wants it to.
    """
    squares = gap.logs.square()
    ordered = squares[among].sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    held = int((means <= limit).sum())
    return among if held == len(ordered) else among & (squares < ordered[held])


def kept_tokens(gap: Gap, rules: RatioRules) -> Tensor:
    """True at the tokens that pass those filters of `rules` that look at no advantage, bool [N].

    For the whole step, from logprobs before its first update.
    """
    kept = torch.ones_like(gap.sequences, dtype=torch.bool)
    if rules.token_window is not None:
        kept &= mask_token(gap, rules.token_window)
    if rules.sequence_window is not None:
        kept &= mask_sequence(gap, rules.sequence_window)
    if rules.token_veto is not None:
        kept &= veto(gap, rules.token_veto)
    if rules.binary_kl_limit is not None:
        kept &= mask_binary_kl(gap, rules.binary_kl_limit)
    return kept


def kept_for(gap: Gap, rules: RatioRules, *, advantages: Tensor) -> Tensor:
    """True at the tokens that pass all filters of `rules`, bool [N]."""
    kept = kept_tokens(gap, rules)
    if rules.divergence_limit is not None:
        kept &= mask_divergence(gap, advantages=advantages, limit=rules.divergence_limit)
    return kept


def correct(gap: Gap, rules: RatioRules, *, advantages: Tensor) -> TokenCorrections:
    """All corrections of `rules` at once: the weight that `rules.weight` names, 0 for filtered tokens."""
    kept = kept_for(gap, rules, advantages=advantages)
    plain = _plain_weights(gap, rules)
    weights = plain
    if rules.weight != "none":
        weights = capped_by_sign(plain, rules.cap, rules.bad_cap, advantages=advantages).clamp(min=rules.floor)
    return TokenCorrections(weights=torch.where(kept, weights, 0.0), kept=kept, bounded=kept & (weights != plain))


def self_normalising_scale(corrected: TokenCorrections) -> float:
    """1 over the mean weight of the kept tokens, which are those of the whole step: sum(w x) / sum(w) in place of
    sum(w x) / n. 1 where nothing is kept.

    Biased by O(1/n) and of less variance. Source: Hesterberg 1995, doi 10.1080/00401706.1995.10484303.
    """
    total = float(corrected.weights.sum())
    return float(corrected.kept.sum()) / total if total > 0 else 1.0


def effective_share(log_ratios: Tensor) -> float:
    """(sum W)^2 / (n sum W^2) of the n ratios W, whose logs are given, in (0, 1]; 1 of none.

    The share of so many equal ones that would estimate a mean as well. Source: Kong (1992), as in arXiv 2602.17616.
    """
    if not len(log_ratios):
        return 1.0
    log_share = 2.0 * torch.logsumexp(log_ratios, dim=0) - torch.logsumexp(2.0 * log_ratios, dim=0)
    return min(float(torch.exp(log_share)) / len(log_ratios), 1.0)


def interpolated_proximal(*, behavior_logprobs: Tensor, policy_logprobs: Tensor, lags: Tensor) -> Tensor:
    """alpha behavior + (1 - alpha) sg(policy), alpha = 1/(lag + 1): a proximal policy without a forward pass.

    `lags` [N] counts policy versions from the one that sampled the token to the proximal one; the policy is one further
    on, and its logprob is taken to move evenly. A fresh token's proximal is its behavior; the staler a token is, the
    nearer its proximal is to the policy. Source: A-3PO (arXiv 2512.06547).
    """
    alpha = 1.0 / (lags.to(policy_logprobs.dtype) + 1.0)
    return alpha * finite(behavior_logprobs.detach()) + (1.0 - alpha) * finite(policy_logprobs.detach())


def _plain_weights(gap: Gap, rules: RatioRules) -> Tensor:
    if rules.weight == "none":
        return torch.ones_like(gap.logs) if rules.token_window is None else gap.ratios
    return {"truncate": truncate, "sequence": sequence, "geometric": geometric}[rules.weight](gap)
