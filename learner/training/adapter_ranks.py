"""Training models of clients on several ranks: rank 0 is asked, and the others do the same on adapters of their own.

    service ─▶ RankedAdapters.step ──────▶ command ─▶ AdapterTrainer.step on every rank
                             .run_round ─▶ command, and the operations ─▶ AdapterTrainer.run_round on every rank

What changes nothing, or is of the disk, is rank 0's alone: a state, an adapter's files, what is drawn. So files do not
depend on the number of ranks. An adapter's numbers are equal on all ranks, since these do the same with the same sums.
After what changes them the ranks tell each other whether it failed: it did on all, or they begin again.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.numpy import load, save

from learner.algorithms.client_graphs import LossGraph
from learner.training.adapter_trainer import AdapterTrainer
from learner.training.client_checks import BaseDescription
from learner.training.client_operations import (
    AdamStep,
    AdapterShape,
    Array,
    ClientDatum,
    ForwardBackward,
    OperationError,
    OperationResult,
)
from learner.training.ranks import (
    Action,
    CommandChannel,
    RankCommand,
    is_of_ranks,
    rank_count,
    share_bytes,
    summed_over_ranks,
)
from services.process import StartAgain

logger = logging.getLogger(__name__)

T = TypeVar("T")

_HEAD_SIZE_BYTES = 8


class RanksApart(StartAgain):
    """A collective among the ranks has failed, and they may no longer have the same numbers."""


class RankedAdapters:
    """Rank 0's trainer, which has the other ranks do what it does. All calls but `check` and `base` are made from one
    thread. Raises RanksApart where a rank is gone, or has failed where others have not.
    """

    def __init__(self, own: AdapterTrainer, commands: CommandChannel) -> None:
        self._own, self._commands = own, commands

    @property
    def base(self) -> BaseDescription:
        """The base model."""
        return self._own.base

    def create(self, model_id: str, shape: AdapterShape) -> None:
        """See AdapterTrainer.create."""
        shape = self._own.seeded(shape)
        self._tell("create_adapter", model_id=model_id, shape=dataclasses.asdict(shape))
        _alike(lambda: self._own.create(model_id, shape))

    def remove(self, model_id: str) -> None:
        """See AdapterTrainer.remove."""
        self._tell("remove_adapter", model_id=model_id)
        self._own.remove(model_id)

    def check(self, operation: ForwardBackward) -> None:
        """See AdapterTrainer.check."""
        self._own.check(operation)

    def run_round(self, operations: Sequence[ForwardBackward]) -> list[OperationResult | OperationError]:
        """See AdapterTrainer.run_round."""
        packed = packed_operations(operations)  # an error of it is before the others wait for the bytes
        self._tell("client_round")
        with _in_step():
            share_bytes(packed)
            return self._own.run_round(operations)

    def draw(
        self, model_id: str, tokens: Array, *, count: int, temperature: float, seed: int | None = None
    ) -> tuple[Array, Array]:
        """See AdapterTrainer.draw."""
        return self._own.draw(model_id, tokens, count=count, temperature=temperature, seed=seed)

    def step(self, step: AdamStep) -> dict[str, float]:
        """See AdapterTrainer.step."""
        self._tell("step_adapter", **dataclasses.asdict(step))
        return _alike(lambda: self._own.step(step))

    def state(self, model_id: str) -> dict[str, Array]:
        """See AdapterTrainer.state."""
        return self._own.state(model_id)

    def restore(
        self, model_id: str, shape: AdapterShape, state: Mapping[str, Array], *, optimizer: bool = True
    ) -> None:
        """See AdapterTrainer.restore."""
        packed = save(dict(state))
        self._tell("restore_adapter", model_id=model_id, shape=dataclasses.asdict(shape), optimizer=optimizer)
        with _in_step():
            share_bytes(packed)
        _alike(lambda: self._own.restore(model_id, shape, state, optimizer=optimizer))

    def peft(self, model_id: str) -> tuple[dict[str, Array], dict[str, object]]:
        """See AdapterTrainer.peft."""
        return self._own.peft(model_id)

    def _tell(self, action: Action, **arguments: object) -> None:
        try:
            self._commands.send(RankCommand(action=action, arguments=json.dumps(arguments)))
        except RuntimeError as error:
            if is_of_ranks(error):
                raise _apart(error) from error
            raise


def follow_adapters(own: AdapterTrainer, commands: CommandChannel) -> None:
    """On the ranks other than 0: does what rank 0 does, until that says stop. Raises RanksApart."""
    while (command := commands.receive()).action != "stop":
        _obey(own, command)


def _obey(own: AdapterTrainer, command: RankCommand) -> None:
    told: dict[str, Any] = json.loads(command.arguments)
    match command.action:
        case "create_adapter":
            _obeyed(command, lambda: own.create(told["model_id"], AdapterShape(**told["shape"])))
        case "remove_adapter":
            own.remove(told["model_id"])
        case "restore_adapter":
            content = share_bytes(None)
            shape, optimizer = told["shape"], told["optimizer"]
            _obeyed(
                command,
                lambda: own.restore(told["model_id"], AdapterShape(**shape), load(content), optimizer=optimizer),
            )
        case "step_adapter":
            _obeyed(command, lambda: own.step(AdamStep(**told)))
        case "client_round":
            with _in_step():
                own.run_round(unpacked_operations(share_bytes(None)))
        case _:
            raise AssertionError(command.action)


def _obeyed(command: RankCommand, work: Callable[[], object]) -> None:
    try:
        _alike(work)
    except StartAgain:
        raise
    except Exception as error:  # noqa: BLE001 - all ranks have one, and rank 0 tells the client
        logger.debug("%s: %s", command.action, error)


def _alike(work: Callable[[], T]) -> T:
    """Does what all ranks do at once, which changes nothing where it fails. Raises what it raised if it failed on all
    of them, and RanksApart if on some.
    """
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001 - the other ranks wait for this one's word
        failure = error
    try:
        with _in_step():
            failed = int(summed_over_ranks(torch.tensor([int(failure is not None)])))
        if 0 < failed < rank_count():
            what = "another rank failed" if failure is None else f"this rank failed: {failure}"
            raise RanksApart(f"not all ranks did the same: {what}") from failure
        if failure is not None:
            raise failure
    finally:
        failure = None  # its traceback has this frame
    return result


@contextmanager
def _in_step() -> Iterator[None]:
    """Where the other ranks wait for this one: whatever it raises leaves them apart."""
    try:
        yield
    except StartAgain:
        raise
    except Exception as error:
        raise _apart(error) from error


def packed_operations(operations: Sequence[ForwardBackward]) -> bytes:
    """The operations as bytes: the size of a head in JSON, the head, and the arrays of all data."""
    arrays: dict[str, Array] = {}
    heads: list[dict[str, object]] = []
    for place, operation in enumerate(operations):
        for number, datum in enumerate(operation.data):
            arrays[f"{place}/{number}"] = datum.token_ids
            arrays |= {f"{place}/{number}/{name}": value for name, value in datum.inputs.items()}
        heads.append(
            {
                "model_id": operation.model_id,
                "loss": operation.loss,
                "config": dict(operation.config),
                "forward_only": operation.forward_only,
                "graph": None if operation.graph is None else _told(operation.graph),
                "inputs": [list(datum.inputs) for datum in operation.data],
            }
        )
    head = json.dumps(heads).encode()
    whole = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
    tensors: bytes = save(whole)
    return len(head).to_bytes(_HEAD_SIZE_BYTES, "big") + head + tensors


def unpacked_operations(content: bytes) -> list[ForwardBackward]:
    """The operations of `packed_operations`."""
    size = int.from_bytes(content[:_HEAD_SIZE_BYTES], "big")
    heads = json.loads(content[_HEAD_SIZE_BYTES : _HEAD_SIZE_BYTES + size])
    arrays = load(content[_HEAD_SIZE_BYTES + size :])
    operations = []
    for place, head in enumerate(heads):
        inputs = head.pop("inputs")
        graph = head.pop("graph")
        data = tuple(
            ClientDatum(arrays[f"{place}/{number}"], {name: arrays[f"{place}/{number}/{name}"] for name in names})
            for number, names in enumerate(inputs)
        )
        operations.append(ForwardBackward(data=data, graph=None if graph is None else LossGraph.parse(**graph), **head))
    return operations


def _told(graph: LossGraph) -> dict[str, object]:
    inputs = [{"name": each.name, "rank": each.rank} for each in graph.inputs]
    return {"name": graph.name, "inputs": inputs, "graph": dict(graph.source)}


def _apart(error: Exception) -> RanksApart:
    what = "a collective among the ranks failed" if is_of_ranks(error) else "a rank failed in the midst of a collective"
    return RanksApart(f"{what}: {(str(error).splitlines() or [type(error).__name__])[0]}")
