"""Losses that a client's own training loop asks for by name, each a plain sum over its tokens and sequences.

Nothing is divided by a count: gradients of several calls add up until the client's optimizer step, so the client weighs
its tokens itself. Tensors are [N], the tokens of an operation one sequence after another, unless said otherwise.

p are the policy's logprobs, which carry the gradient; q those of who sampled (the input `logprobs`), A the `advantages`
(0 at tokens of the prompt: there is no mask), w the `weights`; r = exp(p - q), sg = stop-gradient. Log ratios are
within 20 either way, and a token that the policy calls impossible has no gradient, as in `policy_loss`: losses and
gradients are finite for every logprob, -inf included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from learner.algorithms import policy_loss
from learner.algorithms.policy_loss import own_gradient, pessimistic
from learner.algorithms.ratios import bounded, finite, k2, log_gap, ratio, sequence_sums

_CLIP: Mapping[str, float] = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


class ClientLossError(ValueError):
    """A loss that is not there, or a setting that it does not have."""


@dataclass(frozen=True)
class LossInputs:
    """An operation's N tokens of `count` sequences: `sequences` int64 [N] tells which one each is of. `of` are the
    inputs [N] that the loss wants, by name.
    """

    policy_logprobs: Tensor
    sequences: Tensor
    count: int
    of: Mapping[str, Tensor]


@dataclass(frozen=True)
class ClientLoss:
    """A loss: the sum over an operation's tokens, a scalar, of its inputs.

    A sequence must have the `required` inputs; the `optional` ones have a number where one is left out. `wide`: targets
    may be [T, K], with inputs [T, K].
    """

    name: str
    total: Callable[[LossInputs], Tensor]
    required: tuple[str, ...] = ()
    optional: Mapping[str, float] = field(default_factory=dict)
    wide: bool = False


def cross_entropy(*, policy_logprobs: Tensor, weights: Tensor) -> Tensor:
    """-w p per token; weights have any sign, and may be those of several targets of a position."""
    return -weights * finite(policy_logprobs)


def importance_sampling(*, policy_logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-r A per token."""
    return -ratio(numerator=policy_logprobs, denominator=behavior_logprobs) * advantages


def clipped_ratio(
    *, policy_logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, low: Tensor, high: Tensor
) -> Tensor:
    """-min(r A, clip(r, low, high) A) per token, the loss ppo; `low` and `high` are bounds of the ratio itself."""
    moved = ratio(numerator=policy_logprobs, denominator=behavior_logprobs)
    return -pessimistic(moved, advantages, low=low, high=high)[0]


def clipped_weight(
    *, policy_logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, low: Tensor, high: Tensor
) -> Tensor:
    """-sg(clip(r, low, high)) p A per token, the loss cispo."""
    weight = ratio(numerator=policy_logprobs, denominator=behavior_logprobs).detach().clamp(low, high)
    return -weight * advantages * finite(policy_logprobs)


def clipped_sequence_ratio(
    *,
    policy_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequences: Tensor,
    count: int,
    low: Tensor,
    high: Tensor,
) -> Tensor:
    """-min(s_t A, clip(s_t, low, high) A) per token, the loss gspo (arXiv 2507.18071): s_t = sg(s) exp(p - sg(p)), s
    the exponential of the mean of p - q over the tokens of the sequence whose `mask` is not 0; 1 if there is none.
    """
    inside = mask != 0
    gaps = torch.where(inside, log_gap(numerator=policy_logprobs, denominator=behavior_logprobs).detach(), 0)
    sums = sequence_sums(values=gaps, sequences=sequences, count=count)
    lengths = sequence_sums(values=inside.to(gaps.dtype), sequences=sequences, count=count).clamp(min=1)
    moved = torch.exp(bounded(sums / lengths)[sequences] + own_gradient(finite(policy_logprobs)))
    return -pessimistic(moved, advantages, low=low, high=high)[0]


def stable_reinforce(
    *, policy_logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, kl_coeff: float
) -> Tensor:
    """-sg(min(r, 1)) p A + kl_coeff min((p - q)²/2, 10) at tokens with an advantage, 0 elsewhere.

    A formula of Headway's own, since the hosted service publishes none for the loss of this name: REINFORCE with
    truncated importance sampling and the k2 estimate of the KL divergence to who sampled.
    """
    gain = policy_loss.reinforce(
        policy_logprobs=policy_logprobs, behavior_logprobs=behavior_logprobs, advantages=advantages, cap=1.0
    ).losses
    pull = k2(policy_logprobs=finite(policy_logprobs), reference_logprobs=finite(behavior_logprobs.detach()))
    return torch.where(advantages != 0, gain + kl_coeff * pull, 0)


