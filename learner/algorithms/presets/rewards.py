"""From the rewards that came with a step to those that an estimator of advantages starts from.

verifier's reward ─ normalised, scaled, clipped ─ penalties ─▶ of trajectories
policy and reference at each token ─ KL, times its coefficient ─▶ of tokens
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from learner.algorithms import divergences, shaping
from learner.algorithms.presets.preset import Carried, ScoredBatch
from learner.algorithms.reward_knobs import KlKnobs, KlLossKnobs, RewardKnobs


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


@dataclass(frozen=True)
class Shaped:
    """`rewards`, what the next step is to carry on with, and measures of the whole step."""

    rewards: Rewards
    carried: Carried
    means: Mapping[str, float] = field(default_factory=dict)


def shaped(config: KlLossKnobs, batch: ScoredBatch) -> Shaped:
    """The rewards after what the knobs do to them. Without RewardKnobs they stay as they came."""
    rewards, carried = batch.rewards, batch.carried
    if isinstance(config, RewardKnobs):
        rewards, carried = _normalised(config, rewards, carried)
        rewards = _penalised(config, batch, _bounded(config, rewards))
    if isinstance(config, KlKnobs) and config.kl_is_in_reward:
        return _with_kl(config, batch, rewards, carried)
    return Shaped(rewards=Rewards(of_trajectories=rewards, of_tokens=None), carried=carried)


def _normalised(config: RewardKnobs, rewards: Tensor, carried: Carried) -> tuple[Tensor, Carried]:
    if config.reward_normalisation == "none":
        return rewards, carried
    normal, moments = shaping.running_normalisation(
        rewards=rewards, moments=carried.rewards, centre=config.reward_normalisation == "standardise"
    )
    return normal, replace(carried, rewards=moments)


def _bounded(config: RewardKnobs, rewards: Tensor) -> Tensor:
    rewards = shaping.scale(rewards=rewards, factor=config.reward_scale)
    low, high = config.reward_bounds
    return rewards if low is None and high is None else shaping.clip(rewards=rewards, low=low, high=high)


def _penalised(config: RewardKnobs, batch: ScoredBatch, rewards: Tensor) -> Tensor:
    lengths = torch.bincount(batch.sequences, minlength=len(rewards))
    if config.overlong_length is not None:
        penalty = shaping.overlong_penalty(
            lengths=lengths, max_length=config.overlong_length, buffer=config.overlong_buffer
        )
        rewards = rewards + config.overlong_factor * penalty
    if config.length_penalty:
        penalty = shaping.length_penalty(lengths=lengths, max_length=config.length_limit)
        rewards = rewards + config.length_penalty * penalty
    if config.relative_length:
        correct = batch.rewards >= config.relative_length_reward
        ranks = shaping.relative_length(lengths=lengths, groups=batch.groups, correct=correct)
        rewards = rewards + config.relative_length * ranks
    if config.repetition_penalty:
        rewards = rewards + config.repetition_penalty * _repetition(config, batch)
    return shaping.truncation(
        rewards=rewards, truncated=batch.truncated, rule=config.truncated, penalty=config.truncated_penalty
    ).rewards


def _repetition(config: RewardKnobs, batch: ScoredBatch) -> Tensor:
    return shaping.repetition_penalty(
        token_ids=batch.token_ids,
        sequences=batch.sequences,
        turns=batch.turns,
        trajectories=len(batch.rewards),
        ngram=config.repetition_ngram,
    )


def _with_kl(config: KlKnobs, batch: ScoredBatch, rewards: Tensor, carried: Carried) -> Shaped:
    """The penalty at each token as the policy stood at the step's start, by the coefficient carried here."""
    assert batch.proximal_logprobs is not None, "the preset asked for a pass of the policy"
    assert batch.reference_logprobs is not None, "the preset asked for a pass of the reference"
    trajectories = max(len(batch.rewards), 1)
    gaps = divergences.k1(policy_logprobs=batch.proximal_logprobs, reference_logprobs=batch.reference_logprobs)
    measured = float(gaps.sum()) / trajectories
    coefficient = config.kl_coefficient if carried.kl_coefficient is None else carried.kl_coefficient
    if config.kl_control == "adaptive":
        following = shaping.adapted_beta(
            beta=coefficient,
            measured_kl=measured,
            target=config.kl_target,
            horizon=config.kl_horizon,
            trajectories=trajectories,
        )
        carried = replace(carried, kl_coefficient=following)
    penalties = shaping.kl_rewards(
        policy_logprobs=batch.proximal_logprobs,
        reference_logprobs=batch.reference_logprobs,
        beta=coefficient,
        form="k1",
    )
    return Shaped(
        rewards=Rewards(of_trajectories=rewards, of_tokens=penalties),
        carried=carried,
        means={"kl_coefficient": coefficient, "trajectory_kl": measured},
    )
