"""Policy losses per token, the critic's loss, and the weights of tokens in a step's loss.

Tensors are [N], N the trained tokens of a microbatch, unless a docstring says otherwise.

`policy` logprobs carry the gradient; `proximal` are the learner's when the step began, `behavior` those of the engine
that sampled. r = exp(policy - proximal), rho = exp(policy - behavior), sg = stop-gradient. A loss in r wants a
correction for the gap between proximal and behavior (`learner.algorithms.ratios`); a loss in rho has corrected it
already. Losses and gradients are finite for every logprob, -inf included.

Where the policy has not moved (policy = proximal = behavior) every loss here but that of likelihood has the gradient
-advantage, which is REINFORCE's.

The losses of a step's tokens become one number by an aggregation: a weight per trajectory, shared by its tokens and
computed once for the whole step from global counts. The loss is the sum of weight x token loss, so no split into
microbatches or ranks can change it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.algorithms.knobs import Aggregation
from learner.algorithms.ratios import (
    binary_kl,
    bounded,
    capped,
    capped_by_sign,
    finite,
    log_gap,
    ratio,
    sequence_means,
    sequence_sums,
)


@dataclass(frozen=True)
class PolicyLoss:
    """`losses` [N] to be minimized; `clipped` [N] bool, true where a bound took effect, or None for a loss without one.

    In `clip`, `sequence_clip`, `gmpo` and `dppo` a clipped token has no gradient of the policy's gain; in `cispo`,
    `reinforce` and `topr` it has one, with the bounded ratio as its weight.
    """

    losses: Tensor
    clipped: Tensor | None


def clip(
    *,
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    With `dual_clip` c, the loss of a token with A < 0 is not above c |A|. Sources: PPO (arXiv 1707.06347), dual clip
    (arXiv 1912.09729), the proximal anchor in place of the behavior policy (arXiv 2110.00641).
    """
    moved = ratio(numerator=policy_logprobs, denominator=proximal_logprobs)
    gain, clipped = pessimistic(moved, advantages, low=1.0 - clip_low, high=1.0 + clip_high)
    if dual_clip is not None:
        floor = torch.where(advantages < 0, dual_clip * advantages, -torch.inf)
        clipped = clipped | (gain < floor)
        gain = torch.maximum(gain, floor)
    return PolicyLoss(losses=-gain, clipped=clipped)


def sequence_clip(
    *,
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    count: int,
    clip_low: float,
    clip_high: float,
    product: bool = False,
) -> PolicyLoss:
    """`clip` with the trajectory's ratio s = exp(mean over its tokens of policy - proximal) in place of each token's.

    `sequences` [N] int64 numbers the `count` trajectories; each must be whole, since the mean is over all its tokens.
    The value of s is the trajectory's, its gradient reaches each token through that token's own logprob:
    s_t = sg(s) exp(policy_t - sg(policy_t)). So advantages may differ from token to token, and where they do not, the
    mean over the trajectory's tokens has exactly the gradient of -min(s A, clip(s) A). Source: GSPO and GSPO-token
    (arXiv 2507.18071).

    With `product`, s is the ratio of the probabilities of the whole trajectory, exp(sum over its tokens), and the sum
    over the tokens has that gradient: the clip of RLOO in asynchronous RLHF (arXiv 2410.18252). A mean over many tokens
    hardly leaves 0.8 to 1.2, their product does.
    """
    gaps = log_gap(numerator=policy_logprobs, denominator=proximal_logprobs).detach()
    over = sequence_sums if product else sequence_means
    shared = bounded(over(values=gaps, sequences=sequences, count=count))[sequences]
    moved = torch.exp(shared + own_gradient(finite(policy_logprobs)))
    gain, clipped = pessimistic(moved, advantages, low=1.0 - clip_low, high=1.0 + clip_high)
    return PolicyLoss(losses=-gain, clipped=clipped)