def find_loss(name: str, config: Mapping[str, float | str]) -> ClientLoss:
    """The loss `name` with the settings `config`. Raises ClientLossError.

    Settings and their defaults: ppo and gspo have clip_low_threshold 0.8 and clip_high_threshold 1.2, cispo has 0 and
    4, all bounds of the ratio, which inputs of these names replace token by token; dro has beta 0.05, stable_reinforce
    kl_coeff 0.1.
    """
    if name not in _LOSSES:
        raise ClientLossError(f"no loss is named {name!r}: expected one of {', '.join(LOSS_NAMES)}")
    defaults, made = _LOSSES[name]
    return made({**defaults, **_numbers(name, config, known=tuple(defaults))})


def _numbers(name: str, config: Mapping[str, float | str], *, known: tuple[str, ...]) -> dict[str, float]:
    numbers = {}
    for key, value in config.items():
        if key not in known:
            raise ClientLossError(
                f"the loss {name} has no setting {key!r}: expected {', '.join(known) or 'none'}. Leave it out."
            )
        try:
            numbers[key] = float(value)
        except ValueError:
            raise ClientLossError(f"the setting {key} of {name} is {value!r}: expected a number") from None
        if not -1e30 < numbers[key] < 1e30:
            raise ClientLossError(f"the setting {key} of {name} is {value}: expected a finite number")
    return numbers


def _cross_entropy(config: Mapping[str, float]) -> ClientLoss:
    return ClientLoss(
        name="cross_entropy",
        total=lambda given: cross_entropy(policy_logprobs=given.policy_logprobs, weights=given.of["weights"]).sum(),
        optional={"weights": 1.0},
        wide=True,
    )


def _sampled(name: str, losses: Callable[[LossInputs, Mapping[str, Tensor]], Tensor], **more: float) -> ClientLoss:
    """A loss of sampled tokens; `losses` get p, q and A by the names of the functions here."""

    def total(given: LossInputs) -> Tensor:
        named = {
            "policy_logprobs": given.policy_logprobs,
            "behavior_logprobs": given.of["logprobs"],
            "advantages": given.of["advantages"],
        }
        return losses(given, named).sum()

    required = ("logprobs", "advantages", *(("sequence_ratio_mask",) if name == "gspo" else ()))
    return ClientLoss(name=name, total=total, required=required, optional=more)


def _bounds(given: LossInputs) -> dict[str, Tensor]:
    return {"low": given.of["clip_low_threshold"], "high": given.of["clip_high_threshold"]}


def _importance_sampling(config: Mapping[str, float]) -> ClientLoss:
    return _sampled("importance_sampling", lambda given, named: importance_sampling(**named))


def _ppo(config: Mapping[str, float]) -> ClientLoss:
    return _sampled("ppo", lambda given, named: clipped_ratio(**named, **_bounds(given)), **config)


def _cispo(config: Mapping[str, float]) -> ClientLoss:
    return _sampled("cispo", lambda given, named: clipped_weight(**named, **_bounds(given)), **config)


def _dro(config: Mapping[str, float]) -> ClientLoss:
    return _sampled("dro", lambda given, named: policy_loss.dro(**named, beta=config["beta"]).losses)


def _gspo(config: Mapping[str, float]) -> ClientLoss:
    def losses(given: LossInputs, named: Mapping[str, Tensor]) -> Tensor:
        mask = given.of["sequence_ratio_mask"]
        return clipped_sequence_ratio(
            **named, mask=mask, sequences=given.sequences, count=given.count, **_bounds(given)
        )

    return _sampled("gspo", losses, **config)


def _stable_reinforce(config: Mapping[str, float]) -> ClientLoss:
    return _sampled("stable_reinforce", lambda given, named: stable_reinforce(**named, kl_coeff=config["kl_coeff"]))


_LOSSES: Mapping[str, tuple[Mapping[str, float], Callable[[Mapping[str, float]], ClientLoss]]] = {
    "cross_entropy": ({}, _cross_entropy),
    "importance_sampling": ({}, _importance_sampling),
    "ppo": (_CLIP, _ppo),
    "cispo": ({"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}, _cispo),
    "dro": ({"beta": 0.05}, _dro),
    "gspo": (_CLIP, _gspo),
    "stable_reinforce": ({"kl_coeff": 0.1}, _stable_reinforce),
}
LOSS_NAMES = tuple(_LOSSES)
