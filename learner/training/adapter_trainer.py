"""Training models of many clients on one base model: their operations in shared passes, their steps each for itself.

    operations of a round ─▶ packed rows ─▶ one pass over each ─▶ losses by operation ─▶ gradients by adapter
                                                                        │ one fails
                                                                        └─▶ the others again, without it

Gradients of a round are added to what the adapters have accumulated once all of it has succeeded. An operation that
fails adds nothing, and the others come out as if it had never been there.

Where several ranks are in a group, each has all adapters, and all do the same calls. The rows of a round are split, and
what they give is summed before anything is changed: all ranks go on with the same numbers, or have the same error.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from learner.training.adapter_layers import MAX_RANK, AdaptedModel, ClientAdapter
from learner.training.adapter_optimizer import AdamState
from learner.training.client_checks import (
    TARGETS,
    BaseDescription,
    check_operation,
    check_shape,
    check_step,
)
from learner.training.client_gradients import OperationTally, add_row, with_lags
from learner.training.client_operations import (
    AdamStep,
    AdapterShape,
    Array,
    ClientDatum,
    ForwardBackward,
    OperationError,
    OperationFault,
    OperationResult,
)
from learner.training.client_rows import ClientRow, RankShare, rows_of
from learner.training.config import Dtype
from learner.training.layouts import takes_packed_rows
from learner.training.logprobs import Chunking
from learner.training.peft_names import peft_names
from learner.training.policy import LogprobSettings, PolicyModel, load_causal_lm, torch_dtype
from learner.training.ranks import rank, rank_count
from learner.training.round_sums import share_logprobs, share_tallies, summed_gradients
from learner.training.self_check import check_policy
from learner.training.unfit_model import UnfitModel
from learner.training.whole_weights import WholeWeights

logger = logging.getLogger(__name__)

_CHUNKING = Chunking()
# On a CPU the numbers of a longer row no longer lie in its caches.
_MICROBATCH_TOKENS = {"cpu": 2048}
_MICROBATCH_TOKENS_ELSEWHERE = 16384
# Of a model whose config names no longest sequence.
_UNBOUNDED_CONTEXT = 1 << 20
_WEIGHT_BYTES, _NAME_BYTES = 4, 256
_STEPS = "steps"
_SEEDS = 1 << 63
_SEED_BITS = 63
_SUMS = ("gradient", "mean", "square")


class _RoundFailure(Exception):
    """A pass has failed, and not by the loss of an operation that is known. `cause` is the error of an operation that
    was alone.
    """

    def __init__(self, cause: OperationError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class AdapterTrainer:
    """The training models on one base model. All calls but `check` and `base` are made from one thread.

    `passes` counts forward passes of the base model, to show how many operations share one.
    """

    def __init__(self, model: AdaptedModel, *, base: BaseDescription, microbatch_tokens: int | None = None) -> None:
        self._model, self._base = model, base
        usual = _MICROBATCH_TOKENS.get(model.device.type, _MICROBATCH_TOKENS_ELSEWHERE)
        self._microbatch_tokens = microbatch_tokens or usual
        self._adapters: dict[str, ClientAdapter] = {}
        self._states: dict[str, AdamState] = {}
        self._base_weights: dict[str, Tensor] | None = None
        """On the host, while a training model has taken their place."""
        self.passes = 0

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        name: str | None = None,
        dtype: Dtype = "float32",
        device: torch.device | None = None,
        microbatch_tokens: int | None = None,
        chunking: Chunking = _CHUNKING,
    ) -> AdapterTrainer:
        """A trainer on the model in the folder `path`, which clients call `name`; a row has at most
        `microbatch_tokens`, by default what suits the device.

        Raises UnfitModel for a model that the learner does not train, or not in packed rows with adapters.
        """
        causal_lm = load_causal_lm(path, dtype=torch_dtype(dtype)).to(device or torch.device("cpu"))
        causal_lm.requires_grad_(False)
        if not takes_packed_rows(causal_lm):
            raise UnfitModel(
                f"{path}: {type(causal_lm).__name__} takes no packed rows, and adapters of several clients are trained "
                "in packed rows alone: expected a model of attention layers. Name another model."
            )
        settings = LogprobSettings(temperature=1.0, chunking=chunking, with_entropy=False)
        policy = PolicyModel(causal_lm, settings=settings)
        with torch.no_grad():
            check_policy(policy, path, compute=lambda microbatch: policy(microbatch)[0])
        model = AdaptedModel(causal_lm, chunking=chunking)
        parts = {layer.part for layer in model.layers.values()}
        if not parts >= {"attention", "mlp"} and not (model.has_experts and "attention" in parts):
            missing = "attention" if "mlp" in parts else "MLPs"
            raise UnfitModel(
                f"{path}: {type(causal_lm).__name__} has no linear layers of {missing} that could have adapters. Name "
                "another model."
            )
        trainer = cls(model, base=_described(causal_lm, name or str(path)), microbatch_tokens=microbatch_tokens)
        trainer._try_adapters(path)
        return trainer

    @property
    def whole_bytes(self) -> int:
        """At most so long is a file of all weights, in float32, with names and shapes."""
        return sum(_WEIGHT_BYTES * each.numel() + _NAME_BYTES for each in self._model.parameters.values())

    @property
    def base(self) -> BaseDescription:
        """The base model."""
        return self._base

    @property
    def has_all_weights(self) -> bool:
        """True while a training model is all weights of the base model."""
        return any(isinstance(each, WholeWeights) for each in self._adapters.values())

    def seeded(self, shape: AdapterShape) -> AdapterShape:
        """The shape with a seed of its own if it has none."""
        return shape if shape.seed is not None else replace(shape, seed=secrets.randbits(_SEED_BITS))

    def create(self, model_id: str, shape: AdapterShape) -> None:
        """A new training model. Raises OperationError for a shape that the base model cannot have."""
        if model_id in self._adapters:
            raise OperationError(f"the training model {model_id} is there already: create it under another id")
        self._check_shape(shape)
        self._check_alone(model_id, shape)
        adapter = self._model.new_adapter(shape) if shape.rank else self._whole(shape, {})
        self._adapters[model_id], self._states[model_id] = adapter, AdamState(adapter.flat)

    def remove(self, model_id: str) -> None:
        """Forgets a training model; its `state` can be restored. Nothing happens if there is none."""
        adapter = self._adapters.pop(model_id, None)
        self._states.pop(model_id, None)
        if isinstance(adapter, WholeWeights):
            self._give_back()

    def check(self, operation: ForwardBackward) -> None:
        """Raises OperationError for an operation that cannot be done. It is cheap, and any thread may call it; the
        training model itself may be parked.
        """
        check_operation(operation, self._base)

    def run_round(self, operations: Sequence[ForwardBackward]) -> list[OperationResult | OperationError]:
        """Does the operations together, each as if it were alone but for rounding. Returns results in order, or errors.

        The rows of all of them are packed and run through the base model once. If an operation fails, the others are
        run again; if it is not clear which one, each is run alone.
        """
        results: dict[int, OperationResult | OperationError] = {}
        operations = list(operations)
        for number, operation in enumerate(operations):
            try:
                self._adapter(operation.model_id)
                self.check(operation)
                operations[number] = with_lags(operation, self._states[operation.model_id].steps)
            except OperationError as error:
                results[number] = error
        while len(results) < len(operations):
            waiting = [number for number in range(len(operations)) if number not in results]
            for number, result in zip(waiting, self._try([operations[each] for each in waiting]), strict=True):
                if result is not None:
                    results[number] = result
        return [results[number] for number in range(len(operations))]

    def draw(
        self, model_id: str, tokens: Array, *, count: int, temperature: float, seed: int | None = None
    ) -> tuple[Array, Array]:
        """After each of the tokens `count` next ones, drawn independently at the temperature, and their logprobs at
        temperature 1: int64 and float32 [T, count]. A temperature next to 0 draws the most probable one. Raises
        OperationError, also where weights have grown until logits are not finite.
        """
        operation = ForwardBackward(model_id, (ClientDatum(tokens, {TARGETS: tokens}),), "cross_entropy", {}, True)
        self._adapter(model_id)
        self.check(operation)
        random = torch.Generator(self._model.device)
        random.seed() if seed is None else random.manual_seed(seed % _SEEDS)
        (row,) = rows_of([operation], adapters=self._adapters, max_tokens=len(tokens), device=self._model.device)
        self.passes += 1
        with self._model.of_segments(row.segments), torch.no_grad():
            ids, logprobs = self._model.drawn(row.row, count=count, temperature=temperature, random=random)
        return _on_host(ids), _on_host(logprobs.float())

    def step(self, step: AdamStep) -> dict[str, float]:
        """Takes a step of AdamW of a training model, which spends what it has accumulated. Returns metrics.

        Raises OperationError, with weights and moments as they were, for what would not be finite.
        """
        self._adapter(step.model_id)
        check_step(step)
        state = self._states[step.model_id]
        norm = state.take(step)
        self._adapters[step.model_id].settle()
        return {"grad_norm:mean": norm, "step:max": float(state.steps)}

    def state(self, model_id: str) -> dict[str, Array]:
        """All that a training model is, but its shape, as copies on the host: factors, moments, accumulated gradients
        and the number of steps. `restore` continues from it bit by bit.
        """
        adapter, kept = self._adapter(model_id), self._states[model_id]
        state: dict[str, Array] = {_STEPS: np.array(kept.steps, dtype=np.int64)}
        state |= {name: _on_host(part) for name, part in adapter.by_name(adapter.flat).items()}
        for ending in _SUMS:
            flat: Tensor | None = getattr(kept, ending)
            if flat is not None:
                state |= {f"{name}.{ending}": _on_host(part) for name, part in adapter.by_name(flat).items()}
        return state

    def restore(
        self, model_id: str, shape: AdapterShape, state: Mapping[str, Array], *, optimizer: bool = True
    ) -> None:
        """A training model as `state` has it, in place of one that is there; without `optimizer` its factors alone,
        with no steps and no gradients. Raises OperationError for a state that is not of this shape and base model.
        """
        self._check_shape(shape)
        self._check_alone(model_id, shape)
        sums = {
            ending: self._flat(self._parts(shape, state, f".{ending}"))
            for ending in _SUMS
            if optimizer and any(name.endswith(f".{ending}") for name in state)
        }
        parts = self._parts(shape, state, "")
        adapter = self._model.adapter_with(shape, parts) if shape.rank else self._whole(shape, parts)
        steps = int(state[_STEPS]) if optimizer else 0
        self._adapters[model_id], self._states[model_id] = adapter, AdamState(adapter.flat, **sums, steps=steps)

    def _flat(self, parts: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([part.flatten() for part in parts.values()]).to(self._model.device)

    def _whole(self, shape: AdapterShape, values: Mapping[str, Tensor]) -> WholeWeights:
        """All weights with these values, or as they are if there are none."""
        parameters = self._model.parameters
        if self._base_weights is None:
            self._base_weights = {name: each.detach().cpu().clone() for name, each in parameters.items()}
        flat = self._flat({name: values.get(name, each.detach().float().cpu()) for name, each in parameters.items()})
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        whole = WholeWeights(shape, flat, {}, parameters)
        whole.settle()
        return whole

    def _give_back(self) -> None:
        """The base model is what it was before all of its weights were trained."""
        assert self._base_weights is not None, "kept when they were given away"
        with torch.no_grad():
            for name, parameter in self._model.parameters.items():
                parameter.requires_grad_(False).copy_(self._base_weights[name])
        self._base_weights = None

    def _check_alone(self, model_id: str, shape: AdapterShape) -> None:
        """Raises OperationError for a model beside one that is all weights, and for all weights beside others."""
        others = self._adapters.keys() - {model_id}
        if others and (shape.rank == 0 or self.has_all_weights):
            raise OperationError(
                "all weights are trained by one training model at a time, without adapters beside it: expected no "
                "other training model in memory. Unload the other ones first."
            )

    def peft(self, model_id: str) -> tuple[dict[str, Array], dict[str, object]]:
        """The adapter as peft keeps it: tensors of its adapter_model.safetensors, and its adapter_config.json. Of all
        weights those of transformers' model.safetensors, and its config.json.
        """
        adapter = self._adapter(model_id)
        if isinstance(adapter, WholeWeights):
            return {name: _on_host(part) for name, part in adapter.by_name(adapter.flat).items()}, self._model.config
        tensors = {}
        for name, pair in adapter.factors.items():
            down, up = peft_names(name)
            tensors[down], tensors[up] = _on_host(pair.down), _on_host(pair.up)
        config: dict[str, object] = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self._base.name,
            "r": adapter.shape.rank,
            "lora_alpha": adapter.shape.alpha,
            "lora_dropout": 0.0,
            "target_modules": self._targets(adapter),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        return tensors, config

    def _targets(self, adapter: ClientAdapter) -> list[str]:
        """The last parts of the layers' names, if they name no other layer that could be adapted; else the names."""
        last = sorted({name.rpartition(".")[2] for name in adapter.factors})
        others = {name.rpartition(".")[2] for name in self._model.linear_names - set(adapter.factors)}
        return sorted(adapter.factors) if others & set(last) else last

    def _parts(self, shape: AdapterShape, state: Mapping[str, Array], ending: str) -> dict[str, Tensor]:
        """The tensors of a state whose names are those of the factors and `ending`. Raises OperationError."""
        parts = {}
        sizes = self._model.factor_sizes(shape) if shape.rank else self._model.weight_sizes
        for name, size in sizes.items():
            found = state.get(name + ending)
            if found is None or found.shape != size:
                raise OperationError(
                    f"the state has {name}{ending} of the shape {None if found is None else found.shape}: expected "
                    f"{size} for rank {shape.rank} on {self._base.name}. Was it saved of another base model or shape?"
                )
            parts[name] = torch.from_numpy(np.array(found, dtype=np.float32))
        return parts

    def _adapter(self, model_id: str) -> ClientAdapter:
        if model_id not in self._adapters:
            raise OperationError(f"no training model {model_id} is loaded: create it, or load its weights")
        return self._adapters[model_id]

    def _check_shape(self, shape: AdapterShape) -> None:
        check_shape(shape, max_rank=MAX_RANK)
        if shape.mlp and shape.rank and self._model.has_experts:
            raise OperationError(
                f"{self._base.name} is a mixture of experts, which have no adapters here: expected train_mlp=False"
            )

    def _try(self, operations: Sequence[ForwardBackward]) -> list[OperationResult | OperationError | None]:
        """Runs the operations together. None for those that have to be run again, since another one failed."""
        try:
            return self._run(operations)
        except _RoundFailure as failure:
            if len(operations) == 1:
                logger.warning("an operation of %s failed: %s", operations[0].model_id, failure.cause)
                return [failure.cause]
            logger.warning("a round of %d operations failed, each is run alone: %s", len(operations), failure.cause)
        return [result for operation in operations for result in self._try([operation])]

    def _run(self, operations: Sequence[ForwardBackward]) -> list[OperationResult | OperationError | None]:
        tallies = [OperationTally(operation) for operation in operations]
        gathered: dict[str, Tensor] = {}
        fault = share_tallies(tallies, self._own_rows(operations, tallies, gathered))
        if fault is not None:
            raise _RoundFailure(fault)
        if any(tally.error is not None for tally in tallies):
            return [tally.error for tally in tallies]
        share_logprobs(tallies)
        trained = [each.model_id for each in operations if each.data and not each.forward_only]
        for model_id, gradient in summed_gradients(gathered, self._adapters, trained).items():
            self._states[model_id].add(gradient)
        return [tally.result() for tally in tallies]

    def _own_rows(
        self, operations: Sequence[ForwardBackward], tallies: Sequence[OperationTally], gathered: dict[str, Tensor]
    ) -> OperationError | None:
        """Does this rank's rows. Returns an error if they cannot be done together with each other.

        The error has nothing of the pass: results are kept, and frames of it would keep graph and hidden states, with
        which the next operation finds no memory.
        """
        rows = rows_of(
            operations,
            adapters=self._adapters,
            max_tokens=self._microbatch_tokens,
            device=self._model.device,
            share=RankShare(rank(), rank_count()),
        )
        try:
            for row in rows:
                self._pass(row, tallies, gathered)
        except OperationError as error:
            return error.with_traceback(None)
        except Exception as error:  # the other ranks wait for this one's word
            logger.warning("a pass failed", exc_info=error)
            return OperationFault(f"the learner failed: {error}")
        return None

    def _pass(self, row: ClientRow, tallies: Sequence[OperationTally], gathered: dict[str, Tensor]) -> None:
        """Runs a row through the model, and back unless an operation has failed. Raises OperationError for logprobs or
        gradients that are not numbers.
        """
        self.passes += 1
        with self._model.of_segments(row.segments), torch.set_grad_enabled(not row.forward_only):
            logprobs = self._model.logprobs(row.row)
            on_host = [each.detach().cpu() for each in logprobs]
            _check_logprobs(row, on_host)
            slopes = add_row(tallies, row.data, on_host, with_gradient=not row.forward_only)
            if row.forward_only or any(tally.error is not None for tally in tallies):
                return
            self._go_back(row, logprobs, slopes, gathered)

    def _go_back(
        self, row: ClientRow, logprobs: Sequence[Tensor], slopes: Sequence[Tensor], gathered: dict[str, Tensor]
    ) -> None:
        leaves = {model_id: self._adapters[model_id].leaves for model_id in row.models}
        found = torch.autograd.grad(
            logprobs,
            [leaf for each in leaves.values() for leaf in each],
            [slope.to(each) for slope, each in zip(slopes, logprobs, strict=True)],
            allow_unused=True,
        )
        gradients = iter(found)
        for model_id, own in leaves.items():
            made = torch.cat([_or_zero(next(gradients), leaf).flatten().float() for leaf in own])
            if not bool(made.isfinite().all()):
                raise OperationError(
                    "the gradient through the model is not finite: expected finite numbers. Weights or advantages of "
                    "the data, or the weights of the training model, are too large: send smaller ones, or load an "
                    "earlier checkpoint."
                )
            gathered[model_id] = made if model_id not in gathered else gathered[model_id].add_(made)

    def _try_adapters(self, path: Path) -> None:
        """Runs an adapter on every layer once. Raises UnfitModel, with the name `path`, if a layer does not take it."""
        name = "trial"
        self.create(name, AdapterShape(rank=1, seed=0, mlp=not self._model.has_experts))
        tokens = np.zeros(3, dtype=np.int64)
        operation = ForwardBackward(name, (ClientDatum(tokens, {"target_tokens": tokens}),) * 2, "cross_entropy")
        (result,) = self.run_round([operation])
        if isinstance(result, OperationError):
            raise UnfitModel(f"{path}: adapters do not work on this model: {result}")
        self.remove(name)
        self.passes = 0


def _described(causal_lm: nn.Module, name: str) -> BaseDescription:
    config = causal_lm.config.get_text_config(decoder=True)  # type: ignore[operator,union-attr]
    embedding = causal_lm.get_input_embeddings()  # type: ignore[operator]
    return BaseDescription(
        name=name,
        context_length=int(getattr(config, "max_position_embeddings", None) or _UNBOUNDED_CONTEXT),
        vocabulary_size=int(embedding.num_embeddings),
    )


def _check_logprobs(row: ClientRow, logprobs: Sequence[Tensor]) -> None:
    for placed in sorted(row.data, key=lambda each: each.number):
        part = logprobs[placed.segment][placed.start : placed.stop]
        if bool(part.isnan().any()):
            raise OperationError(
                f"datum {placed.number}: its logprobs are not numbers. The weights of the training model have grown "
                "too large: load an earlier checkpoint, and use a smaller learning_rate."
            )


def _or_zero(gradient: Tensor | None, leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf, requires_grad=False) if gradient is None else gradient


def _on_host(value: Tensor) -> Array:
    copied: Array = value.detach().cpu().numpy().copy()
    return copied
