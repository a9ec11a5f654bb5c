"""Scores of a prompt that generators do not compute, by the trainer's forward pass: logprobs of tokens that a client
has named, and tokens that are drawn at its places.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from learner.tenants.checkpoints import ADAPTER, CheckpointFacts
from learner.tenants.sampling import SampleFailed
from learner.tenants.tensor_files import TensorsDamaged, folder_facts, read_tensor_file
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

if TYPE_CHECKING:
    from learner.training.adapter_ranks import RankedAdapters
    from learner.training.adapter_trainer import AdapterTrainer

_UNCHANGED = AdapterShape(rank=1, seed=0, mlp=False, unembed=False)
"""A new adapter adds nothing."""


@dataclass(frozen=True)
class PromptExtras:
    """`targets` float32, shaped as those of the request, 0 where none is asked for; `alternatives`: token ids and their
    logprobs, [len(prompt) - 1, k].
    """

    targets: NDArray[np.float32] | None = None
    alternatives: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None


BetweenTurns = Callable[[Callable[[], PromptExtras]], Awaitable[PromptExtras]]
"""Has the trainer's thread do something between two of its turns."""
_Parts = tuple[AdapterShape, dict[str, NDArray[Any]]]


class PromptScores:
    """Scores with an adapter that is made for the purpose, and removed again.

    One prompt at a time waits for the trainer: many would keep training from its turns.
    """

    def __init__(self, trainer: "AdapterTrainer | RankedAdapters", *, between_turns: BetweenTurns) -> None:
        self._trainer, self._between_turns = trainer, between_turns
        self._one_at_a_time = asyncio.Lock()

    async def __call__(self, weights: TargetWeights, request: SampleRequest) -> PromptExtras:
        """The scores that the request asks for.

        Raises TinkerWireError, and SampleFailed if the weights are gone or the trainer fails.
        """
        try:
            parts = await asyncio.to_thread(_read, weights)
            async with self._one_at_a_time:
                return await self._between_turns(lambda: self._scored(parts, request))
        except OperationFault as error:
            raise SampleFailed(str(error)) from error
        except OperationError as error:
            raise TinkerWireError(f"{_field(request)}: {error}") from error
        except (OSError, TensorsDamaged) as error:
            raise SampleFailed(f"the weights of {weights.target_id} cannot be read: {error}") from error

    def _scored(self, parts: _Parts | None, request: SampleRequest) -> PromptExtras:
        tokens = np.array(request.prompt[:-1], np.int64)
        with self._adapter(parts) as model_id:
            targets = None if request.targets is None else self._targets(model_id, tokens, request.targets)
            alternatives = None
            if request.alternatives:
                alternatives = self._trainer.draw(
                    model_id, tokens, count=request.alternatives, temperature=request.temperature, seed=request.seed
                )
        return PromptExtras(targets, alternatives)

    def _targets(self, model_id: str, tokens: NDArray[np.int64], targets: NDArray[np.int64]) -> NDArray[np.float32]:
        datum = ClientDatum(tokens, {"target_tokens": np.where(targets == NO_TARGET, 0, targets)})
        operation = ForwardBackward(model_id, (datum,), "cross_entropy", forward_only=True)
        (result,) = self._trainer.run_round([operation])
        if isinstance(result, OperationError):
            raise result
        logprobs = result.outputs[0].arrays["logprobs"]
        return np.where(targets == NO_TARGET, 0.0, logprobs).astype(np.float32)

    @contextmanager
    def _adapter(self, parts: _Parts | None) -> Iterator[str]:
        model_id = f"scores:{uuid.uuid4().hex}"
        if parts is None:
            self._trainer.create(model_id, _UNCHANGED)
        else:
            self._trainer.restore(model_id, *parts, optimizer=False)
        try:
            yield model_id
        finally:
            self._trainer.remove(model_id)


def _field(request: SampleRequest) -> str:
    return "prompt_alt_tokens_k" if request.targets is None else "target_prompt_logprobs"


def _read(weights: TargetWeights) -> _Parts | None:
    if weights.folder is None:
        return None
    facts = CheckpointFacts.model_validate(folder_facts(weights.folder))
    return facts.shape, factors_of_peft(read_tensor_file(weights.folder, ADAPTER))
