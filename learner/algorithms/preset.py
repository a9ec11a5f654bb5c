"""An algorithm as the trainer sees it: a loss, weights for the tokens, advantages, and the passes that it needs.

Advantages start from rewards, and these from the ones that came with a step:

verifier's reward ─ normalised, scaled, clipped ─ penalties ─▶ of trajectories
policy and reference at each token ─ KL, times its coefficient ─▶ of tokens
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.algorithms import ratios, shaping
from learner.algorithms.knobs import KlKnobs, KlLossKnobs, RewardKnobs
from learner.algorithms.old_tokens import OldTokenBound
from learner.algorithms.shaping import RunningMoments


@dataclass(frozen=True)
class CarriedState:
    """State that an algorithm carries from one step to the next; a checkpoint holds it.

    `kl_coefficient`, `entropy_coefficient`: where an adaptive one has moved to, None before it has. `rewards`: the
    moments of all so far. `baselines`: the running mean of the rewards of each role.
    """

    kl_coefficient: float | None = None
    entropy_coefficient: float | None = None
    rewards: RunningMoments = field(default_factory=RunningMoments)
    baselines: Mapping[int, float] = field(default_factory=dict)

    @property
    def is_finite(self) -> bool:
        """True if it is fit to be carried on: one step that is not finite must not spoil all that follow."""
        coefficients = (self.kl_coefficient or 0.0, self.entropy_coefficient or 0.0)
        numbers = (*coefficients, self.rewards.mean, self.rewards.squares, *self.baselines.values())
        return all(map(math.isfinite, numbers))


@dataclass(frozen=True, kw_only=True)
class ScoredBatch:
    """A whole step as an advantage sees it, the same on every rank: CPU, float64, without gradient.

    S trajectories have M trained tokens in all, trajectory after trajectory, those of all its sequences together. [S]:
    `rewards`, `groups` int64, equal for the trajectories of one task, `truncated` bool; `components` [S, C]. [M]:
    `sequences` int64, the trajectory of each token; `contexts` int64, the sequence that the model sees it in, None if
    each trajectory is one;
    `turns` int64, its turn, of which there are T over all sequences; `token_ids` and `lags` int64; `behavior_logprobs`,
    and what the preset's passes gave, None where it asked for none. `turn_states` int64 [T]: equal states have equal
    numbers; `turn_rewards` [T]; `turn_branches` int64 [T]: equal for turns that several trajectories share, and for
    those of a trajectory between two forks, None if nothing branches. `roles` int64 [S]: equal for the trajectories of
    one player of one environment, None if all are. `greedy_rewards` [S]: that of the greedy answer to each trajectory's
    task, where the preset asks for one. `mismatched` bool [S] are those that are only
    measured: a prompt with the completion of another one. `taught` bool [M] is false at tokens of which the teacher has
    nothing to say, None if there are none. `carried` is what the step before left. `old_tokens` is the bound of
    those that are older than others may be, None where there are none; it needs `proximal_logprobs`.
    """

    rewards: Tensor
    groups: Tensor
    truncated: Tensor
    components: Tensor
    sequences: Tensor
    token_ids: Tensor
    turns: Tensor
    turn_states: Tensor
    lags: Tensor
    behavior_logprobs: Tensor
    proximal_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    values: Tensor | None = None
    logit_norms: Tensor | None = None
    turn_rewards: Tensor | None = None
    turn_branches: Tensor | None = None
    roles: Tensor | None = None
    greedy_rewards: Tensor | None = None
    mismatched: Tensor | None = None
    taught: Tensor | None = None
    contexts: Tensor | None = None
    carried: CarriedState = CarriedState()
    old_tokens: OldTokenBound | None = None


@dataclass(frozen=True)
class Advantages:
    """`advantages` [M], and for a critic the `returns` [M] that its values should have been. `means`: metrics.

    `kept` [M] bool is false for tokens that leave numerator and denominator of the loss; None keeps all. `pulled` [M]
    bool marks tokens for a loss that treats some unlike others, None for one that does not. The weights of a correction
    are multiplied by `correction_scale`, and the learning rate of the step's updates by `step_scale`.
    `entropy_coefficient` is the entropy's in this step's loss, None where the settings say it. `carried` goes to the
    next step; None leaves it as it was.
    """

    advantages: Tensor
    returns: Tensor | None = None
    kept: Tensor | None = None
    pulled: Tensor | None = None
    correction_scale: float = 1.0
    step_scale: float = 1.0
    entropy_coefficient: float | None = None
    means: Mapping[str, float] = field(default_factory=dict)
    carried: CarriedState | None = None


@dataclass(frozen=True, kw_only=True)
class LossTokens:
    """A microbatch as a loss sees it: N trained tokens of K whole sequences.

    Only `policy_logprobs` [N], `entropy` [N] and `candidate_logprobs` [N, C] carry a gradient; of a model of scores the
    first are the scores. Logprobs are in nats at the sampling temperature. [N]: `lags` counts policy versions,
    `sequences` int64 tells which of the K each token is of; `weights` is that of each token in the step's loss, 0 for a
    token that a filter took out; `good_weights` that of each token of a good trajectory among those alone. [K]:
    `sequence_weights`, which its kept tokens have, and `labels` bool. `pairs` int64 [P, 2] holds the chosen and the
    rejected sequence of each pair; `margins` [P]. `pulled` [N], `correction_scale` and `entropy_coefficient` are of
    `Advantages`. `taught` [N] bool is as in ScoredBatch. `observed_logprobs` [M], with a gradient, are of the
    environment's tokens in these sequences, each of which has `observed_weight` in the step's mean of them; None where
    the preset has none.
    """

    policy_logprobs: Tensor
    proximal_logprobs: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    lags: Tensor
    weights: Tensor
    sequences: Tensor
    sequence_weights: Tensor
    labels: Tensor
    pairs: Tensor
    margins: Tensor
    good_weights: Tensor | None = None
    reference_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    candidate_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    pulled: Tensor | None = None
    taught: Tensor | None = None
    correction_scale: float = 1.0
    entropy_coefficient: float | None = None
    observed_logprobs: Tensor | None = None
    observed_weight: float = 0.0


@dataclass(frozen=True)
class Mean:
    """A measure's sum over one microbatch, and over how many; both scalars."""

    total: Tensor
    count: Tensor


