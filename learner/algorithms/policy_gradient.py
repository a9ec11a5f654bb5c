"""A preset of an estimator of advantages and a policy loss; the rest follows from the knobs.

rewards ─ shaping ─▶ + KL in reward ─▶ estimator ─▶ advantages ─▶ policy loss x correction + KL + entropy ─▶ loss
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from learner.algorithms import advantages, policy_loss, ratios, shaping
from learner.algorithms.algorithm import ClippedGroupAlgorithm, GroupAlgorithm
from learner.algorithms.divergences import gaps_of
from learner.algorithms.knobs import (
    ClipKnobs,
    CorrectionKnobs,
    DivergenceKnobs,
    PositiveKnobs,
    RatioCapKnobs,
    RewardKnobs,
    SampledKnobs,
    ScaleKnobs,
    SignedRatioCapKnobs,
)
from learner.algorithms.old_tokens import LEFT_OUT_OF_OLD, OldTokenBound
from learner.algorithms.policy_loss import PolicyLoss, negative_log_likelihood, token_denominator, token_weights
from learner.algorithms.preset import (
    Advantages,
    Loss,
    LossTokens,
    Mean,
    Passes,
    Preset,
    Rewards,
    ScoredBatch,
    mean_of,
    shaped,
)

NO_PASSES = Passes()

Estimator = Callable[[ScoredBatch, Rewards, Tensor], Advantages]
"""From the step, its rewards, and which tokens [M] take part in the loss, as far as no advantage decides that."""
TokenLoss = Callable[[LossTokens], PolicyLoss]


class SequenceClipConfig(Protocol):
    """Settings with the bounds of a clip."""

    @property
    def clip_low(self) -> float: ...

    @property
    def clip_high(self) -> float: ...


class _ToProximal(Protocol):
    """A loss per token by the ratio to the proximal policy."""

    def __call__(self, *, policy_logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor) -> PolicyLoss: ...


class _ToBehavior(Protocol):
    """A loss per token by the ratio to the behavior policy."""

    def __call__(self, *, policy_logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor) -> PolicyLoss: ...


def policy_gradient(
    config: SampledKnobs,
    *,
    name: str,
    estimator: Estimator,
    loss: TokenLoss,
    passes: Passes = NO_PASSES,
    to_behavior: bool = False,
    pulls: bool = False,
) -> Preset:
    """The preset `name`. `passes` are those that the estimator needs; correction and KL add their own.

    `to_behavior`: the loss takes the ratio to the behavior policy, which moves with the first update already. `pulls`:
    it has a gradient where the advantage is 0, too.
    """
    correction = config if isinstance(config, CorrectionKnobs) and config.corrects else None
    needs_proximal = correction is not None and (
        _drops(correction) or correction.self_normalise or correction.second_moment_limit is not None
    )
    positive = config if isinstance(config, PositiveKnobs) and config.positive_nll else None
    kl_in_loss = config.kl_coefficient > 0 and not config.kl_is_in_reward
    taught = config if isinstance(config, DivergenceKnobs) and config.compared_by else None

    def whole_loss(tokens: LossTokens) -> Loss:
        made = _loss(config, correction, loss, tokens)
        made = made if positive is None else _with_likelihood(positive, tokens, made)
        made = made if taught is None else _with_teacher(taught, tokens, made)
        return _with_observations(config, tokens, made) if config.observation_weight else made

    return Preset(
        name=name,
        loss=whole_loss,
        weights=lambda lengths: token_weights(
            trained_lengths=lengths, aggregation=config.aggregation, constant_length=config.constant_length
        ),
        denominator=lambda lengths: token_denominator(trained_lengths=lengths, aggregation=config.aggregation),
        advantages=lambda batch: _estimate(config, correction, estimator, batch),
        passes=Passes(
            proximal=passes.proximal or config.kl_is_in_reward or needs_proximal,
            reference=passes.reference or config.kl_coefficient > 0,
            teacher=passes.teacher,
            values=passes.values,
            logit_norms=passes.logit_norms,
        ),
        samples_policy=True,
        moves_at_once=to_behavior or (correction is not None and correction.proximal != "recompute"),
        entropy_gradient=config.has_entropy,
        turn_discounts=isinstance(config, RewardKnobs) and config.turn_discount < 1,
        good_reward=None if positive is None else positive.positive_reward,
        rests_on_advantages=not (
            pulls or kl_in_loss or config.has_entropy or positive or taught or config.observation_weight
        ),
        observes=config.observation_weight > 0,
        candidates=0 if taught is None else taught.teacher_tokens,
        bounds_old_tokens=correction is not None,
    )


def _drops(correction: CorrectionKnobs) -> bool:
    return correction.has_filter and not correction.count_left_out


def _estimate(
    config: SampledKnobs, correction: CorrectionKnobs | None, estimator: Estimator, batch: ScoredBatch
) -> Advantages:
    found = shaped(config, batch)
    kept = torch.ones_like(batch.sequences, dtype=torch.bool)
    if config.masks_truncated:
        kept = ~batch.truncated[batch.sequences]
    if correction is not None and _drops(correction):
        kept = kept & ratios.kept_tokens(_gap_of(correction, batch), _rules(correction))
    if correction is not None and correction.second_moment_limit is not None:
        kept = _within_second_moment(correction, correction.second_moment_limit, batch, kept)
    bounded = _BoundedTokens(kept)
    if correction is not None and batch.old_tokens is not None:
        bounded = _without_far_old_tokens(correction, batch.old_tokens, batch, kept)
    kept = bounded.kept
    made = estimator(batch, found.rewards, kept)
    carried = found.carried if made.carried is None else replace(found.carried, baselines=made.carried.baselines)
    made = replace(made, kept=kept, carried=carried, means={**found.means, **made.means, **bounded.means})
    if config.entropy_target is not None:
        made = _with_entropy_weight(config, config.entropy_target, batch, made)
    return made if correction is None else _with_correction(correction, batch, made)


def _with_entropy_weight(config: SampledKnobs, target: float, batch: ScoredBatch, made: Advantages) -> Advantages:
    """The weight of the entropy in this step, by that of the policies that sampled its tokens, and in the next one."""
    assert made.carried is not None, "the rewards were shaped before"
    carried = made.carried.entropy_coefficient
    weight = config.entropy_coefficient if carried is None else carried
    tokens = len(batch.behavior_logprobs)
    measured = float(-ratios.finite(batch.behavior_logprobs).mean()) if tokens else target
    moved = shaping.entropy_weight(
        weight=weight, measured=measured, target=target, step=config.entropy_step, limit=config.entropy_limit
    )
    return replace(
        made,
        entropy_coefficient=moved.now,
        carried=replace(made.carried, entropy_coefficient=moved.following),
        means={**made.means, "entropy_coefficient": moved.now, "sampled_entropy": measured},
    )


def _within_second_moment(correction: CorrectionKnobs, limit: float, batch: ScoredBatch, kept: Tensor) -> Tensor:
    """`kept` without the tokens that this bound leaves out; those of which a filter makes a weight of 0 have no say."""
    gap = _gap_of(correction, batch)
    among = kept & ratios.kept_tokens(gap, _rules(correction))
    return kept & (ratios.within_second_moment(gap, limit=limit, among=among) | ~among)


@dataclass(frozen=True)
class _BoundedTokens:
    """`kept` [M] bool, and metrics."""

    kept: Tensor
    means: Mapping[str, float] = field(default_factory=dict)


def _without_far_old_tokens(
    correction: CorrectionKnobs, bound: OldTokenBound, batch: ScoredBatch, kept: Tensor
) -> _BoundedTokens:
    """`kept` without the tokens that the bound of old ones leaves out, and their number. Those that are out of the loss
    already have no say. How far they are is told by the learner's policy, whatever the correction takes as proximal.
    """
    old = kept & (batch.lags > bound.max_lag)
    if not old.any():
        return _BoundedTokens(kept, {LEFT_OUT_OF_OLD: 0.0})
    assert batch.proximal_logprobs is not None, "the step makes a pass of the policy where it has old tokens"
    among = old & ratios.kept_tokens(_gap_of(correction, batch), _rules(correction))
    far = among & ~ratios.within_second_moment(
        _gap_to(batch, batch.proximal_logprobs), limit=bound.second_moment_limit, among=among
    )
    return _BoundedTokens(kept & ~far, {LEFT_OUT_OF_OLD: float(far.sum())})


def _with_correction(correction: CorrectionKnobs, batch: ScoredBatch, made: Advantages) -> Advantages:
    """The effect of a correction on the whole step, once the advantages are known."""
    if not (_drops(correction) or correction.self_normalise):
        return made
    assert made.kept is not None, "said before the advantages were made"
    corrected = ratios.correct(_gap_of(correction, batch), _rules(correction), advantages=made.advantages)
    kept = made.kept & corrected.kept if _drops(correction) else made.kept
    if not correction.self_normalise:
        return replace(made, kept=kept)
    counted = replace(corrected, weights=torch.where(kept, corrected.weights, 0.0), kept=kept & corrected.kept)
    return replace(made, kept=kept, correction_scale=ratios.self_normalising_scale(counted))


def trajectory_level(estimate: Callable[[ScoredBatch, Tensor], Tensor]) -> Estimator:
    """An estimator of one advantage for a trajectory, from rewards [S] to advantages [S]."""

    def of_tokens(batch: ScoredBatch, rewards: Rewards, kept: Tensor) -> Advantages:
        return Advantages(advantages=estimate(batch, rewards.with_tokens(batch))[batch.sequences])

    return of_tokens


def group_level(config: ScaleKnobs) -> Estimator:
    """A trajectory's reward among those of its group."""
    return trajectory_level(
        lambda batch, rewards: advantages.group(rewards=rewards, groups=batch.groups, scale=config.advantage_scale)
    )


