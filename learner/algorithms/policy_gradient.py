"""Puts a preset together from an estimator of advantages and a policy loss; the rest follows from the knobs.

rewards ─ shaping ─▶ + KL in reward ─▶ estimator ─▶ advantages ─▶ policy loss x correction + KL + entropy ─▶ loss
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from learner.algorithms import advantages, corrections, kl, shaping
from learner.algorithms.aggregation import token_weights
from learner.algorithms.config import StreamedKnobs
from learner.algorithms.knobs import CorrectionKnobs, RewardKnobs, ScaleKnobs
from learner.algorithms.policy_loss import PolicyLoss
from learner.algorithms.preset import Advantages, Loss, LossTokens, Mean, Passes, Preset, ScoredBatch


@dataclass(frozen=True)
class Rewards:
    """What an estimator starts from: `of_trajectories` [S], shaped, and `of_tokens` [M], the KL penalty, or None."""

    of_trajectories: Tensor
    of_tokens: Tensor | None

    def with_tokens(self, batch: ScoredBatch) -> Tensor:
        """Each trajectory's reward with those of its tokens, [S]."""
        if self.of_tokens is None:
            return self.of_trajectories
        return self.of_trajectories + shaping.to_trajectories(
            token_rewards=self.of_tokens, sequences=batch.sequences, trajectories=len(batch.rewards)
        )

    def at_tokens(self, batch: ScoredBatch) -> Tensor:
        """The reward of each token: the trajectory's at its last one, [M]."""
        rewards = shaping.to_tokens(rewards=self.of_trajectories, sequences=batch.sequences)
        return rewards if self.of_tokens is None else rewards + self.of_tokens


NO_PASSES = Passes()

Estimator = Callable[[ScoredBatch, Rewards], Advantages]
TokenLoss = Callable[[LossTokens], PolicyLoss]


def policy_gradient(
    config: StreamedKnobs,
    *,
    name: str,
    estimator: Estimator,
    loss: TokenLoss,
    passes: Passes = NO_PASSES,
    to_behavior: bool = False,
) -> Preset:
    """The preset `name`. `passes` are those that the estimator needs; correction and KL add their own.

    `to_behavior`: the loss takes the ratio to the behavior policy, which moves with the first update already.
    """
    correction = config if isinstance(config, CorrectionKnobs) else None
    in_reward = config.kl_coefficient > 0 and config.kl_in == "reward"
    drops = correction is not None and correction.has_window and not correction.count_left_out
    return Preset(
        name=name,
        loss=lambda tokens: _loss(config, correction, loss, tokens),
        weights=lambda lengths: token_weights(
            trained_lengths=lengths, aggregation=config.aggregation, constant_length=config.constant_length
        ),
        advantages=lambda batch: estimator(batch, shaped(config, batch, kl_in_reward(config, batch))),
        kept=lambda batch: _kept(config, correction if drops else None, batch),
        passes=Passes(
            proximal=passes.proximal or in_reward or drops,
            reference=passes.reference or config.kl_coefficient > 0,
            teacher=passes.teacher,
            values=passes.values,
        ),
        samples_policy=True,
        ratio_to_behavior=to_behavior,
        entropy_gradient=config.entropy_coefficient != 0,
    )


def trajectory_level(estimate: Callable[[ScoredBatch, Tensor], Tensor]) -> Estimator:
    """An estimator of one advantage for a trajectory, from rewards [S] to advantages [S]."""

    def of_tokens(batch: ScoredBatch, rewards: Rewards) -> Advantages:
        return Advantages(advantages=estimate(batch, rewards.with_tokens(batch))[batch.sequences])

    return of_tokens


def group_level(config: ScaleKnobs) -> Estimator:
    """A trajectory's reward among those of its group."""
    return trajectory_level(
        lambda batch, rewards: advantages.group(rewards=rewards, groups=batch.groups, scale=config.advantage_scale)
    )


def shaped(config: RewardKnobs, batch: ScoredBatch, of_tokens: Tensor | None = None) -> Rewards:
    """The rewards after what the knobs do to them."""
    rewards = shaping.scale(rewards=batch.rewards, factor=config.reward_scale)
    if config.reward_clip is not None:
        rewards = shaping.clip(rewards=rewards, low=-config.reward_clip, high=config.reward_clip)
    if config.overlong_length is not None:
        lengths = torch.bincount(batch.sequences, minlength=len(rewards))
        rewards = rewards + shaping.overlong_penalty(
            lengths=lengths, max_length=config.overlong_length, buffer=config.overlong_buffer
        )
    rewards = shaping.truncation(
        rewards=rewards, truncated=batch.truncated, rule=config.truncated, penalty=config.truncated_penalty
    ).rewards
    return Rewards(of_trajectories=rewards, of_tokens=of_tokens)


