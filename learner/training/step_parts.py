"""Parts of a step: consecutive groups that fill a row, whose gradients are computed before the others are there.

    groups in training order ─▶ parts_of ─▶ part 0, part 1, ... of a row each ─▶ gradients, added up undivided
                                                              last part ─▶ divided by the counts of all ─▶ update

Where a part ends depends on the groups up to there and on nothing else, not on when they came. So a step that was begun
early is the same to the last bit as one that was computed when all of its groups were there, such as in a replay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from learner.algorithms.policy_loss import whole_lengths
from learner.algorithms.preset import Preset
from learner.training.batch import TrainSequence
from learner.training.models import StepData, TokenValues
from learner.training.pulls import TokenPulls


def parts_of(sequences: Sequence[TrainSequence], *, tokens: int) -> list[Sequence[TrainSequence]]:
    """The sequences of whole groups cut into parts of about `tokens` tokens at most, or of one group.

    All parts but the last are the same whatever comes behind.
    """
    parts: list[list[TrainSequence]] = []
    room = 0
    for _, members in groupby(sequences, key=lambda sequence: sequence.group):
        group = list(members)
        size = _tokens_in_a_row(group)
        if not parts or size > room:
            parts.append([])
            room = tokens
        parts[-1] += group
        room -= size
    return list(parts)


def _tokens_in_a_row(group: Sequence[TrainSequence]) -> int:
    """Tokens of a group's sequences, of which the prompt stands once."""
    prompts = [int(sequence.loss_mask.argmax()) for sequence in group]
    return max(prompts) + sum(len(each.token_ids) - prompt for each, prompt in zip(group, prompts, strict=True))


def undivided(data: StepData, preset: Preset) -> tuple[StepData, float]:
    """The data of a part whose loss is not divided by what is counted over the step's trajectories, and its share of
    that count.
    """
    assert preset.denominator is not None, "an algorithm that makes of a group the same in any step has one"
    lengths = data.credit.kept_lengths(data.batch)
    count = preset.denominator(whole_lengths(trained_lengths=lengths, trajectories=data.batch.trajectories))
    return replace(data, sequence_weights=data.sequence_weights * count), count


def mean_over_trajectories(parts: Sequence[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    """Metrics of a whole step, from those of its parts and their numbers of trajectories."""
    whole = sum(count for _, count in parts)
    names = parts[0][0].keys()
    return {name: sum(means[name] * count for means, count in parts) / whole for name in names}


def end_to_end(parts: Sequence[TokenValues]) -> TokenValues:
    """The values of a step's tokens, from those of its parts."""
    return TokenValues(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in vars(parts[0])})


def divided_pulls(parts: Sequence[TokenPulls], *, divisor: float) -> TokenPulls:
    """The pulls of a step's tokens, from those of its undivided parts."""
    clipped = [part.clipped for part in parts if part.clipped is not None]
    return TokenPulls(
        pulls=(np.concatenate([part.pulls for part in parts]) / divisor).astype(np.float32),
        clipped=np.concatenate(clipped) if clipped else None,
        advantages=np.concatenate([part.advantages for part in parts]),
    )


@dataclass(frozen=True)
class RandomState:
    """Torch's random numbers at the beginning of a step that may be begun again."""

    of_cpu: Tensor
    of_gpu: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """As they stand."""
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def restore(self, device: torch.device) -> None:
        """Draws the same numbers again from here on."""
        torch.set_rng_state(self.of_cpu)
        if self.of_gpu is not None:
            torch.cuda.set_rng_state(self.of_gpu, device)