def _gap_of(correction: CorrectionKnobs, batch: ScoredBatch) -> ratios.Gap:
    """Between proximal and behavior policy over the whole step, before its first update.

    Its unit is the loss's, a context: by trajectories, the loss would leave out tokens that the step counts, and be
    scaled by the mean of other weights than its own.
    """
    assert batch.proximal_logprobs is not None, "the preset asked for a pass of the policy"
    proximal = proximal_of(
        correction, recomputed=batch.proximal_logprobs, behavior=batch.behavior_logprobs, lags=batch.lags
    )
    return _gap_to(batch, proximal)


def _gap_to(batch: ScoredBatch, proximal_logprobs: Tensor) -> ratios.Gap:
    contexts = batch.sequences if batch.contexts is None else batch.contexts
    count = int(contexts.max()) + 1 if len(contexts) else 0
    return ratios.Gap(proximal_logprobs, batch.behavior_logprobs, contexts, count)


def proximal_of(correction: CorrectionKnobs | None, *, recomputed: Tensor, behavior: Tensor, lags: Tensor) -> Tensor:
    """The logprobs that ratios are taken to; `recomputed` are the policy's at the step's start."""
    if correction is None or correction.proximal == "recompute":
        return recomputed
    if correction.proximal == "behavior":
        return behavior
    return ratios.interpolated_proximal(behavior_logprobs=behavior, policy_logprobs=recomputed, lags=lags)


