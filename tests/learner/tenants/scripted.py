"""A trainer and a sampler of a bigram model in numpy: real losses, gradients and steps without torch, in microseconds.

The logits of the token after x are U (e + s B A e), e being the embedding of x: an adapter on one linear layer.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from learner.tenants.sampling import SampleFailed
from learner.tenants.turns import TargetWeights
from learner.training.client_operations import (
    AdamStep,
    AdapterShape,
    ClientDatum,
    DatumOutput,
    ForwardBackward,
    OperationError,
    OperationResult,
)
from protocol.tinker.sampling import NO_TARGET, BestTokens, SampleAnswer, SampledTokens, SampleRequest

VOCABULARY, HIDDEN = 300, 16
POISON = 299
Floats = NDArray[np.float64]
_LAYER = "base_model.model.projection"


def base_weights() -> tuple[Floats, Floats]:
    """Embeddings and output projection."""
    random = np.random.default_rng(0)
    return random.normal(size=(VOCABULARY, HIDDEN)), random.normal(size=(VOCABULARY, HIDDEN))


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


@dataclass
class ScriptedAdapter:
    """Factors with their gradients and Adam's moments."""

    shape: AdapterShape
    factors: dict[str, Floats]
    gradients: dict[str, Floats] = field(default_factory=dict)
    moments: dict[str, Floats] = field(default_factory=dict)
    steps: int = 0

    def __post_init__(self) -> None:
        for name, factor in self.factors.items():
            self.gradients.setdefault(name, np.zeros_like(factor))
            self.moments.setdefault(f"{name}.first", np.zeros_like(factor))
            self.moments.setdefault(f"{name}.second", np.zeros_like(factor))