def kl_in_reward(config: StreamedKnobs, batch: ScoredBatch) -> Tensor | None:
    """The penalty at each token, [M], as the policy stood at the step's start."""
    if config.kl_coefficient == 0 or config.kl_in == "loss":
        return None
    assert batch.proximal_logprobs is not None, "the preset asked for a pass of the policy"
    assert batch.reference_logprobs is not None, "the preset asked for a pass of the reference"
    return shaping.kl_rewards(
        policy_logprobs=batch.proximal_logprobs,
        reference_logprobs=batch.reference_logprobs,
        beta=config.kl_coefficient,
        form="k1",
    )


def _kept(config: RewardKnobs, correction: CorrectionKnobs | None, batch: ScoredBatch) -> Tensor:
    kept = torch.ones_like(batch.sequences, dtype=torch.bool)
    if config.truncated == "mask":
        kept = ~batch.truncated[batch.sequences]
    if correction is None:
        return kept
    assert batch.proximal_logprobs is not None, "the preset asked for a pass of the policy"
    return kept & corrections.kept_tokens(
        rules=_rules(correction),
        proximal_logprobs=proximal_of(
            correction, recomputed=batch.proximal_logprobs, behavior=batch.behavior_logprobs, lags=batch.lags
        ),
        behavior_logprobs=batch.behavior_logprobs,
        sequences=batch.sequences,
        count=len(batch.rewards),
    )


def proximal_of(correction: CorrectionKnobs | None, *, recomputed: Tensor, behavior: Tensor, lags: Tensor) -> Tensor:
    """The logprobs that ratios are taken to; `recomputed` are the policy's at the step's start."""
    if correction is None or correction.proximal == "recompute":
        return recomputed
    if correction.proximal == "behavior":
        return behavior
    return corrections.interpolated_proximal(behavior_logprobs=behavior, policy_logprobs=recomputed, lags=lags)


def _rules(knobs: CorrectionKnobs) -> corrections.Rules:
    return corrections.Rules(
        weight=knobs.correction,
        cap=knobs.correction_cap,
        token_window=None if knobs.token_window is None else corrections.Window(*knobs.token_window),
        sequence_window=None if knobs.sequence_window is None else corrections.Window(*knobs.sequence_window),
    )


def _loss(
    config: StreamedKnobs, correction: CorrectionKnobs | None, policy_loss: TokenLoss, tokens: LossTokens
) -> Loss:
    if correction is not None:
        anchor = tokens.policy_logprobs.detach() if correction.proximal == "interpolate" else tokens.proximal_logprobs
        anchor = proximal_of(correction, recomputed=anchor, behavior=tokens.behavior_logprobs, lags=tokens.lags)
        tokens = replace(tokens, proximal_logprobs=anchor)
    made = policy_loss(tokens)
    losses = made.losses
    corrected = None
    if correction is not None and correction.proximal != "behavior":
        weights = _correction_weights(correction, tokens)
        losses = losses * weights
        corrected = weights >= correction.correction_cap if correction.correction != "none" else None
    losses, means = _with_penalties(config, tokens, losses)
    return Loss(total=(tokens.weights * losses).sum(), clipped=made.clipped, corrected=corrected, means=means)


def _correction_weights(knobs: CorrectionKnobs, tokens: LossTokens) -> Tensor:
    return corrections.correct(
        rules=_rules(knobs),
        proximal_logprobs=tokens.proximal_logprobs,
        behavior_logprobs=tokens.behavior_logprobs,
        sequences=tokens.sequences,
        count=len(tokens.sequence_weights),
    ).weights


def _with_penalties(config: StreamedKnobs, tokens: LossTokens, losses: Tensor) -> tuple[Tensor, dict[str, Mean]]:
    """The losses with the KL penalty and the entropy bonus, and what the first measured."""
    means = {}
    if config.kl_coefficient > 0:
        assert tokens.reference_logprobs is not None, "the preset asked for a pass of the reference"
        penalty = kl.penalty(
            form=config.kl_form if config.kl_in == "loss" else "k3",
            policy_logprobs=tokens.policy_logprobs,
            reference_logprobs=tokens.reference_logprobs,
        )
        means["reference_kl"] = mean_of(penalty)
        if config.kl_in == "loss":
            losses = losses + config.kl_coefficient * penalty
    if config.entropy_coefficient != 0:
        assert tokens.entropy is not None, "the preset asked for the entropy"
        losses = losses - config.entropy_coefficient * tokens.entropy
    return losses, means


def mean_of(values: Tensor) -> Mean:
    """The measure of the mean of `values`, without gradient."""
    return Mean(total=values.detach().sum(), count=values.new_tensor(values.numel()))
