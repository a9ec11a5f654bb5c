"""Checks of a client's operation before it is accepted, so that one that is wrong fails alone and says where.

They read the operation and what the model is; no tensor is made, and nothing is changed: any thread may call them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from learner.algorithms.client_graphs import LossGraph
from learner.algorithms.client_inputs import LAGS, VERSIONS
from learner.algorithms.client_losses import ClientLoss, ClientLossError
from learner.algorithms.presets.client_presets import find_client_loss
from learner.training.client_operations import (
    AdamStep,
    AdapterShape,
    Array,
    ClientDatum,
    ForwardBackward,
    OperationError,
)

MAX_TARGETS = 256
"""The most targets of one position."""
TARGETS = "target_tokens"
_CUSTOM = "custom"
_INPUTS = frozenset(
    {"weights", "logprobs", "advantages", "clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask"}
) | frozenset({"mask", "proximal_logprobs", LAGS, VERSIONS})
_COUNTS = frozenset({LAGS, VERSIONS})
_MAY_BE_IMPOSSIBLE = frozenset({"logprobs", "proximal_logprobs"})
_REMEDIES = {
    LAGS: f". Send spans of sequences that were sampled from this model here, or {VERSIONS} or {LAGS} themselves",
}
_LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True)
class BaseDescription:
    """The base model: its name, the most tokens of a sequence, and how many tokens it knows."""

    name: str
    context_length: int
    vocabulary_size: int


def loss_of(operation: ForwardBackward) -> ClientLoss:
    """The loss of an operation whose loss is not `custom`. Raises OperationError."""
    try:
        return _found(operation.loss, tuple(sorted(operation.config.items())))
    except ClientLossError as error:
        raise OperationError(str(error)) from None


@lru_cache(maxsize=256)
def _found(name: str, config: tuple[tuple[str, float | str], ...]) -> ClientLoss:
    return find_client_loss(name, dict(config))


def check_operation(operation: ForwardBackward, base: BaseDescription) -> None:
    """Raises OperationError for data that the loss cannot take, with the number of the datum."""
    if not operation.data:
        raise OperationError("data is empty: expected at least one datum")
    graph = operation.graph if operation.loss == _CUSTOM else None
    if operation.loss == _CUSTOM and graph is None:
        raise OperationError("the loss custom came without a graph: create the loss first, and send its loss_id")
    if graph is not None and set(operation.config) - {"loss_id"}:
        unfit = sorted(set(operation.config) - {"loss_id"})[0]
        raise OperationError(f"the loss custom has no setting {unfit!r}: expected loss_id alone. Leave it out.")
    loss = None if graph is not None else loss_of(operation)
    for number, datum in enumerate(operation.data):
        try:
            _check_tokens(datum, base)
            if graph is not None:
                _check_for_graph(datum, graph)
            elif loss is not None:
                _check_for_loss(datum, loss)
        except OperationError as error:
            raise OperationError(f"datum {number}: {error}") from None


def _check_tokens(datum: ClientDatum, base: BaseDescription) -> None:
    tokens = datum.token_ids
    if tokens.ndim != 1 or not 1 <= len(tokens) <= base.context_length:
        raise OperationError(
            f"model_input has {tokens.size} tokens: expected 1 to {base.context_length}, the context of {base.name}"
        )
    _check_vocabulary("model_input", tokens, base)
    targets = datum.inputs.get(TARGETS)
    if targets is None:
        raise OperationError(f"{TARGETS} is missing: expected the token to predict at each of {len(tokens)} positions")
    if targets.ndim not in (1, 2) or len(targets) != len(tokens):
        raise OperationError(
            f"{TARGETS} has the shape {list(targets.shape)}: expected [{len(tokens)}] or [{len(tokens)}, K], as long "
            "as model_input"
        )
    if targets.ndim == 2 and not 1 <= targets.shape[1] <= MAX_TARGETS:
        raise OperationError(f"{TARGETS} has {targets.shape[1]} targets a position: expected 1 to {MAX_TARGETS}")
    _check_vocabulary(TARGETS, targets, base)


def _check_vocabulary(name: str, tokens: Array, base: BaseDescription) -> None:
    if tokens.dtype.kind not in "iu":
        raise OperationError(f"{name} is of type {tokens.dtype}: expected int64")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= base.vocabulary_size:
        wrong = low if low < 0 else high
        raise OperationError(
            f"{name} has the token {wrong}: expected 0 to {base.vocabulary_size - 1}. Is the tokenizer that of "
            f"{base.name}?"
        )


def _check_for_loss(datum: ClientDatum, loss: ClientLoss) -> None:
    targets = datum.inputs[TARGETS]
    if targets.ndim == 2 and not loss.wide:
        raise OperationError(f"{TARGETS} has the shape {list(targets.shape)}, and {loss.name} takes one of a position")
    for name in loss.required:
        if name == LAGS and VERSIONS in datum.inputs:
            continue
        if name not in datum.inputs:
            remedy = _REMEDIES.get(name, "")
            raise OperationError(f"{name} is missing: {loss.name} wants {', '.join(loss.required)}{remedy}")
    for name, values in datum.inputs.items():
        if name != TARGETS and name not in _INPUTS:
            raise OperationError(f"the input {name} is not known: expected some of {', '.join(sorted(_INPUTS))}")
        wanted = LAGS if name == VERSIONS else name
        if wanted in loss.required or wanted in loss.optional:
            if values.shape != targets.shape:
                raise OperationError(f"{name} has the shape {list(values.shape)}: expected {list(targets.shape)}")
            _check_numbers(name, values)


def _check_for_graph(datum: ClientDatum, graph: LossGraph) -> None:
    logprobs, *others = graph.inputs
    for given, name in ((logprobs, TARGETS), *((each, each.name) for each in others)):
        values = datum.inputs.get(name)
        if values is None:
            raise OperationError(f"{name} is missing: the loss {graph.name} takes it")
        if values.ndim != given.rank:
            raise OperationError(f"{name} has {values.ndim} dimensions, and {graph.name} takes it with {given.rank}")
        if name != TARGETS:
            _check_numbers(name, values, of_graph=True)


def _check_numbers(name: str, values: Array, *, of_graph: bool = False) -> None:
    if values.dtype.kind not in "fiub":
        raise OperationError(f"{name} is of type {values.dtype}: expected float32 or int64")
    if name in _COUNTS and bool((values < 0).any()):
        raise OperationError(f"{name}[{int((values < 0).argmax())}] is below 0: expected a number of optimizer steps")
    if values.dtype.kind != "f" or bool(np.isfinite(values).all()):
        return
    allowed = of_graph or name in _MAY_BE_IMPOSSIBLE
    wrong = np.isnan(values) | (values == np.inf) if allowed else ~np.isfinite(values)
    if bool(wrong.any()):
        place = np.unravel_index(int(wrong.argmax()), values.shape)
        where = ", ".join(str(int(each)) for each in place)
        raise OperationError(f"{name}[{where}] is {values[place]}: expected a finite number")


def check_shape(shape: AdapterShape, *, max_rank: int) -> None:
    """Raises OperationError for an adapter that cannot be made on any model; rank 0 is all weights of the model."""
    if not 0 <= shape.rank <= max_rank:
        raise OperationError(f"rank is {shape.rank}: expected 1 to {max_rank}")
    if not (math.isfinite(shape.alpha) and shape.alpha > 0):
        raise OperationError(f"alpha is {shape.alpha}: expected a number above 0")
    if shape.seed is not None and not 0 <= shape.seed <= _LARGEST_SEED:
        raise OperationError(f"seed is {shape.seed}: expected 0 to {_LARGEST_SEED}")
    if not (shape.attention or shape.mlp or shape.unembed):
        raise OperationError("train_attn, train_mlp and train_unembed are all false: expected one of them at least")


def check_step(step: AdamStep) -> None:
    """Raises OperationError for parameters that AdamW does not have."""
    bounds: Mapping[str, tuple[float, float]] = {
        "learning_rate": (0.0, math.inf),
        "beta1": (0.0, 1.0),
        "beta2": (0.0, 1.0),
        "eps": (0.0, math.inf),
        "weight_decay": (0.0, math.inf),
        "grad_clip_norm": (0.0, math.inf),
    }
    for name, (low, high) in bounds.items():
        value = getattr(step, name)
        if not low <= value < high:
            raise OperationError(f"{name} is {value}: expected at least {low:g} and less than {high:g}")
