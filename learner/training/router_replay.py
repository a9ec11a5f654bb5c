"""Router replay: the routers of a mixture of experts take the experts that the engine sent tokens to.

At equal weights a router's choice can turn on the last bit of a logit: the engine and the learner then send a token
through different experts, and its logprobs differ by far more than numerics explain. Where the engine's choice is known
it is taken in place of the learner's own; the weights of the experts are the learner's, made from its own logits as the
model makes them, and so is the gradient. After R3 ("Rollout Routing Replay", arXiv 2510.11370).

    microbatch's rows ─▶ decoder layer i ─▶ its block of experts: top-k of E scores ─▶ given experts, scores there
                          (an argument, so that a layer which is computed once more takes the same experts)

A router is not rewritten. While a block of experts runs, its one top-k of `k` among `E` scores is answered by the given
indices and the scores at them; whatever a model does behind it, softmax, normalisation, scaling, it does to these.
Whether that holds of a model is looked at when it is loaded (`fault`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_layers import GradientCheckpointingLayer

from learner.training.adapters import expert_parameters
from learner.training.batch import FlatBatch, SequenceRouting
from learner.training.shards import whole_shape
from services.model_folder import experts_of

ARGUMENT = "replayed_experts"
"""Name under which a decoder hands the given experts to its layers, which take it off."""
_TOP_K = (torch.topk, Tensor.topk)


@dataclass(frozen=True)
class GivenExperts:
    """Experts of a row's T tokens in a model's L layers: `experts` [T, L, k] of some integer type, and `known` bool
    [T], false where the routers choose themselves.
    """

    experts: Tensor
    known: Tensor

    @classmethod
    def of(cls, routing: SequenceRouting) -> GivenExperts:
        """The same on the CPU. Numbers of two bytes become int32, which torch can index by."""
        wide = routing.experts.dtype.itemsize > 1
        experts = torch.from_numpy(routing.experts.astype("int32") if wide else routing.experts)
        return cls(experts, torch.from_numpy(routing.known))

    def to(self, device: torch.device) -> GivenExperts:
        """The same on `device`."""
        return GivenExperts(self.experts.to(device), self.known.to(device))

    def at(self, places: Tensor) -> GivenExperts:
        """Of the tokens at some places of the row."""
        return GivenExperts(self.experts.index_select(0, places), self.known.index_select(0, places))


@dataclass(frozen=True)
class ReplayTally:
    """Of a pass, sums over tokens and layers: choices that were `given`, and those of them that were `changed`: the
    router's own k experts would have been others.
    """

    given: Tensor
    changed: Tensor


class RouterReplay:
    """Has the routers of a model of transformers take given experts; without them it computes as ever."""

    def __init__(self, model: nn.Module) -> None:
        """Puts hooks onto the model's layers, and a wrapper around each block of experts."""
        config: Any = getattr(model, "config", None)
        config = config.get_text_config(decoder=True) if config is not None else None
        _, self.chosen = experts_of(lambda key: getattr(config, key, None))
        """k, experts of a token; 0 if the config does not say it."""
        self.layers = int(getattr(config, "num_hidden_layers", 0) or 0)
        """L, all hidden layers."""
        self._blocks = [
            _Block(model.get_submodule(name), number=_number(name), experts=experts, chosen=self.chosen, path=path)
            for name, path, experts in _found_blocks(model)
        ]
        self.experts = max((block.experts for block in self._blocks), default=0)
        for _, layer in _layers(model) if self._blocks else ():
            of_layer = [block for block in self._blocks if block.layer is layer]
            layer.register_forward_pre_hook(_Delivery(of_layer), with_kwargs=True)

    def __bool__(self) -> bool:
        """True if the model has layers of experts."""
        return bool(self._blocks)

    def arguments(self, given: GivenExperts | None) -> Mapping[str, GivenExperts]:
        """To be given to the decoder by name."""
        return {} if given is None else {ARGUMENT: given}

    def check(self, batch: FlatBatch) -> None:
        """Raises ValueError for experts that this model does not have."""
        routing = batch.routing
        if routing is None:
            return
        _, layers, chosen = routing.experts.shape
        largest = int(routing.experts[routing.known].max(initial=0))
        if (layers, chosen) != (self.layers, self.chosen) or largest >= self.experts:
            raise ValueError(
                f"a batch has routed experts of {layers} layers, {chosen} in each, numbered up to {largest}; expected "
                f"{self.layers} layers, {self.chosen} in each, numbered below {self.experts}, as the learner's model "
                "has them: generators serve another model"
            )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it a forward pass is counted for `tally`; layers that are computed once more, behind it, are not."""
        for block in self._blocks:
            block.differs, block.watched = None, True
        try:
            yield
        finally:
            for block in self._blocks:
                block.watched = False

    def tally(self, counts: Tensor) -> ReplayTally:
        """Of the pass that was watched; `counts` [T]: in how many sequences a token is."""
        given = changed = counts.new_zeros((), dtype=torch.float32)
        for block in self._blocks:
            if block.differs is not None:
                known, differs = block.differs
                given = given + counts.float() @ known.float()
                changed = changed + counts.float() @ (known & differs).float()
        return ReplayTally(given, changed)

    @contextmanager
    def echoing(self) -> Iterator[None]:
        """Within it each router is given what it chooses itself, by rising number: nothing may change."""
        for block in self._blocks:
            block.echoes, block.answered, block.taken = True, 0, True
        try:
            yield
        finally:
            for block in self._blocks:
                block.echoes = False

    def fault(self) -> str | None:
        """After a single pass, or several, within `echoing`: why the routers of this model cannot be given experts."""
        if not self.chosen:
            return "its config does not say how many experts a token has"
        for block in self._blocks:
            if not block.answered:
                return f"the router of layer {block.number} chooses in a way that is not known"
            if not block.taken:
                return f"the experts of layer {block.number} do not take what its router chooses"
        return None


class _Block:
    """A layer's block of experts. `given` is what its router takes in the next forward pass."""

    def __init__(self, layer: nn.Module, *, number: int, experts: int, chosen: int, path: tuple[str, str]) -> None:
        block, inner = (layer.get_submodule(name) for name in path)
        self.layer, self.number, self.experts, self.chosen = layer, number, experts, chosen
        self.given: GivenExperts | None = None
        self.echoes = self.watched = False
        self.answered, self.taken = 0, True
        self.differs: tuple[Tensor, Tensor] | None = None
        self._answer: Tensor | None = None
        self._own: Callable[..., Any] = block.forward
        block.forward = self._forward
        inner.register_forward_pre_hook(self._look, with_kwargs=True)

    def _forward(self, *arguments: Any, **named: Any) -> Any:
        if self.given is None and not self.echoes:
            return self._own(*arguments, **named)
        with _TopK(self):
            return self._own(*arguments, **named)

    def answer(self, scores: Tensor, own: Tensor) -> Tensor:
        """Indices [..., k] in place of the router's own."""
        self.answered += 1
        if self.given is None:
            index = own.sort(-1).values
        else:
            if own.numel() != self.given.experts.shape[0] * self.chosen:
                raise ValueError(
                    f"layer {self.number} routes {own.numel() // self.chosen} tokens, and the experts of "
                    f"{self.given.experts.shape[0]} are given"
                )
            known = self.given.known
            given = self.given.experts[:, self.number].long()
            rows = own.reshape(-1, self.chosen)
            index = torch.where(known[:, None], given, rows).view(own.shape)
            if self.watched:
                self.differs = known, (rows.sort(-1).values != given.sort(-1).values).any(-1)
        self._answer = index
        return index

    def _look(self, _: nn.Module, arguments: tuple[object, ...], named: dict[str, object]) -> None:
        """In an echo, that the experts get the very indices that were answered."""
        if not self.echoes:
            return
        got = [
            each for each in (*arguments, *named.values()) if isinstance(each, Tensor) and not each.is_floating_point()
        ]
        answer = self._answer
        self.taken = (
            self.taken
            and answer is not None
            and any(
                each.numel() == answer.numel() and bool((each.reshape(-1) == answer.reshape(-1)).all()) for each in got
            )
        )