def _rules(knobs: CorrectionKnobs) -> ratios.RatioRules:
    return ratios.RatioRules(
        weight=knobs.correction,
        cap=knobs.correction_cap,
        bad_cap=knobs.correction_cap_bad,
        floor=knobs.correction_floor,
        token_window=None if knobs.token_window is None else ratios.RatioWindow(*knobs.token_window),
        sequence_window=None if knobs.sequence_window is None else ratios.RatioWindow(*knobs.sequence_window),
        token_veto=knobs.token_veto,
        divergence_limit=knobs.divergence_limit,
        binary_kl_limit=knobs.binary_kl_limit,
    )


def _loss(config: SampledKnobs, correction: CorrectionKnobs | None, policy_loss: TokenLoss, tokens: LossTokens) -> Loss:
    if correction is not None:
        anchor = tokens.policy_logprobs.detach() if correction.proximal == "interpolate" else tokens.proximal_logprobs
        anchor = proximal_of(correction, recomputed=anchor, behavior=tokens.behavior_logprobs, lags=tokens.lags)
        tokens = replace(tokens, proximal_logprobs=anchor)
    made = policy_loss(tokens)
    losses = made.losses
    corrected = None
    if correction is not None and correction.proximal != "behavior":
        found = _corrected(correction, tokens)
        losses = losses * found.weights * tokens.correction_scale
        corrected = found.bounded if correction.correction != "none" else None
    losses, means = _with_penalties(config, tokens, losses)
    return Loss(total=(tokens.weights * losses).sum(), clipped=made.clipped, corrected=corrected, means=means)


def _with_likelihood(knobs: PositiveKnobs, tokens: LossTokens, loss: Loss) -> Loss:
    """The loss with the likelihood of good trajectories: arXiv 2504.05118, section 4.3."""
    weights = tokens.good_weights
    assert weights is not None, "the preset says which trajectories are good"
    losses = negative_log_likelihood(policy_logprobs=tokens.policy_logprobs)
    return replace(
        loss,
        total=loss.total + knobs.positive_nll * (weights * losses).sum(),
        means={**loss.means, "positive_nll": mean_of(losses[weights > 0])},
    )


def _with_teacher(knobs: DivergenceKnobs, tokens: LossTokens, loss: Loss) -> Loss:
    """The loss with the divergence from a teacher. No ratio corrects it: it is of each token's place, whoever sampled
    what is before it (GKD, arXiv 2306.13649).
    """
    gaps, taught = gaps_of(knobs, tokens), tokens.taught
    found = {"teacher_divergence": mean_of(gaps if taught is None else gaps[taught])}
    if taught is not None:
        gaps = torch.where(taught, gaps, 0.0)
        found["taught_share"] = mean_of(taught.float())
    return replace(
        loss,
        total=loss.total + knobs.divergence_weight * (tokens.weights * gaps).sum(),
        means={**loss.means, **found},
    )


