"""Many low-rank adapters beside each other on one frozen model, each of its own rank, scale and choice of layers.

Sequences of several adapters lie in one packed row, those of an adapter next to each other: its segment. The model's
layers compute the row as they are, and a hook on each adds to a segment's tokens the low-rank term of its adapter
alone. Attention keeps sequences apart, so nothing passes from one segment to another, forward or backward, as long as
all numbers are finite.

    [T, in] ─▶ base layer ─▶ [T, out] + scale * (segment [t, in] @ down^T) @ up^T, segment by segment

The output projection is no part of the decoder, and is often the embedding too: its term is added to the logits, in
`logprobs`, and the embedding stays as it is.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from learner.training.adapters import Adapter, adaptable, is_router
from learner.training.client_operations import AdapterShape, OperationError
from learner.training.layouts import last_states
from learner.training.logits import logit_rules
from learner.training.logprobs import Chunking, LowRankLogits, span_logits, token_logprobs
from learner.training.low_rank import AdaptedRows, RowMasks, at_once, features_at_once, with_terms
from learner.training.packing import PackedRow

MAX_RANK = 1024
_HEAD_PRODUCTS = 1 << 24
"""Up to so many products with adapters of the output projection one call for all segments takes less time than several.
"""
_COPIES = 3
"""Of the logits, beside each other, where tokens are drawn from them."""
# Below it vLLM takes the most probable token, too; logits that are divided by less are not finite.
_COLDEST = 1e-5
_OF_ATTENTION = ("attn", "attention")
_OF_MLP = ("mlp", "feed_forward", "ffn", "expert")
# Distinguishes draws without a seed; torch's generators take 64 bits.
_SEED_BITS = 63


@dataclass(frozen=True)
class AdaptableLayer:
    """A linear layer by the part of the model that it is in: `attention`, `mlp` or `unembed`."""

    part: str
    inputs: int
    outputs: int


@dataclass(frozen=True, eq=False)
class ClientAdapter:
    """The adapter of a training model. `flat` holds the numbers of all of its factors, float32, so that an optimizer
    has one tensor to go through; the factors, by the name of their layer, are leaves in the memory of `flat`.
    """

    shape: AdapterShape
    flat: Tensor
    factors: Mapping[str, Adapter]

    @property
    def leaves(self) -> list[Tensor]:
        """The factors in the order in which they lie in `flat`: of each layer `down`, then `up`."""
        return [factor for pair in self.factors.values() for factor in (pair.down, pair.up)]

    def settle(self) -> None:
        """Has the model compute with the numbers in `flat` after a change of these; leaves in its memory do already."""

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Parts of a tensor that is as long as `flat`, shaped as the factors, by name: `LAYER.down` and `LAYER.up`."""
        names = [f"{layer}.{side}" for layer in self.factors for side in ("down", "up")]
        parts = torch.split(flat, [leaf.numel() for leaf in self.leaves])
        return {name: part.view_as(leaf) for name, part, leaf in zip(names, parts, self.leaves, strict=True)}


@dataclass(frozen=True)
class AdapterSegment:
    """Tokens `start` to `stop` of a row, which are of the sequences of an adapter. `targets` int64 [t, K]: the tokens
    at each place whose logprobs are wanted.
    """

    adapter: ClientAdapter
    start: int
    stop: int
    targets: Tensor