def mean_of(values: Tensor) -> Mean:
    """The measure of the mean of `values`, without gradient."""
    return Mean(total=values.detach().sum(), count=values.new_tensor(values.numel()))


@dataclass(frozen=True)
class Loss:
    """`total`: the microbatch's part of the step's loss, a scalar.

    `clipped` and `corrected` [N] bool where the preset has a clip or a bounded correction weight. `means` are metrics
    of its own; the same names in every microbatch, an empty one too.
    """

    total: Tensor
    clipped: Tensor | None = None
    corrected: Tensor | None = None
    means: Mapping[str, Mean] = field(default_factory=dict)


@dataclass(frozen=True)
class Passes:
    """Passes without gradient over the step's sequences, before its first update.

    `logit_norms`, the squared norm of the gradient of each token's logprob with respect to the logits, come with the
    proximal logprobs, in one pass.
    """

    proximal: bool = False
    reference: bool = False
    teacher: bool = False
    values: bool = False
    logit_norms: bool = False


@dataclass(frozen=True, kw_only=True)
class Preset:
    """An algorithm as the trainer sees it.

    `loss` is pure. `weights` maps the trained lengths of an update's trajectories [S] to the weight that each token
    of one has in the update's loss [S]; with `paired` it is the weight of the pair, the same on both of its
    sequences. `denominator` is what they divide by, where that is a sum over the trajectories. `advantages` sees the
    whole step, or a part of it where the algorithm is `of_groups`. `select` maps the rewards of a group [G] to the
    trajectories that are trained, in order; with `paired` the chosen one, then the rejected. `moves_at_once`: the ratio
    that the loss bounds differs from 1 in a step's first update already. `trains_scores`: the model is one of scores,
    not a policy.
    `components` are the reward components in `ScoredBatch.components`, by name and in order; with `turn_rewards` each
    turn's is in `ScoredBatch.turn_rewards`; with `turn_discounts` so is that of each turn that has one. A sampled
    trajectory of at least `good_reward` is a good one, whose tokens have `LossTokens.good_weights`: `weights` of the
    good ones alone. `greedy_baseline`: it wants `ScoredBatch.greedy_rewards`. `whole_trajectories`: its advantages
    look at tokens or turns beyond a trajectory's reward, so that those which are too old may not leave by themselves;
    with `turn_rewards`, `turn_discounts` and `greedy_baseline` that is so anyway. `rests_on_advantages`: a token of
    advantage 0 has no gradient. `value_clip` is for the critic's loss; `candidates`: how many tokens a local teacher is
    asked for at each position. `observes`: it wants `LossTokens.observed_logprobs`. `bounds_old_tokens`: its advantages
    take out of the loss what `ScoredBatch.old_tokens` asks for.
    """

    name: str
    loss: Callable[[LossTokens], Loss]
    weights: Callable[[NDArray[np.int64]], NDArray[np.float64]]
    denominator: Callable[[NDArray[np.int64]], float] | None = None
    advantages: Callable[[ScoredBatch], Advantages] | None = None
    select: Callable[[Sequence[float]], Sequence[int]] | None = None
    paired: bool = False
    passes: Passes = Passes()
    samples_policy: bool = False
    moves_at_once: bool = False
    entropy_gradient: bool = False
    trains_scores: bool = False
    components: tuple[str, ...] = ()
    turn_rewards: bool = False
    turn_discounts: bool = False
    good_reward: float | None = None
    greedy_baseline: bool = False
    whole_trajectories: bool = False
    rests_on_advantages: bool = False
    value_clip: float | None = None
    candidates: int = 0
    observes: bool = False
    bounds_old_tokens: bool = False

    @property
    def once_only(self) -> str:
        """Reason why a group is trained by one step only; empty where a later one may train it again."""
        if self.passes.teacher or self.candidates:
            return "its teachers would be asked again for each of its tokens"
        if self.passes.values:
            return "the targets of its critic are uncorrected for stale tokens, and it would learn them again"
        return ""

    @property
    def whole_only(self) -> str:
        """Reason why tokens that are too old may not leave the loss by themselves; empty where they may."""
        if self.turn_rewards:
            return "it has turn_rewards, and of turns whose tokens are too old the last one would have the rewards"
        if self.turn_discounts:
            return "it has turn_discounts, and of turns whose tokens are too old the rewards would come with others"
        if self.greedy_baseline:
            return "the greedy answer would be older than what is known of who sampled it"
        return "it has whole_trajectories" if self.whole_trajectories else ""