def gmpo(
    *,
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    count: int,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """-s A, s the geometric mean over the trajectory of its tokens' ratios, each of which is clipped first.

    A token's log ratio, policy - proximal, is not above `clip_high` where A > 0 and not below -`clip_low` elsewhere, in
    nats; a clipped token has no gradient. The gradient of s reaches each other token through its own logprob, as in
    `sequence_clip`. Source: GMPO (arXiv 2507.20673), which clips at 0.4 both ways.
    """
    gaps = log_gap(numerator=policy_logprobs, denominator=proximal_logprobs)
    limited = torch.where(advantages > 0, gaps.clamp(max=clip_high), gaps.clamp(min=-clip_low))
    shared = bounded(sequence_means(values=limited.detach(), sequences=sequences, count=count))[sequences]
    moved = torch.exp(shared + own_gradient(limited))
    return PolicyLoss(losses=-moved * advantages, clipped=limited.detach() != gaps.detach())


def sapo(
    *,
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    temperature_positive: float,
    temperature_negative: float,
) -> PolicyLoss:
    """-(4/tau) sigmoid(tau (r - 1)) A: a soft gate in place of the clip, tau by the sign of the advantage.

    The weight of a token's gradient is r 4 p (1 - p), p the sigmoid: 1 at r = 1, and falling off to both sides without
    ever being cut. A larger tau falls faster. Source: SAPO (arXiv 2511.20347): 1.0 for A > 0 and 1.05 elsewhere.
    """
    moved = ratio(numerator=policy_logprobs, denominator=proximal_logprobs)
    # Of two numbers alone `where` makes float32, whatever the tokens are.
    tau = torch.where(advantages > 0, temperature_positive, torch.full_like(advantages, temperature_negative))
    return PolicyLoss(losses=-4.0 / tau * torch.sigmoid(tau * (moved - 1.0)) * advantages, clipped=None)


def cispo(
    *, policy_logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> PolicyLoss:
    """-sg(clip(rho, 1 - clip_low, 1 + clip_high)) A policy: every token keeps a gradient, of bounded weight.

    `clip_low = 1` is no lower bound. Source: MiniMax-M1 (arXiv 2506.13585).
    """
    plain = ratio(numerator=policy_logprobs, denominator=behavior_logprobs).detach()
    weight = plain.clamp(1.0 - clip_low, 1.0 + clip_high)
    return PolicyLoss(losses=-weight * advantages * finite(policy_logprobs), clipped=weight != plain)


def reinforce(
    *,
    policy_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    cap: float | None,
    bad_cap: float | None = None,
) -> PolicyLoss:
    """-sg(min(rho, cap)) A policy; `cap = None` leaves rho as it is (up to exp(20)). `bad_cap`, if there is one, takes
    its place where the advantage is negative.

    A cap of 1 is REINFORCE with truncated importance sampling (doi 10.1198/106186008X320456), one of 2 to 10 AIPO of
    LlamaRL (arXiv 2505.24034).
    """
    plain = ratio(numerator=policy_logprobs, denominator=behavior_logprobs).detach()
    weights = capped_by_sign(plain, cap, bad_cap, advantages=advantages)
    losses = -weights * advantages * finite(policy_logprobs)
    return PolicyLoss(losses=losses, clipped=None if cap is None and bad_cap is None else plain > weights)


def topr(
    *,
    policy_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    positive_weight: float = 1.0,
    negative_weight: float = 1.0,
) -> PolicyLoss:
    """-A policy where A > 0; -sg(min(rho, 1)) A policy elsewhere; each side times its weight.

    Good tokens are learned as examples, bad ones are pushed down only as far as the policy would still sample them.
    Source: tapered off-policy REINFORCE (arXiv 2503.14286), whose ratio is the trajectory's; here it is the token's.
    """
    plain = ratio(numerator=policy_logprobs, denominator=behavior_logprobs).detach()
    good = advantages > 0
    weight = torch.where(good, positive_weight, negative_weight * plain.clamp(max=1.0))
    return PolicyLoss(losses=-weight * advantages * finite(policy_logprobs), clipped=~good & (plain > 1.0))


@dataclass(frozen=True)
class GammaWeight:
    """phi(W) = W^power exp(rate (1 - W)): 1 at W = 1, and falling to 0 as W goes to 0 and as it grows. It is largest at
    W = power / rate.
    """

    power: float
    rate: float

    def log(self, log_ratios: Tensor) -> Tensor:
        """log phi of exp(`log_ratios`), whatever their shape."""
        return self.power * log_ratios + self.rate * (1.0 - torch.exp(log_ratios))


def vespo(
    *,
    policy_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    count: int,
    positive: GammaWeight,
    negative: GammaWeight,
) -> PolicyLoss:
    """-sg(phi(W)) A policy, W the ratio of the probabilities of the whole trajectory, exp(sum of policy - behavior).

    `sequences` [N] int64 numbers the `count` trajectories, each whole. `positive` is phi where A >= 0, `negative`
    elsewhere. No length normalises W: phi bounds what a trajectory far from the policy may weigh, on both sides and
    without a cut. Source: VESPO (arXiv 2602.10693).
    """
    gaps = log_gap(numerator=policy_logprobs, denominator=behavior_logprobs).detach()
    logs = bounded(sequence_sums(values=gaps, sequences=sequences, count=count))[sequences]
    weight = torch.exp(torch.where(advantages >= 0, positive.log(logs), negative.log(logs)))
    return PolicyLoss(losses=-weight * advantages * finite(policy_logprobs), clipped=None)


def sequence_reinforce(
    *,
    policy_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    count: int,
    cap: float | None,
) -> PolicyLoss:
    """-sg(min(W, cap)) A policy, W the ratio of the probabilities of the whole trajectory, as in `vespo`.

    `sequences` [N] int64 numbers the `count` trajectories, each whole. Without a cap it is the unbiased estimate of the
    policy gradient, whatever policy sampled. Source: importance sampling by sequences, as in arXiv 2602.17616.
    """
    gaps = log_gap(numerator=policy_logprobs, denominator=behavior_logprobs).detach()
    weight = capped(torch.exp(bounded(sequence_sums(values=gaps, sequences=sequences, count=count))), cap)[sequences]
    return PolicyLoss(losses=-weight * advantages * finite(policy_logprobs), clipped=None)


def kimi(*, policy_logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, tau: float) -> PolicyLoss:
    """-A policy + tau/2 (policy - proximal)^2, an online mirror descent step. Source: Kimi k1.5 (arXiv 2501.12599)."""
    gap = log_gap(numerator=policy_logprobs, denominator=proximal_logprobs)
    return PolicyLoss(losses=-advantages * finite(policy_logprobs) + tau / 2 * gap.square(), clipped=None)


def dro(*, policy_logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, beta: float) -> PolicyLoss:
    """-A policy + beta/2 (policy - behavior)^2: `kimi` with who sampled as anchor, whatever policy that was.

    The pull is on tokens without an advantage, too. The slope of a token is 0 where the policy is A / beta nats above
    the behavior policy. Source: direct reward optimization (arXiv 2405.19107), whose square is the trajectory's; here
    it is the token's.
    """
    return kimi(policy_logprobs=policy_logprobs, proximal_logprobs=behavior_logprobs, advantages=advantages, tau=beta)


def kl_cov(
    *, policy_logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, pulled: Tensor, pull: float
) -> PolicyLoss:
    """-r A, plus pull |policy - proximal| at the tokens `pulled` [N] bool; no clip. Source: KL-Cov (arXiv 2505.22617).

    The distance has the slope of its sign alone, and 0 where the policy has not moved.
    """
    gap = log_gap(numerator=policy_logprobs, denominator=proximal_logprobs)
    moved = ratio(numerator=policy_logprobs, denominator=proximal_logprobs)
    return PolicyLoss(losses=torch.where(pulled, pull * gap.abs(), 0.0) - moved * advantages, clipped=None)


def dppo(
    *,
    policy_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    delta_low: float,
    delta_high: float,
    kappa: float,
    kl_limit: float | None = None,
) -> PolicyLoss:
    """-rho A + kappa (policy - behavior)^2, the first term dropped where the token's probability has moved too far.

    Too far is p - p_behavior > delta_high for A > 0 and < -delta_low for A < 0: a difference of probabilities, so that
    a rare token may change by a large factor and a common one may not. With `kl_limit` it is, in the same directions,
    a KL divergence of p_behavior from p above that, in nats, of the token against all others. The second term stays on
    every token. Source: the binary total variation and the binary KL form of DPPO (arXiv 2602.04879).
    """
    moved = ratio(numerator=policy_logprobs, denominator=behavior_logprobs)
    change = (torch.exp(policy_logprobs) - torch.exp(behavior_logprobs)).detach()
    if kl_limit is None:
        rose, fell = change > delta_high, change < -delta_low
    else:
        far = binary_kl(logprobs=behavior_logprobs, against=policy_logprobs) > kl_limit
        rose, fell = far & (change > 0), far & (change < 0)
    dropped = ((advantages > 0) & rose) | ((advantages < 0) & fell)
    gain = torch.where(dropped, 0.0, moved * advantages)
    gap = log_gap(numerator=policy_logprobs, denominator=behavior_logprobs)
    return PolicyLoss(losses=kappa * gap.square() - gain, clipped=dropped)


def likelihood_gain(*, policy_logprobs: Tensor, advantages: Tensor) -> PolicyLoss:
    """-A policy, without a ratio: for advantages that hold whatever policy sampled."""
    return PolicyLoss(losses=-advantages * finite(policy_logprobs), clipped=None)


def negative_log_likelihood(*, policy_logprobs: Tensor) -> Tensor:
    """-log p of each token, in nats."""
    return -policy_logprobs


def own_gradient(values: Tensor) -> Tensor:
    """0, with the gradient of `values`."""
    return values - values.detach()


def pessimistic(
    moved: Tensor, advantages: Tensor, *, low: float | Tensor, high: float | Tensor
) -> tuple[Tensor, Tensor]:
    """The smaller of the plain and the bounded gain, and where it is the bounded one; bounds [N] are each token's."""
    plain = moved * advantages
    limited = moved.clamp(low, high) * advantages  # type: ignore[arg-type]  # both are numbers, or both tensors
    return torch.minimum(plain, limited), limited < plain


@dataclass(frozen=True)
class ValueLoss:
    """`losses` [N] to be minimized; `clipped` [N] bool, true where the bound leaves no gradient, None without one."""

    losses: Tensor
    clipped: Tensor | None


def value_loss(*, values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> ValueLoss:
    """1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) per token, all [N].

    `old_values` are the critic's when the step began, `returns` its targets; the gradient flows to `values`. Without
    `clip`, 1/2 (V - R)^2. Source: PPO's reference implementation, as in arXiv 2005.12729.
    """
    plain = (values - returns).square()
    if clip is None:
        return ValueLoss(losses=plain / 2, clipped=None)
    limited = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return ValueLoss(losses=torch.maximum(plain, limited) / 2, clipped=limited > plain)


def explained_variance(*, values: Tensor, returns: Tensor) -> float | None:
    """1 - Var(returns - values)/Var(returns) over the M tokens of a whole step.

    1 is perfect, 0 no better than a constant. None where the returns do not vary, so that there is nothing to explain.
    """
    # Equal returns can have a mean that differs from them by rounding; they have no spread all the same.
    if returns.numel() < 2 or bool((returns == returns[0]).all()):
        return None
    targets = returns.detach().double()
    unexplained = (targets - values.detach().double()).var(correction=0)
    return float(1 - unexplained / targets.var(correction=0))


def token_weights(
    *, trained_lengths: NDArray[np.int64], aggregation: Aggregation, constant_length: int
) -> NDArray[np.float64]:
    """The weight of each token of each trajectory, [S], given their `trained_lengths` [S] in tokens.

    A trajectory without trained tokens has weight 0 and is not counted. `token`: 1/tokens (arXiv 2503.14476);
    `sequence_mean`: 1/(trajectories x its length) (arXiv 2402.03300); `sequence_sum`: 1/trajectories;
    `constant`: 1/(trajectories x constant_length) (arXiv 2503.20783).

    A token that a filter takes out of the loss leaves the counts too when `trained_lengths` are those without it; with
    the original lengths, and weights given to the remaining tokens only, the original count stays.
    """
    present = trained_lengths > 0
    count = token_denominator(trained_lengths=trained_lengths, aggregation=aggregation)
    if count == 0:
        return np.zeros(trained_lengths.shape, dtype=np.float64)
    if aggregation == "sequence_mean":
        return present / (count * np.maximum(trained_lengths, 1).astype(np.float64))
    return present / (count * constant_length if aggregation == "constant" else count)


def token_denominator(*, trained_lengths: NDArray[np.int64], aggregation: Aggregation) -> float:
    """The count over the trajectories that `token_weights` divides by: their tokens, or those of them with tokens."""
    return float(trained_lengths.sum() if aggregation == "token" else (trained_lengths > 0).sum())


def once_for_each(
    weigh: Callable[[NDArray[np.int64]], NDArray[np.float64]],
    *,
    trained_lengths: NDArray[np.int64],
    trajectories: NDArray[np.int64],
) -> NDArray[np.float64]:
    """The weight of each token of each sequence, [S]; a trajectory counts once, by the tokens of all its sequences.

    `trained_lengths` and `trajectories` are of the sequences, [S]; `weigh` is one of the functions here, for
    trajectories.
    """
    _, of_trajectory = np.unique(trajectories, return_inverse=True)
    return weigh(whole_lengths(trained_lengths=trained_lengths, trajectories=trajectories))[of_trajectory]


def whole_lengths(*, trained_lengths: NDArray[np.int64], trajectories: NDArray[np.int64]) -> NDArray[np.int64]:
    """Trained tokens of each trajectory, from those of its sequences."""
    _, of_trajectory = np.unique(trajectories, return_inverse=True)
    return np.bincount(of_trajectory, weights=trained_lengths).astype(np.int64)


def sequence_weights(*, trained_lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """The weight of each sequence in a loss per sequence (as in kto), [S]: the mean over those with trained tokens."""
    return _mean_over(trained_lengths > 0)


def pair_weights(*, pairs: NDArray[np.int64], trained_lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """The weight of a pair's loss in the mean over pairs, at both its sequences, [S]; 0 for a sequence without a pair.

    `pairs` [P, 2] are chosen and rejected sequence (0 to S - 1); a sequence is in one pair at most. A pair of which one
    side has no trained token is not counted. Summed over the chosen, the weights are 1, whatever the split.
    """
    assert len(np.unique(pairs)) == pairs.size, "a sequence is in more than one pair"
    per_pair = _mean_over((trained_lengths[pairs[:, 0]] > 0) & (trained_lengths[pairs[:, 1]] > 0))
    weights = np.zeros(trained_lengths.shape, dtype=np.float64)
    weights[pairs] = per_pair[:, np.newaxis]
    return weights


def _mean_over(counted: NDArray[np.bool_]) -> NDArray[np.float64]:
    return counted / float(max(1, counted.sum()))