class ScriptedTenantTrainer:
    """A TenantTrainer by script. `calls` and `rounds` are what was asked of it."""

    def __init__(self) -> None:
        self.embeddings, self.output = base_weights()
        self.adapters: dict[str, ScriptedAdapter] = {}
        self.calls: list[str] = []
        self.rounds: list[Sequence[ForwardBackward]] = []
        self.entered, self.released = threading.Event(), threading.Event()
        self.released.set()

    def create(self, model_id: str, shape: AdapterShape) -> None:
        self.calls.append(f"create {model_id}")
        random = np.random.default_rng(shape.seed)
        down = random.uniform(-1, 1, size=(shape.rank, HIDDEN)) / np.sqrt(HIDDEN)
        self.adapters[model_id] = ScriptedAdapter(shape, {"down": down, "up": np.zeros((HIDDEN, shape.rank))})

    def remove(self, model_id: str) -> None:
        self.calls.append(f"remove {model_id}")
        del self.adapters[model_id]

    def check(self, operation: ForwardBackward) -> None:
        if operation.loss not in ("cross_entropy", "importance_sampling"):
            raise OperationError(f"loss_fn: {operation.loss!r} is not known")
        for number, datum in enumerate(operation.data):
            targets = datum.inputs.get("target_tokens")
            if targets is None or len(targets) != len(datum.token_ids) or targets.max() >= VOCABULARY:
                raise OperationError(f"data[{number}].loss_fn_inputs.target_tokens: as long as model_input, please")

    def run_round(self, operations: Sequence[ForwardBackward]) -> list[OperationResult | OperationError]:
        self.calls.append(f"round of {len(operations)}")
        self.rounds.append(operations)
        if any(POISON in datum.token_ids for each in operations for datum in each.data):
            raise IndexError("nobody has thought of this")
        self.entered.set()
        assert self.released.wait(30)
        return [self._one(operation) for operation in operations]

    def _one(self, operation: ForwardBackward) -> OperationResult | OperationError:
        adapter = self.adapters[operation.model_id]
        if any(np.isnan(each).any() for datum in operation.data for each in datum.inputs.values()):
            return OperationError("data[0]: NaN")
        outputs, total = [], 0.0
        for datum in operation.data:
            logprobs, loss = self._datum(adapter, datum, operation.loss, forward_only=operation.forward_only)
            outputs.append(DatumOutput({"logprobs": logprobs.astype(np.float32)}))
            total += loss
        return OperationResult(tuple(outputs), {"loss:sum": total})

    def _datum(
        self, adapter: ScriptedAdapter, datum: ClientDatum, loss: str, *, forward_only: bool
    ) -> tuple[Floats, float]:
        down, up = adapter.factors["down"], adapter.factors["up"]
        scale = adapter.shape.alpha / adapter.shape.rank
        embedded = self.embeddings[datum.token_ids]
        low = embedded @ down.T
        scores = log_softmax((embedded + scale * low @ up.T) @ self.output.T)
        targets = datum.inputs["target_tokens"].reshape(len(embedded), -1)
        logprobs = np.take_along_axis(scores, targets, axis=1)
        value, slope = _loss(loss, logprobs, datum.inputs)
        if not forward_only:
            on_scores = -np.exp(scores) * slope.sum(axis=1, keepdims=True)
            for column in range(targets.shape[1]):
                on_scores[np.arange(len(targets)), targets[:, column]] += slope[:, column]
            on_hidden = on_scores @ self.output
            adapter.gradients["up"] += scale * on_hidden.T @ low
            adapter.gradients["down"] += scale * (on_hidden @ up).T @ embedded
        return logprobs.reshape(datum.inputs["target_tokens"].shape), value

    def step(self, step: AdamStep) -> dict[str, float]:
        adapter = self.adapters[step.model_id]
        norm = float(np.sqrt(sum((each**2).sum() for each in adapter.gradients.values())))
        shrink = step.grad_clip_norm / norm if step.grad_clip_norm and norm > step.grad_clip_norm else 1.0
        adapter.steps += 1
        for name, factor in adapter.factors.items():
            gradient = adapter.gradients[name] * shrink
            first, second = adapter.moments[f"{name}.first"], adapter.moments[f"{name}.second"]
            first += (1 - step.beta1) * (gradient - first)
            second += (1 - step.beta2) * (gradient**2 - second)
            factor *= 1 - step.learning_rate * step.weight_decay
            unbiased = np.sqrt(second / (1 - step.beta2**adapter.steps)) + step.eps
            factor -= step.learning_rate * first / (1 - step.beta1**adapter.steps) / unbiased
            adapter.gradients[name] = np.zeros_like(factor)
        return {"step:max": float(adapter.steps), "grad_norm:mean": norm}

    def state(self, model_id: str) -> dict[str, NDArray[np.generic]]:
        adapter = self.adapters[model_id]
        named: dict[str, NDArray[Any]] = {"steps": np.array(adapter.steps)}
        for kind in ("factors", "gradients", "moments"):
            named |= {f"{kind}.{name}": each.copy() for name, each in getattr(adapter, kind).items()}
        return named

    def restore(
        self, model_id: str, shape: AdapterShape, state: Mapping[str, NDArray[Any]], *, optimizer: bool = True
    ) -> None:
        self.calls.append(f"restore {model_id}")
        parts: dict[str, dict[str, Floats]] = {"factors": {}, "gradients": {}, "moments": {}}
        for name, each in state.items():
            kind, _, rest = name.partition(".")
            if rest:
                parts[kind][rest] = np.array(each)
        if optimizer:
            self.adapters[model_id] = ScriptedAdapter(shape, **parts, steps=int(state["steps"]))
        else:
            self.adapters[model_id] = ScriptedAdapter(shape, parts["factors"])

    def peft(self, model_id: str) -> tuple[dict[str, NDArray[np.generic]], dict[str, object]]:
        adapter = self.adapters[model_id]
        tensors = {
            f"{_LAYER}.lora_A.weight": adapter.factors["down"].astype(np.float32),
            f"{_LAYER}.lora_B.weight": adapter.factors["up"].astype(np.float32),
        }
        return tensors, {"r": adapter.shape.rank, "lora_alpha": adapter.shape.alpha, "peft_type": "LORA"}  # type: ignore[return-value]


def _loss(name: str, logprobs: Floats, inputs: Mapping[str, NDArray[Any]]) -> tuple[float, Floats]:
    """The value, and its slope in each logprob."""
    if name == "cross_entropy":
        weights = inputs.get("weights", np.ones(logprobs.shape)).reshape(logprobs.shape).astype(np.float64)
        return -float((weights * logprobs).sum()), -weights
    ratio = np.exp(logprobs - inputs["logprobs"].reshape(logprobs.shape))
    gains = ratio * inputs["advantages"].reshape(logprobs.shape)
    return -float(gains.sum()), -gains