def _with_observations(config: SampledKnobs, tokens: LossTokens, loss: Loss) -> Loss:
    """The loss with the likelihood of what the environment said. It is not the policy's, so that no ratio, advantage or
    filter has a part in it.
    """
    assert tokens.observed_logprobs is not None, "the preset asked for them"
    losses = negative_log_likelihood(policy_logprobs=tokens.observed_logprobs)
    return replace(
        loss,
        total=loss.total + config.observation_weight * tokens.observed_weight * losses.sum(),
        means={**loss.means, "observation_loss": mean_of(losses)},
    )


def _corrected(knobs: CorrectionKnobs, tokens: LossTokens) -> ratios.TokenCorrections:
    count = len(tokens.sequence_weights)
    gap = ratios.Gap(tokens.proximal_logprobs, tokens.behavior_logprobs, tokens.sequences, count)
    return ratios.correct(gap, _rules(knobs), advantages=tokens.advantages)


def _with_penalties(config: SampledKnobs, tokens: LossTokens, losses: Tensor) -> tuple[Tensor, dict[str, Mean]]:
    """The losses with the KL penalty and the entropy bonus, and what the first measured."""
    means = {}
    if config.kl_coefficient > 0:
        assert tokens.reference_logprobs is not None, "the preset asked for a pass of the reference"
        penalty = ratios.penalty(
            form="k3" if config.kl_is_in_reward else config.kl_form,
            policy_logprobs=tokens.policy_logprobs,
            reference_logprobs=tokens.reference_logprobs,
        )
        means["reference_kl"] = mean_of(penalty)
        if config.kl_ratio:
            penalty = ratios.weighted(
                form=config.kl_form,
                policy_logprobs=tokens.policy_logprobs,
                reference_logprobs=tokens.reference_logprobs,
                behavior_logprobs=tokens.behavior_logprobs,
            )
        if not config.kl_is_in_reward:
            losses = losses + config.kl_coefficient * penalty
    given = tokens.entropy_coefficient
    weight = config.entropy_coefficient if given is None else given
    if weight != 0:
        assert tokens.entropy is not None, "the preset asked for the entropy"
        losses = losses - weight * tokens.entropy
    return losses, means


def clip(config: ClipKnobs) -> TokenLoss:
    """The clip with the config's bounds."""

    def loss(tokens: LossTokens) -> policy_loss.PolicyLoss:
        return policy_loss.clip(
            policy_logprobs=tokens.policy_logprobs,
            proximal_logprobs=tokens.proximal_logprobs,
            advantages=tokens.advantages,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
        )

    return loss


def of_group(
    config: GroupAlgorithm | ClippedGroupAlgorithm, loss: TokenLoss, *, to_behavior: bool = False, pulls: bool = False
) -> Preset:
    """The preset of group advantages and a loss; see `policy_gradient`."""
    return policy_gradient(
        config, name=config.type, estimator=group_level(config), loss=loss, to_behavior=to_behavior, pulls=pulls
    )


def to_proximal(loss: _ToProximal) -> TokenLoss:
    """A loss by the ratio to the proximal policy, as a preset calls it."""
    return lambda tokens: loss(
        policy_logprobs=tokens.policy_logprobs,
        proximal_logprobs=tokens.proximal_logprobs,
        advantages=tokens.advantages,
    )


def to_behavior(loss: _ToBehavior) -> TokenLoss:
    """A loss by the ratio to the behavior policy, as a preset calls it."""
    return lambda tokens: loss(
        policy_logprobs=tokens.policy_logprobs,
        behavior_logprobs=tokens.behavior_logprobs,
        advantages=tokens.advantages,
    )


def reinforce(config: RatioCapKnobs) -> TokenLoss:
    """REINFORCE by a capped ratio to the behavior policy."""
    bad_cap = config.ratio_cap_bad if isinstance(config, SignedRatioCapKnobs) else None
    return to_behavior(partial(policy_loss.reinforce, cap=config.ratio_cap, bad_cap=bad_cap))


def sequence_clip(config: SequenceClipConfig, *, product: bool = False) -> TokenLoss:
    """The clip of the whole trajectory's ratio, with the config's bounds; see `policy_loss.sequence_clip`."""

    def loss(tokens: LossTokens) -> PolicyLoss:
        return policy_loss.sequence_clip(
            policy_logprobs=tokens.policy_logprobs,
            proximal_logprobs=tokens.proximal_logprobs,
            advantages=tokens.advantages,
            sequences=tokens.sequences,
            count=len(tokens.sequence_weights),
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            product=product,
        )

    return loss
