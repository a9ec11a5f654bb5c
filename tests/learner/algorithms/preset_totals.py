"""Losses of Headway's own algorithms as its own runs compute them, to compare those of clients with."""

import torch
from torch import Tensor

from learner.algorithms.preset import LossTokens
from learner.algorithms.presets.registry import ALGORITHMS


def preset_total(
    name: str,
    *,
    policy: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    anchor: Tensor | None = None,
    lags: Tensor | None = None,
    **knobs: object,
) -> Tensor:
    """The loss of the tokens with an advantage, each of weight 1. `anchor`: logprobs of the proximal policy, which is
    the policy itself by default.
    """
    trained, nothing, count = advantages != 0, torch.zeros(0), int(sequences.max()) + 1
    ages = torch.zeros_like(sequences) if lags is None else lags
    tokens = LossTokens(
        policy_logprobs=policy[trained],
        proximal_logprobs=(policy.detach() if anchor is None else anchor)[trained],
        behavior_logprobs=behavior[trained],
        advantages=advantages[trained],
        lags=ages[trained].long(),
        weights=torch.ones_like(policy[trained]),
        sequences=sequences[trained],
        sequence_weights=torch.ones(count),
        labels=torch.ones(count, dtype=torch.bool),
        pairs=nothing.long().reshape(0, 2),
        margins=nothing,
    )
    return ALGORITHMS[name].model_validate({"type": name, **knobs}).preset().loss(tokens).total