class ScriptedSampler:
    """Samples from the bigram model. `gate`, if set, is asked before each token."""

    def __init__(self) -> None:
        self.embeddings, self.output = base_weights()
        self.offered: dict[str, TargetWeights] = {}
        self.gate: Any = None
        self.failing = False

    async def offer(self, weights: TargetWeights) -> None:
        self.offered[weights.target_id] = weights

    async def forget(self, target_id: str) -> None:
        self.offered.pop(target_id, None)

    async def sample(self, weights: TargetWeights, request: SampleRequest, *, namespace: str) -> SampleAnswer:
        if self.failing:
            raise SampleFailed("the generators are gone")
        random = np.random.default_rng(request.seed)
        sequences = []
        for _ in range(request.samples):
            sequences.append(await self._sequence(weights, request, random))
        return SampleAnswer(tuple(sequences), **self._prompt(weights, request, random))

    async def _sequence(self, weights: TargetWeights, request: SampleRequest, random: Any) -> SampledTokens:
        tokens: list[int] = []
        logprobs, versions, rows = [], [], []
        while len(tokens) < request.max_tokens:
            if self.gate is not None:
                await self.gate()
            current = self.offered.get(weights.target_id, weights)
            scores = self._scores(current, np.array([(*request.prompt, *tokens)[-1]]))[0]
            warm = log_softmax(scores / request.temperature) if request.temperature else scores
            chosen = int(random.choice(VOCABULARY, p=np.exp(warm))) if request.temperature else int(scores.argmax())
            tokens.append(chosen)
            logprobs.append(float(warm[chosen]))
            versions.append(current.version)
            rows.append(warm)
            if request.stop and chosen in request.stop:
                return SampledTokens(tokens, logprobs, versions, stopped=True)
        top = _best(np.stack(rows), request.topk_sample) if request.topk_sample else None
        return SampledTokens(tokens, logprobs, versions, stopped=False, top=top)

    def _prompt(self, weights: TargetWeights, request: SampleRequest, random: Any) -> dict[str, Any]:
        current = self.offered.get(weights.target_id, weights)
        scores = self._scores(current, np.array(request.prompt[:-1], np.int64))
        given: dict[str, Any] = {}
        if request.prompt_logprobs:
            own = [float("nan"), *scores[np.arange(len(scores)), list(request.prompt[1:])]]
            first = len(own) - request.last_n if request.last_n else 0
            given["prompt_logprobs"] = [float("nan")] * first + own[first:]
        if request.topk_prompt:
            best = _best(scores, request.topk_prompt)
            blank = np.zeros((1, request.topk_prompt))
            given["topk_prompt"] = BestTokens(
                np.concatenate([blank.astype(np.int32), best.token_ids]),
                np.concatenate([blank + np.nan, best.logprobs]),
            )
        if request.targets is not None:
            asked = request.targets != NO_TARGET
            found = np.take_along_axis(scores, np.where(asked, request.targets, 0), axis=1)
            given["targets"] = np.where(asked, found, 0.0).astype(np.float32)
        if request.alternatives:
            drawn = np.stack([random.choice(VOCABULARY, request.alternatives, p=np.exp(row)) for row in scores])
            given["alternatives"] = drawn, np.take_along_axis(scores, drawn, axis=1).astype(np.float32)
        return given

    def _scores(self, weights: TargetWeights, token_ids: NDArray[np.int64]) -> Floats:
        hidden = self.embeddings[token_ids]
        if weights.folder is not None:
            tensors = load_file(weights.folder / "adapter_model.safetensors")
            config = json.loads((weights.folder / "adapter_config.json").read_text())
            low = hidden @ tensors[f"{_LAYER}.lora_A.weight"].T
            hidden = hidden + config["lora_alpha"] / config["r"] * low @ tensors[f"{_LAYER}.lora_B.weight"].T
        return log_softmax(hidden @ self.output.T)


def _best(rows: Floats, count: int) -> BestTokens:
    order = np.argsort(-rows, axis=1)[:, :count]
    return BestTokens(order.astype(np.int32), np.take_along_axis(rows, order, axis=1).astype(np.float32))