class AdaptedModel:
    """A frozen causal language model of transformers whose packed rows may be of several adapters."""

    def __init__(self, causal_lm: nn.Module, *, chunking: Chunking) -> None:
        self._causal_lm, self._chunking = causal_lm, chunking
        self._segments: Sequence[AdapterSegment] = ()
        self._masks = RowMasks()
        head = causal_lm.get_output_embeddings()  # type: ignore[operator]
        assert isinstance(head, nn.Linear), "an output projection"
        self._head, self._rules = head, logit_rules(causal_lm.config)
        linear, experts = adaptable(causal_lm)
        self.has_experts = bool(experts)
        self.linear_names = frozenset(linear)
        self.layers: dict[str, AdaptableLayer] = {}
        for name, layer in linear.items():
            part = _part_of(name)
            if part is not None:
                self.layers[name] = AdaptableLayer(part, layer.in_features, layer.out_features)
                layer.register_forward_hook(partial(self._added, name))
        self._unembed = next(name for name, module in causal_lm.named_modules() if module is head)
        self.layers[self._unembed] = AdaptableLayer("unembed", head.in_features, head.out_features)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """All weights by name; those that are tied are there once."""
        return dict(self._causal_lm.named_parameters())

    @property
    def weight_sizes(self) -> dict[str, tuple[int, ...]]:
        """The sizes of all weights by name."""
        return {name: tuple(each.shape) for name, each in self.parameters.items()}

    @property
    def config(self) -> dict[str, object]:
        """The content of the model's config.json."""
        told: dict[str, object] = self._causal_lm.config.to_dict()  # type: ignore[operator,union-attr]
        return told

    @property
    def device(self) -> torch.device:
        """The device of the model and of its adapters."""
        return self._head.weight.device

    def layers_of(self, shape: AdapterShape) -> dict[str, AdaptableLayer]:
        """The layers that an adapter of this shape has factors for."""
        wanted = {"attention": shape.attention, "mlp": shape.mlp, "unembed": shape.unembed}
        return {name: layer for name, layer in self.layers.items() if wanted[layer.part]}

    def new_adapter(self, shape: AdapterShape) -> ClientAdapter:
        """An adapter that changes nothing yet: `up` is 0, `down` uniform within 1/sqrt(inputs), drawn by the seed
        in the order of layers, the same on every device.
        """
        seed = secrets.randbits(_SEED_BITS) if shape.seed is None else shape.seed
        generator = torch.Generator().manual_seed(seed)
        values: dict[str, Tensor] = {}
        for name, layer in self.layers_of(shape).items():
            bound = 1 / math.sqrt(layer.inputs)
            values[f"{name}.down"] = torch.empty(shape.rank, layer.inputs).uniform_(-bound, bound, generator=generator)
            values[f"{name}.up"] = torch.zeros(layer.outputs, shape.rank)
        return self.adapter_with(shape, values)

    def factor_sizes(self, shape: AdapterShape) -> dict[str, tuple[int, int]]:
        """The sizes of an adapter's factors by name, in their order."""
        return {
            f"{name}.{side}": size
            for name, layer in self.layers_of(shape).items()
            for side, size in (("down", (shape.rank, layer.inputs)), ("up", (layer.outputs, shape.rank)))
        }

    def adapter_with(self, shape: AdapterShape, values: Mapping[str, Tensor]) -> ClientAdapter:
        """An adapter with copies of `values`, which have the names of `factor_sizes`."""
        sizes = self.factor_sizes(shape)
        flat = torch.cat([values[name].detach().flatten() for name in sizes]).to(self.device, torch.float32)
        parts = torch.split(flat, [rows * columns for rows, columns in sizes.values()])
        leaves = {
            name: part.view(size).detach().requires_grad_()
            for (name, size), part in zip(sizes.items(), parts, strict=True)
        }
        scale = shape.alpha / shape.rank
        pairs = {
            name: Adapter(down=leaves[f"{name}.down"], up=leaves[f"{name}.up"], scale=scale)
            for name in self.layers_of(shape)
        }
        return ClientAdapter(shape, flat, pairs)

    @contextmanager
    def of_segments(self, segments: Sequence[AdapterSegment]) -> Iterator[None]:
        """Within it the row of each forward pass, and of its backward pass, consists of these segments."""
        self._segments, self._masks = segments, RowMasks()
        try:
            yield
        finally:
            self._segments, self._masks = (), RowMasks()

    def logprobs(self, row: PackedRow) -> list[Tensor]:
        """Logprobs of each segment's targets, [t, K], float32 at least. Call it within `of_segments`."""
        hidden, _ = last_states(self._causal_lm, row)
        states = hidden.to(self._head.weight.dtype)
        lengths = [segment.stop - segment.start for segment in self._segments]
        if self._shares_head(len(states)):
            targets = torch.cat([segment.targets for segment in self._segments])
            return [*torch.split(self._logprobs_of(targets, states, self._low_rank_of_all(states)), lengths)]
        return [
            self._logprobs_of(segment.targets, part, self._low_rank(segment, part))
            for segment, part in zip(self._segments, torch.split(states, lengths), strict=True)
        ]

    def _shares_head(self, tokens: int) -> bool:
        """True if one call is to compute the logprobs of all segments: they have one target each, and few tokens."""
        narrow = len(self._segments) > 1 and all(segment.targets.shape[1] == 1 for segment in self._segments)
        places = self._head_places()
        width = sum(self._head.weight.shape)
        return narrow and (not places or at_once(places, tokens, width, most=_HEAD_PRODUCTS))

    def _head_places(self) -> list[AdaptedRows]:
        return [
            AdaptedRows(slice(segment.start, segment.stop), segment.adapter.factors[self._unembed])
            for segment in self._segments
            if self._unembed in segment.adapter.factors
        ]

    def _low_rank_of_all(self, states: Tensor) -> LowRankLogits | None:
        places = self._head_places()
        return LowRankLogits(*features_at_once(states, places, self._masks)) if places else None

    def drawn(
        self, row: PackedRow, *, count: int, temperature: float, random: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """At each place of a row of one segment `count` tokens, drawn with replacement at the temperature, and their
        logprobs at temperature 1: [t, count]. Call it within `of_segments`. Raises OperationError for logits that are
        not finite, from which nothing can be drawn.
        """
        (segment,) = self._segments
        hidden, _ = last_states(self._causal_lm, row)
        states = hidden[segment.start : segment.stop].to(self._head.weight.dtype)
        low_rank = self._low_rank(segment, states)
        vocabulary = len(self._head.weight)
        at_once = max(1, self._chunking.tokens * self._chunking.vocabulary // (vocabulary * _COPIES))
        ids, logprobs = [], []
        for start in range(0, len(states), at_once):
            rows = slice(start, start + at_once)
            logits = span_logits(
                states[rows], self._head.weight, self._head.bias, slice(0, vocabulary),
                temperature=1.0, rules=self._rules, low_rank=None if low_rank is None else low_rank.of(rows),
            )  # fmt: skip
            ids.append(_drawn(logits, count=count, temperature=temperature, random=random))
            logprobs.append(logits.log_softmax(-1).gather(1, ids[-1]))
        return torch.cat(ids), torch.cat(logprobs)

    def _low_rank(self, segment: AdapterSegment, states: Tensor) -> LowRankLogits | None:
        pair = segment.adapter.factors.get(self._unembed)
        return None if pair is None else LowRankLogits(_features(states, pair), pair.up.to(states.dtype))

    def _logprobs_of(self, targets: Tensor, states: Tensor, low_rank: LowRankLogits | None) -> Tensor:
        target, others = targets[:, 0], targets[:, 1:]
        made = token_logprobs(
            hidden=states,
            weight=self._head.weight,
            bias=self._head.bias,
            target=target,
            candidates=others if others.shape[1] else None,
            temperature=1.0,
            chunking=self._chunking,
            with_entropy=False,
            rules=self._rules,
            low_rank=low_rank,
        )
        first = made.logprobs[:, None]
        return first if made.candidates is None else torch.cat([first, made.candidates], dim=1)

    def _added(self, name: str, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        """A layer's output with the terms of the segments' adapters; None leaves it as it is."""
        if not any(name in segment.adapter.factors for segment in self._segments):
            return None
        inputs = args[0].flatten(0, -2)
        if len(inputs) != self._segments[-1].stop:
            raise ValueError(
                f"the layer {name} computes {len(inputs)} of a row's {self._segments[-1].stop} tokens: expected all. "
                "Adapters on it are not supported: name another model."
            )
        places = [
            AdaptedRows(slice(segment.start, segment.stop), segment.adapter.factors[name])
            for segment in self._segments
            if name in segment.adapter.factors
        ]
        return with_terms(output.flatten(0, -2), inputs, places, self._masks).view_as(output)


def _drawn(logits: Tensor, *, count: int, temperature: float, random: torch.Generator) -> Tensor:
    greedy = temperature < _COLDEST
    scaled = logits if greedy else logits / temperature
    if not bool(scaled.amax(-1).isfinite().all()):
        raise OperationError(
            "the logits to draw from are not finite: expected finite numbers. The weights of the training model have "
            "grown too large: load an earlier checkpoint, and use a smaller learning_rate."
        )
    if greedy:
        return logits.argmax(-1, keepdim=True).expand(-1, count)
    return torch.multinomial(scaled.softmax(-1), count, replacement=True, generator=random)


def _features(values: Tensor, pair: Adapter) -> Tensor:
    """[t, in] to [t, rank], scaled."""
    return nn.functional.linear(values, pair.down.to(values.dtype)) * pair.scale


def _part_of(name: str) -> str | None:
    """The part of the model that a layer of the decoder is in; None for one that is never adapted."""
    path = name.lower().split(".")[:-1]
    if is_router(name):
        return None
    if any(word in place for place in path for word in _OF_ATTENTION):
        return "attention"
    return "mlp" if any(word in place for place in path for word in _OF_MLP) else None