class _TopK(TorchFunctionMode):
    """Answers the top-k of a block's router."""

    def __init__(self, block: _Block) -> None:
        super().__init__()
        self._block = block

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        found = func(*args, **named)
        if func not in _TOP_K:
            return found
        scores = args[0] if args else named["input"]
        block = self._block
        if found.indices.shape[-1] != block.chosen or scores.shape[-1] != block.experts:
            return found  # of groups of experts, such as DeepSeek's
        index = block.answer(scores, found.indices)
        return torch.return_types.topk((scores.gather(-1, index), index))


class _Delivery:
    """A hook on a decoder layer, which takes the given experts off its arguments and hands them to its blocks."""

    def __init__(self, blocks: Sequence[_Block]) -> None:
        self._blocks = blocks

    def __call__(
        self, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = named.get(ARGUMENT)
        for block in self._blocks:
            block.given = given
        return arguments, {name: value for name, value in named.items() if name != ARGUMENT}


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer):
            yield name, module


def _found_blocks(model: nn.Module) -> list[tuple[str, tuple[str, str], int]]:
    """Of each decoder layer with experts its name, those of its block and of its experts' module within it, and their
    number. A block is what the layer calls, and holds the router too.
    """
    layers = [name for name, _ in _layers(model)]
    found: dict[str, tuple[str, tuple[str, str], int]] = {}
    for name, weight in expert_parameters(model):
        owner = name.rpartition(".")[0]
        layer = max((each for each in layers if owner.startswith(f"{each}.")), key=len, default=None)
        if layer is not None and layer not in found:
            inner = owner.removeprefix(f"{layer}.")
            found[layer] = (layer, (inner.partition(".")[0], inner), whole_shape(weight)[0])
    return list(found.values())


def _number(layer: str) -> int:
    """The number of a decoder layer, by its name."""
    return int(next(part for part in reversed(layer.split(".")) if part.isdecimal()))
