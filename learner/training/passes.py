"""Passes without gradient over a whole step, before its first update: what advantages and losses compare with.

microbatches of this rank ─▶ policy, reference, teacher, critic ─▶ sum over ranks ─▶ the same numbers on every rank
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.algorithms.presets.preset import Carried, Passes, Preset, ScoredBatch
from learner.training.batch import FlatBatch
from learner.training.packing import Microbatch
from learner.training.ranks import summed_over_ranks

Score = Callable[[Microbatch], Tensor]
"""A number for each of the microbatch's N targets, [N]."""


@dataclass(frozen=True)
class Scorers:
    """Who can be asked; None for those that the algorithm does not need."""

    proximal: Score
    reference: Score | None = None
    teacher: Score | None = None
    values: Score | None = None


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """Float32 [N], 0 at tokens that are not trained, on the CPU; None for what no pass was run for."""

    proximal_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    values: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Credit:
    """What the preset made of the whole step, [N] on the CPU; 0 and False at tokens that are not trained.

    `advantages` and `returns` float32, `kept` bool: tokens that take part in the loss. `carried` is for the next step.
    """

    advantages: Tensor
    kept: Tensor
    returns: Tensor | None
    means: dict[str, float]
    carried: Carried
    correction_scale: float = 1.0

    def kept_lengths(self, batch: FlatBatch) -> NDArray[np.int64]:
        """How many tokens of each sequence take part in the loss, [S]."""
        return np.add.reduceat(self.kept.numpy().astype(np.int64), batch.starts)


def score(batch: FlatBatch, microbatches: Sequence[Microbatch], *, scorers: Scorers, passes: Passes) -> TokenScores:
    """Runs the passes on this rank's microbatches and shares them. All ranks must call it.

    Logprobs that came with the batch are taken as they are; those of a teacher may have come for some sequences alone.
    """

    def run(wanted: bool, scorer: Score | None, known: NDArray[np.float32] | None = None) -> Tensor | None:
        if known is not None and len(known):
            return torch.from_numpy(known)
        if not wanted:
            return None
        assert scorer is not None, "a pass without a model to run it"
        return _everywhere(microbatches, scorer, tokens=len(batch.token_ids))

    def taught() -> Tensor | None:
        known, asked = batch.teacher_logprobs, batch.teachers >= 0
        if not len(known) or not passes.teacher or not asked.any():
            return run(passes.teacher, scorers.teacher, known)
        found = run(True, scorers.teacher)
        assert found is not None, "a pass that was wanted"
        return torch.where(torch.from_numpy(asked[batch.owners]), found, torch.from_numpy(known))

    return TokenScores(
        proximal_logprobs=run(passes.proximal, scorers.proximal),
        reference_logprobs=run(passes.reference, scorers.reference, batch.reference_logprobs),
        teacher_logprobs=taught(),
        values=run(passes.values, scorers.values),
    )


def _everywhere(microbatches: Sequence[Microbatch], scorer: Score, *, tokens: int) -> Tensor:
    values = torch.zeros(tokens)
    with torch.no_grad():
        for microbatch in microbatches:
            values[microbatch.places] = scorer(microbatch).float().cpu()
    return summed_over_ranks(values)


def credit(batch: FlatBatch, scores: TokenScores, *, preset: Preset, carried: Carried) -> Credit:
    """The preset's advantages, and which tokens it keeps; `carried` is what the step before left."""
    trained = torch.from_numpy(np.flatnonzero(batch.loss_mask))
    tokens = len(batch.token_ids)
    kept = torch.zeros(tokens, dtype=torch.bool)
    kept[trained] = True
    if preset.advantages is None:
        return Credit(advantages=torch.zeros(tokens), kept=kept, returns=None, means={}, carried=carried)
    made = preset.advantages(replace(_scored(batch, scores, trained), carried=carried))
    if made.kept is not None:
        kept[trained] = made.kept
    return Credit(
        advantages=_spread(made.advantages, trained, tokens=tokens),
        kept=kept,
        returns=None if made.returns is None else _spread(made.returns, trained, tokens=tokens),
        means=dict(made.means),
        carried=carried if made.carried is None else made.carried,
        correction_scale=made.correction_scale,
    )


def _spread(values: Tensor, trained: Tensor, *, tokens: int) -> Tensor:
    spread = torch.zeros(tokens)
    spread[trained] = values.float()
    return spread


def _scored(batch: FlatBatch, scores: TokenScores, trained: Tensor) -> ScoredBatch:
    def of_trained(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[trained].double()

    places, firsts = trained.numpy(), batch.firsts
    return ScoredBatch(
        rewards=torch.from_numpy(batch.rewards[firsts]),
        groups=torch.from_numpy(batch.groups[firsts]),
        truncated=torch.from_numpy(batch.truncated[firsts]),
        components=torch.from_numpy(batch.components.reshape(len(batch.lengths), -1)[firsts]),
        sequences=torch.from_numpy(batch.trajectories[batch.owners[places]]),
        token_ids=torch.from_numpy(batch.token_ids[places]).long(),
        turns=torch.from_numpy(batch.turns[places]),
        turn_states=torch.from_numpy(batch.turn_states),
        turn_rewards=torch.from_numpy(batch.turn_rewards),
        lags=torch.from_numpy(batch.lags[places]).long(),
        behavior_logprobs=torch.from_numpy(batch.behavior_logprobs[places]).double(),
        proximal_logprobs=of_trained(scores.proximal_logprobs),
        reference_logprobs=of_trained(scores.reference_logprobs),
        teacher_logprobs=of_trained(scores.teacher_logprobs),
        values=of_trained(scores.values),
        mismatched=torch.from_numpy(batch.mismatched[firsts]),
    )
