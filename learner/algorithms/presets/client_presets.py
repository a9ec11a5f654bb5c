"""Losses of Headway's own algorithms for a client's training loop, asked for by the setting `headway`.

An algorithm's correction for the lag between policy and sampler, and its bounds, on advantages that the client has
computed: a plain sum over the tokens, like the other losses of clients.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import ValidationError
from torch import Tensor

from learner.algorithms.client_inputs import LAGS, PRESET_SETTING
from learner.algorithms.client_losses import ClientLoss, ClientLossError, LossInputs, find_loss
from learner.algorithms.knobs import CorrectionKnobs
from learner.algorithms.preset import LossTokens, Preset
from learner.algorithms.presets.registry import ALGORITHMS

_ADVANTAGES_OF_GROUPS = (
    "differs in its advantages alone, which your loop computes: send them, and ask for grpo or reinforce"
)
_REFUSED_PRESETS = {
    "dr_grpo": _ADVANTAGES_OF_GROUPS,
    "max_rl": _ADVANTAGES_OF_GROUPS,
    "pass_at_k": _ADVANTAGES_OF_GROUPS,
    "opo": _ADVANTAGES_OF_GROUPS,
    "otb": _ADVANTAGES_OF_GROUPS,
    "rae": _ADVANTAGES_OF_GROUPS,
    "gdpo": _ADVANTAGES_OF_GROUPS,
    "gigpo": _ADVANTAGES_OF_GROUPS,
    "hgpo": _ADVANTAGES_OF_GROUPS,
    "treerl": _ADVANTAGES_OF_GROUPS,
    "clip_cov": "looks at all tokens of a step, which your loop knows: set some advantages to 0, and ask for grpo",
    "kl_cov": "looks at all tokens of a step, which your loop knows: write a custom loss",
    "vcpo": "takes smaller steps by what its trajectories weigh, which your loop does: write a custom loss",
    "gvpo": "is a likelihood with weights of a group, which your loop computes: ask for cross_entropy with weights",
    "luspo": "is gspo, summed over tokens: a sum is what each call computes, so ask for gspo",
    "rloo": _ADVANTAGES_OF_GROUPS,
    "remax": _ADVANTAGES_OF_GROUPS,
    "reinforce_pp": _ADVANTAGES_OF_GROUPS,
    "ppo": "needs a critic, which a training model does not have: ask for the loss ppo",
    "online_dpo": "needs pairs of a group: write a custom loss",
    "best_of_k": "needs whole groups: choose the best in your loop, and ask for cross_entropy",
    "opd": "needs a teacher: send its logprobs as part of the advantages, and ask for importance_sampling",
    "dro": "is the loss of that name: ask for dro",
    "sft": "is cross_entropy",
    "rm": "trains a model of scores, which a training model is not",
    "dpo": "needs pairs and a reference: write a custom loss",
    "distill": "needs a teacher: ask for cross_entropy with [T, K] targets",
    "custom": "loads code by its path, which a client cannot: write a custom loss",
}
_GIVEN_BY_THE_CALL = "advantages and sums are your loop's"
_SETTINGS_OF_PRESETS = frozenset({"clip_low", "clip_high", "dual_clip", "ratio_cap"})
_TO_CORRECT = frozenset(CorrectionKnobs.model_fields) - {"count_left_out", "second_moment_limit"}


def find_client_loss(name: str, config: Mapping[str, float | str]) -> ClientLoss:
    """`find_loss`; but with the setting `headway` the loss of the algorithm that it names, whose settings the others
    are. Raises ClientLossError.
    """
    if PRESET_SETTING not in config:
        return find_loss(name, config)
    if name == "cross_entropy":
        raise ClientLossError(
            f"the setting {PRESET_SETTING} comes with cross_entropy, which has no advantages: expected another loss, "
            "importance_sampling say"
        )
    find_loss(name, {})
    return _preset_loss(config)


def _preset_loss(config: Mapping[str, float | str]) -> ClientLoss:
    """The loss of the algorithm that the setting `headway` names, with the other settings as its knobs."""
    name = config[PRESET_SETTING]
    preset, wants_lags = _checked_preset(str(name), {k: value for k, value in config.items() if k != PRESET_SETTING})

    def total(given: LossInputs) -> Tensor:
        return preset.loss(_loss_tokens(given)).total

    return ClientLoss(
        name=f"{PRESET_SETTING}:{name}",
        total=total,
        required=("logprobs", "advantages", *((LAGS,) if wants_lags else ())),
        optional={"mask": torch.nan, "proximal_logprobs": torch.nan, **({} if wants_lags else {LAGS: 0.0})},
    )


def _checked_preset(name: str, knobs: Mapping[str, float | str]) -> tuple[Preset, bool]:
    """The preset, and true if its loss rests on how old each token is."""
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
    return preset, isinstance(made, CorrectionKnobs) and made.proximal == "interpolate"


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
