"""A trainer of adapters by script: real sums and steps of a few numbers, and a chain over all that was done, in order.

The chain is a hash of the chain before and of the operation. Answers and saved weights show it, so that whoever knows
what was to be done knows what was done: an operation that was lost, done twice or out of turn makes another one.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.training.client_operations import (
    AdamStep,
    AdapterShape,
    DatumOutput,
    ForwardBackward,
    OperationError,
    OperationResult,
)
from simulation.world.clock import active
from simulation.world.threads import current_thread

BASE = "tiny/marked"
CONTEXT = 64
POISON = 250
"""A token that the trainer has not thought of."""
MARK = "base_model.model.mark.lora_A.weight"
"""The tensor of saved weights that shows the chain."""
_WIDTH = 4
_MARK_BYTES = 16
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TenantScript:
    """Traits of a learner that serves tenants: mean seconds of its trainer's opening, of a pass and of all else that it
    does, and the bytes from which on a file of its journal is followed by another.
    """

    open_s: float = 1.0
    pass_s: float = 0.02
    other_s: float = 0.005
    segment_bytes: int = 4000


@dataclass
class MarkedAdapter:
    """An adapter with its accumulated gradients, its moments, and the chain over what was done."""

    shape: AdapterShape
    factors: Floats
    chain: bytes
    gradients: Floats = field(default_factory=lambda: np.zeros(_WIDTH))
    moments: Floats = field(default_factory=lambda: np.zeros(_WIDTH))
    steps: int = 0

    @classmethod
    def new(cls, shape: AdapterShape) -> "MarkedAdapter":
        """As its seed has it."""
        factors = np.random.default_rng(shape.seed).normal(size=_WIDTH)
        return cls(shape, factors, _chained(b"", f"new {shape.seed}".encode()))

    def state(self) -> dict[str, NDArray[np.generic]]:
        """All that a resume needs, copied."""
        named = {name: getattr(self, name).copy() for name in ("factors", "gradients", "moments")}
        return {**named, "steps": np.array([self.steps]), "chain": np.frombuffer(self.chain, np.uint8).copy()}

    @classmethod
    def of_state(cls, shape: AdapterShape, state: Mapping[str, NDArray[Any]], *, optimizer: bool) -> "MarkedAdapter":
        """As it was; without its optimizer, moments and gradients are zero."""
        chain = bytes(state["chain"].tobytes())
        if not optimizer:
            return cls(shape, state["factors"].copy(), _chained(chain, b"without its optimizer"))
        rest = {name: state[name].copy() for name in ("gradients", "moments")}
        return cls(shape, state["factors"].copy(), chain, **rest, steps=int(state["steps"][0]))

    def run(self, operation: ForwardBackward) -> OperationResult:
        """A pass."""
        outputs, total, parts = [], 0.0, [b"pass", b"forward only" if operation.forward_only else b""]
        for datum in operation.data:
            inputs, weights = _features(datum.token_ids), datum.inputs["weights"].astype(np.float64)
            scores = inputs @ self.factors
            logprobs = -np.log1p(np.exp(-scores))
            total -= float(weights @ logprobs)
            if not operation.forward_only:
                self.gradients -= (weights / (1.0 + np.exp(scores))) @ inputs
            outputs.append(DatumOutput({"logprobs": logprobs.astype(np.float32)}))
            parts += [datum.token_ids.tobytes(), weights.tobytes()]
        self.chain = _chained(self.chain, *parts)
        return OperationResult(tuple(outputs), {"loss:sum": total, "chain:sum": number_of(self.chain)})

    def step(self, step: AdamStep) -> dict[str, float]:
        """A step with the accumulated gradients."""
        norm = float(np.sqrt((self.gradients**2).sum()))
        self.moments += (1 - step.beta1) * (self.gradients - self.moments)
        self.factors -= step.learning_rate * self.moments / (1.0 + np.abs(self.moments))
        self.gradients = np.zeros(_WIDTH)
        self.steps += 1
        self.chain = _chained(self.chain, f"step {step.learning_rate!r} {step.beta1!r}".encode())
        return {"step:max": float(self.steps), "grad_norm:mean": norm, "chain:sum": number_of(self.chain)}


class MarkedTrainer:
    """Stands for learner.training.adapter_trainer.AdapterTrainer."""

    def __init__(self, script: TenantScript) -> None:
        self._script = script
        self._adapters: dict[str, MarkedAdapter] = {}
        self.base = SimpleNamespace(name=BASE, context_length=CONTEXT)
        _take(script.open_s)

    def create(self, model_id: str, shape: AdapterShape) -> None:
        """See TenantTrainer."""
        _take(self._script.other_s)
        self._adapters[model_id] = MarkedAdapter.new(shape)

    def remove(self, model_id: str) -> None:
        """See TenantTrainer."""
        del self._adapters[model_id]

    def check(self, operation: ForwardBackward) -> None:
        """See TenantTrainer."""
        if operation.loss != "cross_entropy":
            raise OperationError(f"loss_fn: {operation.loss!r}; expected cross_entropy")
        for number, datum in enumerate(operation.data):
            if len(datum.inputs.get("weights", ())) != len(datum.token_ids):
                raise OperationError(f"data[{number}].loss_fn_inputs.weights: expected as many as there are tokens")

    def run_round(self, operations: Sequence[ForwardBackward]) -> list[OperationResult | OperationError]:
        """See TenantTrainer."""
        _take(self._script.pass_s)
        if any(POISON in datum.token_ids for operation in operations for datum in operation.data):
            raise IndexError("nobody has thought of this")
        return [self._run(operation) for operation in operations]

    def _run(self, operation: ForwardBackward) -> OperationResult | OperationError:
        for number, datum in enumerate(operation.data):
            if np.isnan(datum.inputs["weights"]).any():
                return OperationError(f"data[{number}].loss_fn_inputs.weights: NaN")
        return self._adapters[operation.model_id].run(operation)

    def step(self, step: AdamStep) -> dict[str, float]:
        """See TenantTrainer."""
        _take(self._script.other_s)
        return self._adapters[step.model_id].step(step)

    def state(self, model_id: str) -> dict[str, NDArray[np.generic]]:
        """See TenantTrainer."""
        return self._adapters[model_id].state()

    def restore(
        self, model_id: str, shape: AdapterShape, state: Mapping[str, NDArray[Any]], *, optimizer: bool = True
    ) -> None:
        """See TenantTrainer."""
        _take(self._script.other_s)
        self._adapters[model_id] = MarkedAdapter.of_state(shape, state, optimizer=optimizer)

    def peft(self, model_id: str) -> tuple[dict[str, NDArray[np.generic]], dict[str, object]]:
        """See TenantTrainer."""
        adapter = self._adapters[model_id]
        return {MARK: np.frombuffer(adapter.chain, np.uint8).copy()}, {"r": adapter.shape.rank, "peft_type": "LORA"}


def number_of(chain: bytes) -> float:
    """A number that a float64 holds, for metrics."""
    return float(int.from_bytes(chain[:6], "little"))


def _chained(chain: bytes, *parts: bytes) -> bytes:
    digest = hashlib.blake2b(chain, digest_size=_MARK_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _features(token_ids: NDArray[np.int64]) -> Floats:
    """[T, 4]."""
    return np.asarray(np.sin(np.outer(token_ids + 1.0, np.arange(1.0, _WIDTH + 1))))


def _take(seconds: float) -> None:
    """Chance makes it longer or shorter. Whoever works in no thread takes no time."""
    thread = current_thread()
    if thread is not None and seconds:
        thread.sleep(active().random.expovariate(1 / seconds))
