"""Losses that a client's own training loop asks for by name, each a plain sum over its tokens and sequences.

Nothing is divided by a count: gradients of several calls add up until the client's optimizer step, so the client weighs
its tokens itself. Tensors are [N], the tokens of an operation one sequence after another, unless said otherwise.

p are the policy's logprobs, which carry the gradient; q those of who sampled (the input `logprobs`), A the `advantages`
(0 at tokens of the prompt: there is no mask), w the `weights`; r = exp(p - q), sg = stop-gradient. Log ratios are
within 20 either way, and a token that the policy calls impossible has no gradient, as in `policy_loss`: losses and
gradients are finite for every logprob, -inf included.

The loss of one of Headway's own algorithms is asked for by its name, as the setting `headway`: its correction for the
lag between p and q, and its bounds, on advantages that the client has computed. It is a plain sum too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from pydantic import ValidationError
from torch import Tensor

from learner.algorithms import policy_loss
from learner.algorithms.knobs import CorrectionKnobs
from learner.algorithms.policy_loss import own_gradient, pessimistic
from learner.algorithms.preset import LossTokens
from learner.algorithms.presets.registry import ALGORITHMS
from learner.algorithms.ratios import bounded, finite, k2, log_gap, ratio, sequence_sums

if TYPE_CHECKING:
    from learner.algorithms.preset import Preset

PRESET_SETTING = "headway"
_ADVANTAGES_OF_GROUPS = (
    "differs in its advantages alone, which your loop computes: send them, and ask for grpo or reinforce"
)
_REFUSED_PRESETS = {
    "dr_grpo": _ADVANTAGES_OF_GROUPS,
    "max_rl": _ADVANTAGES_OF_GROUPS,
    "gdpo": _ADVANTAGES_OF_GROUPS,
    "gigpo": _ADVANTAGES_OF_GROUPS,
    "rloo": _ADVANTAGES_OF_GROUPS,
    "reinforce_pp": _ADVANTAGES_OF_GROUPS,
    "ppo": "needs a critic, which a training model does not have: ask for the loss ppo",
    "online_dpo": "needs pairs of a group: write a custom loss",
    "best_of_k": "needs whole groups: choose the best in your loop, and ask for cross_entropy",
    "opd": "needs a teacher: send its logprobs as part of the advantages, and ask for importance_sampling",
    "sft": "is cross_entropy",
    "rm": "trains a model of scores, which a training model is not",
    "dpo": "needs pairs and a reference: write a custom loss",
    "distill": "needs a teacher: ask for cross_entropy with [T, K] targets",
    "custom": "loads code by its path, which a client cannot: write a custom loss",
}
_GIVEN_BY_THE_CALL = "advantages and sums are your loop's"
_SETTINGS_OF_PRESETS = frozenset({"clip_low", "clip_high", "dual_clip"})
_TO_CORRECT = frozenset(CorrectionKnobs.model_fields) - {"count_left_out"}


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


def dro(*, policy_logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, beta: float) -> Tensor:
    """-(p A - beta/2 (p - q)²) per token: direct reward optimization (arXiv 2405.19107), as Kimi's with q as anchor.

    The pull is on tokens without an advantage too.
    """
    return policy_loss.kimi(
        policy_logprobs=policy_logprobs, proximal_logprobs=behavior_logprobs, advantages=advantages, tau=beta
    ).losses


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
    kl_coeff 0.1. The setting `headway` names an algorithm of ours, whose loss is computed instead; the others are its.
    """
    if name not in _LOSSES:
        raise ClientLossError(f"no loss is named {name!r}: expected one of {', '.join(LOSS_NAMES)}")
    defaults, made = _LOSSES[name]
    if PRESET_SETTING in config:
        if name == "cross_entropy":
            raise ClientLossError(
                f"the setting {PRESET_SETTING} comes with cross_entropy, which has no advantages: expected another "
                "loss, importance_sampling say"
            )
        return _preset_loss(config)
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
    return _sampled("dro", lambda given, named: dro(**named, beta=config["beta"]))


