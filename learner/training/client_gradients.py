"""Losses of clients from the logprobs of a row, and their gradients by these logprobs, operation by operation.

An operation's loss is computed apart from the model, on the host and in float64: one that fails, or whose gradient is
not finite, is found before anything goes back through the model, and its datum is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from learner.algorithms.client_graphs import GraphError, GraphLoss, LossGraph, WorkBudget
from learner.algorithms.client_inputs import LAGS, VERSIONS
from learner.algorithms.client_losses import ClientLoss, LossInputs
from learner.training.client_checks import loss_of
from learner.training.client_operations import (
    Array,
    ClientDatum,
    DatumOutput,
    ForwardBackward,
    OperationError,
    OperationResult,
)
from learner.training.client_rows import PlacedDatum

LOSS_METRIC = "loss:sum"


@dataclass
class OperationTally:
    """Results of an operation so far, over the rows that its data lie in; `error` once it has failed."""

    operation: ForwardBackward
    logprobs: dict[int, Array] = field(default_factory=dict)
    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    budget: WorkBudget = field(default_factory=WorkBudget)
    error: OperationError | None = None

    def result(self) -> OperationResult | OperationError:
        """The result, when all rows are done."""
        if self.error is not None:
            return self.error
        count = len(self.operation.data)
        means = {name: total / count if name.endswith(":mean") else total for name, total in self.metrics.items()}
        outputs = tuple(DatumOutput({"logprobs": self.logprobs[number]}) for number in range(count))
        return OperationResult(outputs=outputs, metrics={**means, LOSS_METRIC: self.loss})


def with_lags(operation: ForwardBackward, steps: int) -> ForwardBackward:
    """The operation on a model that has taken so many steps: where a datum has `versions` and no `lags`, these are
    made of them. Weights of a later version, which a model has that was loaded since, are taken as its own.
    """
    data = tuple(
        replace(datum, inputs={**datum.inputs, LAGS: np.maximum(steps - datum.inputs[VERSIONS], 0)})
        if VERSIONS in datum.inputs and LAGS not in datum.inputs
        else datum
        for datum in operation.data
    )
    return replace(operation, data=data)


def add_row(
    tallies: Sequence[OperationTally], data: Sequence[PlacedDatum], logprobs: Sequence[Tensor], *, with_gradient: bool
) -> list[Tensor]:
    """Adds the data of a row to the tallies of their operations, and returns the gradient of their losses by the
    logprobs, in the same shapes, of segments [t, K]. Logprobs are on the host.

    Operations that fail have an error in their tally; then the gradients are not to be used.
    """
    leaves = [each.double().requires_grad_(with_gradient) for each in logprobs]
    gradients = [torch.zeros_like(each, requires_grad=False) for each in leaves]
    of_operations: dict[int, list[PlacedDatum]] = {}
    data = sorted(data, key=lambda placed: placed.number)
    for placed in data:
        of_operations.setdefault(placed.operation, []).append(placed)
        tallies[placed.operation].logprobs[placed.number] = _output(tallies[placed.operation], placed, logprobs)
    totals = []
    for number, members in of_operations.items():
        tally = tallies[number]
        try:
            if tally.operation.graph is not None and tally.operation.loss == "custom":
                _add_graph(tally, tally.operation.graph, members, logprobs, gradients, with_gradient=with_gradient)
            else:
                totals.append(_add_loss(tally, members, leaves))
        except OperationError as error:
            tally.error = tally.error or error
    if with_gradient and totals:
        found = torch.autograd.grad(torch.stack(totals).sum(), leaves, allow_unused=True)
        for gradient, part in zip(gradients, found, strict=True):
            gradient += 0.0 if part is None else part
    made = [each.to(given.dtype) for each, given in zip(gradients, logprobs, strict=True)]
    _find_failed(tallies, data, made)
    return made


def _output(tally: OperationTally, placed: PlacedDatum, logprobs: Sequence[Tensor]) -> Array:
    part = logprobs[placed.segment][placed.start : placed.stop, : placed.width].float().numpy()
    return part.reshape(tally.operation.data[placed.number].inputs["target_tokens"].shape).copy()


def _add_loss(tally: OperationTally, members: Sequence[PlacedDatum], leaves: Sequence[Tensor]) -> Tensor:
    loss = loss_of(tally.operation)
    total = _total(loss, tally.operation, members, leaves)
    if not bool(total.isfinite()):
        wrong = next(
            (each for each in members if not bool(_total(loss, tally.operation, [each], leaves).isfinite())), members[0]
        )
        raise OperationError(
            f"datum {wrong.number}: its {loss.name} is not finite: expected finite numbers, of a usual size, in its "
            "inputs. Nothing of this call was added to the gradients."
        )
    tally.loss += float(total.detach())
    return total


def _total(
    loss: ClientLoss, operation: ForwardBackward, members: Sequence[PlacedDatum], leaves: Sequence[Tensor]
) -> Tensor:
    """The loss of some of an operation's data, a scalar."""
    parts = [leaves[each.segment][each.start : each.stop, : each.width].reshape(-1) for each in members]
    data = [operation.data[each.number] for each in members]
    inputs = {name: _input(data, name, None) for name in loss.required}
    inputs |= {name: _input(data, name, default) for name, default in loss.optional.items()}
    lengths = torch.tensor([len(part) for part in parts])
    return loss.total(
        LossInputs(
            policy_logprobs=torch.cat(parts),
            sequences=torch.repeat_interleave(torch.arange(len(members)), lengths),
            count=len(members),
            of=inputs,
        )
    )


