"""Logprobs of tokens that a client names at the places of a prompt, by the trainer: generators have none of those."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.tenants.checkpoints import ADAPTER, CheckpointFacts
from learner.tenants.sampling import SampleFailed
from learner.tenants.tensor_files import TensorsDamaged, folder_facts, read_tensor_file
from learner.tenants.trainer import TenantTrainer
from learner.tenants.turns import TargetWeights
from learner.training.client_operations import (
    AdapterShape,
    ClientDatum,
    ForwardBackward,
    OperationError,
    OperationFault,
)
from learner.training.peft_names import factors_of_peft
from protocol.tinker.sampling import NO_TARGET, SampleRequest
from protocol.tinker.tensors import TinkerWireError

_UNCHANGED = AdapterShape(rank=1, seed=0, mlp=False, unembed=False)
"""A new adapter adds nothing."""
Scores = NDArray[np.float32]
BetweenTurns = Callable[[Callable[[], Scores]], Awaitable[Scores]]
"""Has the trainer's thread do something between two of its turns."""


class TargetScores:
    """Scores targets with an adapter that is made for the purpose, and removed again."""

    def __init__(self, trainer: TenantTrainer, *, between_turns: BetweenTurns) -> None:
        self._trainer, self._between_turns = trainer, between_turns

    async def __call__(self, weights: TargetWeights, request: SampleRequest) -> Scores:
        """Logprobs of the request's `targets`, shaped as they are, 0 where none is asked for.

        Raises TinkerWireError, and SampleFailed if the weights are gone or the trainer fails.
        """
        assert request.targets is not None, request
        try:
            parts = await asyncio.to_thread(_read, weights)
            return await self._between_turns(lambda: self._score(parts, request, request.targets))
        except OperationFault as error:
            raise SampleFailed(str(error)) from error
        except OperationError as error:
            raise TinkerWireError(f"target_prompt_logprobs: {error}") from error
        except (OSError, TensorsDamaged) as error:
            raise SampleFailed(f"the weights of {weights.target_id} cannot be read: {error}") from error

    def _score(self, parts: "_Parts | None", request: SampleRequest, targets: Any) -> Scores:
        inputs = {"target_tokens": np.where(targets == NO_TARGET, 0, targets)}
        datum = ClientDatum(np.array(request.prompt[:-1], np.int64), inputs)
        with self._adapter(parts) as model_id:
            operation = ForwardBackward(model_id, (datum,), "cross_entropy", forward_only=True)
            (result,) = self._trainer.run_round([operation])
        if isinstance(result, OperationError):
            raise result
        logprobs = result.outputs[0].arrays["logprobs"]
        return np.where(targets == NO_TARGET, 0.0, logprobs).astype(np.float32)

    @contextmanager
    def _adapter(self, parts: "_Parts | None") -> Iterator[str]:
        model_id = f"scores:{uuid.uuid4().hex}"
        if parts is None:
            self._trainer.create(model_id, _UNCHANGED)
        else:
            self._trainer.restore(model_id, *parts, optimizer=False)
        try:
            yield model_id
        finally:
            self._trainer.remove(model_id)


_Parts = tuple[AdapterShape, dict[str, NDArray[Any]]]


def _read(weights: TargetWeights) -> _Parts | None:
    if weights.folder is None:
        return None
    facts = CheckpointFacts.model_validate(folder_facts(weights.folder))
    return facts.shape, factors_of_peft(read_tensor_file(weights.folder, ADAPTER))
