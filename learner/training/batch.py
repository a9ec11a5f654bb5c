"""The step's data as the trainer takes it: one record per trajectory, numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TrainSequence:
    """One trajectory of T tokens; every array is [T].

    `token_ids` int32; `loss_mask` bool, true where the policy sampled the token and it is trained on (never the first
    token, which nothing predicts); `behavior_logprobs` float32 in nats at the sampling temperature, 0 outside the mask;
    `advantages` float32; `lags` int32, policy versions between the learner and the token; `mixed_versions`: whether
    more than one policy version sampled it. For `sft` only the first two matter.
    """

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    behavior_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    lags: NDArray[np.int32]
    mixed_versions: bool = False

    def __post_init__(self) -> None:
        lengths = {
            len(self.token_ids),
            len(self.loss_mask),
            len(self.behavior_logprobs),
            len(self.advantages),
            len(self.lags),
        }
        assert len(lengths) == 1, f"arrays of unequal lengths {sorted(lengths)}"
        assert len(self.token_ids) > 0, "a sequence without tokens"
        assert not self.loss_mask[0], "the first token cannot be trained: nothing predicts it"

    @classmethod
    def supervised(cls, *, token_ids: NDArray[np.int32], loss_mask: NDArray[np.bool_]) -> TrainSequence:
        """A sequence that no policy sampled: behavior logprobs, advantages and lags are 0."""
        zeros = np.zeros(len(token_ids), dtype=np.float32)
        return cls(
            token_ids=token_ids,
            loss_mask=loss_mask,
            behavior_logprobs=zeros,
            advantages=zeros,
            lags=np.zeros(len(token_ids), dtype=np.int32),
        )


@dataclass(frozen=True)
class FlatBatch:
    """S sequences end to end, N tokens in all: what is sent to the other ranks, and what is packed.

    `lengths` int64 [S] and `mixed_versions` bool [S]; the other arrays are [N], as in `TrainSequence`.
    """

    lengths: NDArray[np.int64]
    mixed_versions: NDArray[np.bool_]
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    behavior_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    lags: NDArray[np.int32]

    @property
    def starts(self) -> NDArray[np.int64]:
        """The first token of each sequence, [S]."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def trained_lengths(self) -> NDArray[np.int64]:
        """How many tokens of each sequence are trained on, [S]."""
        if not len(self.lengths):
            return np.zeros(0, dtype=np.int64)
        return np.add.reduceat(self.loss_mask.astype(np.int64), self.starts)


def flatten(sequences: Sequence[TrainSequence]) -> FlatBatch:
    """Sequences end to end. At least one is needed."""
    assert sequences, "a step without sequences"
    return FlatBatch(
        lengths=np.array([len(sequence.token_ids) for sequence in sequences], dtype=np.int64),
        mixed_versions=np.array([sequence.mixed_versions for sequence in sequences], dtype=np.bool_),
        token_ids=np.concatenate([sequence.token_ids for sequence in sequences]).astype(np.int32, copy=False),
        loss_mask=np.concatenate([sequence.loss_mask for sequence in sequences]).astype(np.bool_, copy=False),
        behavior_logprobs=np.concatenate([s.behavior_logprobs for s in sequences]).astype(np.float32, copy=False),
        advantages=np.concatenate([sequence.advantages for sequence in sequences]).astype(np.float32, copy=False),
        lags=np.concatenate([sequence.lags for sequence in sequences]).astype(np.int32, copy=False),
    )
