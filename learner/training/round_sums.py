"""A round of clients' operations, put together from the ranks' parts of it: what went wrong, logprobs, gradients.

Everything that comes of it is the same on all ranks. All of them must call each function, in the same order; where
there is one rank they change nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from learner.training.adapter_layers import ClientAdapter
from learner.training.client_gradients import OperationTally
from learner.training.client_operations import OperationError, OperationFault
from learner.training.ranks import rank_count, summed_over_ranks, texts_of_ranks


def share_tallies(tallies: Sequence[OperationTally], fault: OperationError | None) -> OperationError | None:
    """Adds up the losses and metrics of operations, and gives an error of one to all ranks. Returns the error of a rank
    whose rows could not be done; `fault` is this one's.
    """
    if rank_count() == 1:
        return fault
    own = {
        "fault": _told(fault),
        "losses": [tally.loss for tally in tallies],
        "metrics": [tally.metrics for tally in tallies],
        "errors": [_told(tally.error) for tally in tallies],
    }
    found = [json.loads(text) for text in texts_of_ranks(json.dumps(own))]
    for number, tally in enumerate(tallies):
        tally.loss = sum(each["losses"][number] for each in found)
        tally.metrics = _summed([each["metrics"][number] for each in found])
        tally.error = next((_error(each["errors"][number]) for each in found if each["errors"][number]), None)
    return next((_error(each["fault"]) for each in found if each["fault"]), None)


def share_logprobs(tallies: Sequence[OperationTally]) -> None:
    """Gives each tally the logprobs of the data that lay on other ranks."""
    if rank_count() == 1:
        return
    places = [(tally, number) for tally in tallies for number in range(len(tally.operation.data))]
    shapes = [tally.operation.data[number].inputs["target_tokens"].shape for tally, number in places]
    ends = np.cumsum([0, *(int(np.prod(shape)) for shape in shapes)])
    parts = [
        tally.logprobs[number].ravel() if number in tally.logprobs else np.zeros(int(stop - start), dtype=np.float32)
        for (tally, number), (start, stop) in zip(places, pairwise(ends), strict=True)
    ]
    whole = summed_over_ranks(torch.from_numpy(np.concatenate(parts))).numpy()
    for (tally, number), shape, (start, stop) in zip(places, shapes, pairwise(ends), strict=True):
        tally.logprobs[number] = whole[start:stop].reshape(shape).copy()


def summed_gradients(
    gathered: Mapping[str, Tensor], adapters: Mapping[str, ClientAdapter], trained: Sequence[str]
) -> Mapping[str, Tensor]:
    """The gradients of the models that were `trained`, whose data may all have lain on other ranks."""
    if rank_count() == 1 or not trained:
        return gathered
    names = list(dict.fromkeys(trained))
    flats = [gathered[name] if name in gathered else torch.zeros_like(adapters[name].flat) for name in names]
    whole = summed_over_ranks(torch.cat(flats))
    parts = torch.split(whole, [len(flat) for flat in flats])
    return {name: part.clone() for name, part in zip(names, parts, strict=True)}


def _told(error: OperationError | None) -> list[object] | None:
    return None if error is None else [isinstance(error, OperationFault), str(error)]


def _error(told: Sequence[object]) -> OperationError:
    is_fault, text = told
    return (OperationFault if is_fault else OperationError)(str(text))


def _summed(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in metrics for name in each)
    return {name: sum(each.get(name, 0.0) for each in metrics) for name in names}