def _gspo(config: Mapping[str, float]) -> ClientLoss:
    def losses(given: LossInputs, named: Mapping[str, Tensor]) -> Tensor:
        mask = given.of["sequence_ratio_mask"]
        return clipped_sequence_ratio(
            **named, mask=mask, sequences=given.sequences, count=given.count, **_bounds(given)
        )

    return _sampled("gspo", losses, **config)


def _stable_reinforce(config: Mapping[str, float]) -> ClientLoss:
    return _sampled("stable_reinforce", lambda given, named: stable_reinforce(**named, kl_coeff=config["kl_coeff"]))


_CLIP: Mapping[str, float] = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
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


def _preset_loss(config: Mapping[str, float | str]) -> ClientLoss:
    """The loss of the algorithm that the setting `headway` names, with the other settings as its knobs."""
    name = config[PRESET_SETTING]
    preset = _checked_preset(str(name), {key: value for key, value in config.items() if key != PRESET_SETTING})

    def total(given: LossInputs) -> Tensor:
        return preset.loss(_loss_tokens(given)).total

    return ClientLoss(
        name=f"{PRESET_SETTING}:{name}",
        total=total,
        required=("logprobs", "advantages"),
        optional={"mask": torch.nan, "proximal_logprobs": torch.nan, "lags": 0.0},
    )


def _checked_preset(name: str, knobs: Mapping[str, float | str]) -> Preset:
    known = [each for each in ALGORITHMS if each not in _REFUSED_PRESETS]
    if name not in known:
        reason = f"{name} {_REFUSED_PRESETS[name]}" if name in _REFUSED_PRESETS else f"no algorithm is named {name!r}"
        raise ClientLossError(f"{reason}. The setting {PRESET_SETTING} takes one of {', '.join(known)}")
    settings = ALGORITHMS[name]
    own = frozenset(settings.__annotations__) - {"type", "aggregation"}
    allowed = (own | _SETTINGS_OF_PRESETS | _TO_CORRECT) & frozenset(settings.model_fields)
    for key in knobs:
        if key not in allowed:
            reason = _GIVEN_BY_THE_CALL if key in settings.model_fields else "it has none of that name"
            raise ClientLossError(
                f"{key} is no setting of {PRESET_SETTING}: {name} here: {reason}. Expected some of "
                f"{', '.join(sorted(allowed))}"
            )
    values: dict[str, object] = {key: _knob(value) for key, value in knobs.items()}
    try:
        made = settings.model_validate({"type": name, **values})
        if isinstance(made, CorrectionKnobs) and made.has_filter:
            made = settings.model_validate({"type": name, **values, "count_left_out": True})
        preset = made.preset()
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or name
        raise ClientLossError(f"a setting of {PRESET_SETTING}: {name} is wrong: {place}: {first['msg']}") from None
    if preset.passes.proximal:
        raise ClientLossError(
            "self_normalise needs a pass over the whole step, and a client's loop has no step that the learner knows: "
            "leave it out"
        )
    return preset


def _knob(value: float | str) -> object:
    """A setting as pydantic reads it: a text with commas is several numbers."""
    return value.split(",") if isinstance(value, str) and "," in value else value


def _loss_tokens(given: LossInputs) -> LossTokens:
    """The tokens that are trained, as a preset's loss sees them: those of the input `mask`, or with an advantage."""
    mask, advantages = given.of["mask"], given.of["advantages"]
    trained = torch.where(mask.isnan(), advantages, mask) != 0
    logprobs, proximal = given.policy_logprobs[trained], given.of["proximal_logprobs"][trained]
    ones = torch.ones_like(logprobs)
    nothing = torch.zeros(0, dtype=torch.int64, device=logprobs.device)
    return LossTokens(
        policy_logprobs=logprobs,
        proximal_logprobs=torch.where(proximal.isnan(), logprobs.detach(), proximal),
        behavior_logprobs=given.of["logprobs"][trained],
        advantages=advantages[trained],
        lags=given.of["lags"][trained].long(),
        weights=ones,
        sequences=given.sequences[trained],
        sequence_weights=logprobs.new_ones(given.count),
        labels=torch.ones(given.count, dtype=torch.bool, device=logprobs.device),
        pairs=nothing.reshape(0, 2),
        margins=logprobs.new_zeros(0),
    )