@dataclass(frozen=True)
class Rewards:
    """Rewards that an estimator starts from: `of_trajectories` [S], shaped, and `of_tokens` [M], the KL penalty, or
    None.
    """

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
class ShapedRewards:
    """`rewards`, what the next step is to carry on with, and metrics of the whole step."""

    rewards: Rewards
    carried: CarriedState
    means: Mapping[str, float] = field(default_factory=dict)


def shaped(config: KlLossKnobs, batch: ScoredBatch) -> ShapedRewards:
    """The rewards after what the knobs do to them. Without RewardKnobs they stay as they came."""
    rewards, carried = batch.rewards, batch.carried
    if isinstance(config, RewardKnobs):
        rewards, carried = _normalised(config, _discounted(config, batch), carried)
        rewards = _penalised(config, batch, _bounded(config, rewards))
    if isinstance(config, KlKnobs) and config.kl_is_in_reward:
        return _with_kl(config, batch, rewards, carried)
    return ShapedRewards(rewards=Rewards(of_trajectories=rewards, of_tokens=None), carried=carried)


def _discounted(config: RewardKnobs, batch: ScoredBatch) -> Tensor:
    if config.turn_discount == 1 or batch.turn_rewards is None:
        return batch.rewards
    return shaping.turn_discounted(
        rewards=batch.rewards,
        sequences=batch.sequences,
        turns=batch.turns,
        turn_rewards=batch.turn_rewards,
        discount=config.turn_discount,
    )


def _normalised(config: RewardKnobs, rewards: Tensor, carried: CarriedState) -> tuple[Tensor, CarriedState]:
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


def _with_kl(config: KlKnobs, batch: ScoredBatch, rewards: Tensor, carried: CarriedState) -> ShapedRewards:
    """The penalty at each token as the policy stood at the step's start, by the coefficient carried here."""
    assert batch.proximal_logprobs is not None, "the preset asked for a pass of the policy"
    assert batch.reference_logprobs is not None, "the preset asked for a pass of the reference"
    trajectories = max(len(batch.rewards), 1)
    gaps = ratios.k1(policy_logprobs=batch.proximal_logprobs, reference_logprobs=batch.reference_logprobs)
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
    return ShapedRewards(
        rewards=Rewards(of_trajectories=rewards, of_tokens=penalties),
        carried=carried,
        means={"kl_coefficient": coefficient, "trajectory_kl": measured},
    )
