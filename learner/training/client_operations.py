"""Operations that a client's own training loop asks of the learner, and what they give. numpy only, no torch.

A training model is one adapter on a shared base model. `ForwardBackward` adds gradients to what the model has
accumulated, `AdamStep` spends them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from learner.algorithms.client_graphs import LossGraph

Array = NDArray[Any]


class OperationError(ValueError):
    """An operation that cannot be done as its client asked; says the datum, the field, what was expected and what to
    do. The model is as it was before.
    """


class OperationFault(OperationError):
    """An operation that the learner could not do although nothing is wrong with it, such as one without memory."""


@dataclass(frozen=True)
class AdapterShape:
    """The adapter of a training model: low-rank terms of `rank`, scaled by alpha / rank, on linear layers of the
    attention, of the MLPs, and on the output projection. `seed` draws its first weights. Rank 0 is no adapter, but all
    weights of the model.
    """

    rank: int
    alpha: float = 32.0
    seed: int | None = None
    attention: bool = True
    mlp: bool = True
    unembed: bool = True


@dataclass(frozen=True)
class ClientDatum:
    """A sequence: `token_ids` int64 [T], and the inputs of its loss by name, dense: `target_tokens` [T] or [T, K], and
    what the loss asks for.
    """

    token_ids: NDArray[np.int64]
    inputs: Mapping[str, Array]


@dataclass(frozen=True)
class ForwardBackward:
    """The loss of `data`, a plain sum over tokens and datums, and its gradient, which is added to the model's.

    `config` are settings of the loss, numbers and texts. `graph`: the loss `custom`. With `forward_only` no gradient is
    computed.
    """

    model_id: str
    data: tuple[ClientDatum, ...]
    loss: str
    config: Mapping[str, float | str] = field(default_factory=dict)
    forward_only: bool = False
    graph: LossGraph | None = None


@dataclass(frozen=True)
class AdamStep:
    """A step of AdamW with the gradients accumulated since the last one. `grad_clip_norm` bounds their global L2 norm;
    0 is no bound.
    """

    model_id: str
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True)
class DatumOutput:
    """Results of a datum by name: `logprobs` float32, shaped as its `target_tokens`."""

    arrays: Mapping[str, Array]


@dataclass(frozen=True)
class OperationResult:
    """Results of a ForwardBackward: one output for each datum, in order. Names of metrics are `name:reduction`, with
    exactly one colon; `loss:sum` is always there.
    """

    outputs: tuple[DatumOutput, ...]
    metrics: Mapping[str, float]