def _input(data: Sequence[ClientDatum], name: str, default: float | None) -> Tensor:
    """An input of all data, end to end, float64; `default` where one lacks it."""
    parts = [
        np.full(datum.inputs["target_tokens"].size, default)
        if default is not None and name not in datum.inputs
        else datum.inputs[name].reshape(-1).astype(np.float64)
        for datum in data
    ]
    return torch.from_numpy(np.concatenate(parts))


def _add_graph(
    tally: OperationTally,
    graph: LossGraph,
    members: Sequence[PlacedDatum],
    logprobs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    *,
    with_gradient: bool,
) -> None:
    """Runs the graph for each datum, whose gradient goes to its place in `gradients`."""
    for placed in members:
        datum = tally.operation.data[placed.number]
        given = torch.from_numpy(tally.logprobs[placed.number].copy()).requires_grad_(with_gradient)
        try:
            found = _run_graph(graph, given, datum.inputs, tally.budget)
        except GraphError as error:
            raise OperationError(f"datum {placed.number}: the loss {graph.name}: {error}") from None
        tally.loss += float(found.loss.detach())
        for name, value in found.metrics.items():
            tally.metrics[name] = tally.metrics.get(name, 0.0) + value
        if with_gradient and found.loss.requires_grad:
            (gradient,) = torch.autograd.grad(found.loss, given, allow_unused=True)
            if gradient is not None:
                place = gradients[placed.segment][placed.start : placed.stop, : placed.width]
                place.copy_(gradient.reshape(place.shape))


def _run_graph(graph: LossGraph, logprobs: Tensor, inputs: Mapping[str, Array], budget: WorkBudget) -> GraphLoss:
    given = {each.name: torch.from_numpy(np.array(inputs[each.name])) for each in graph.inputs[1:]}
    found = graph.run(logprobs, given, budget=budget)
    if not bool(found.loss.isfinite()):
        raise GraphError(f"the loss is {float(found.loss.detach())}: expected a finite number")
    return found


def _find_failed(tallies: Sequence[OperationTally], data: Sequence[PlacedDatum], gradients: Sequence[Tensor]) -> None:
    """Gives operations whose gradient is not finite an error."""
    if all(bool(each.isfinite().all()) for each in gradients):
        return
    for placed in data:
        tally = tallies[placed.operation]
        if tally.error is None and not bool(gradients[placed.segment][placed.start : placed.stop].isfinite().all()):
            tally.error = OperationError(
                f"datum {placed.number}: the gradient of its loss is not finite: expected finite numbers, of a usual "
                "size. Nothing of this call was added to the gradients."
            )
