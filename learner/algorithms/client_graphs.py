"""Losses that a client wrote: graphs of torch.fx, sent as data, and run node by node by an interpreter of our own.

A client is not trusted. Nothing that it sends is evaluated or imported: a node names a function, a method or an
attribute, and that is looked up in a table of what is known to be harmless. Before a node is run, its result's size is
found out on tensors without memory (torch's meta device), and it is refused if it is too large. Work is counted in
elements, not in seconds, so that a replay of the same operations ends the same way.

    {"op": "call_function", "name": "mul", "target": "operator.mul", "args": [{"ref": "logprobs"}, 2.0], "kwargs": {}}
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NoReturn

import torch
from torch import Tensor

from learner.algorithms import client_graph_calls
from learner.algorithms.client_graph_calls import ATTRIBUTES, FACTORIES, FIELDS, PRODUCTS, SORTS, Value, described

MAX_NODES = 2000
MAX_INPUTS = 16
MAX_METRICS = 64
MAX_ELEMENTS = 1 << 24
"""The most elements of one tensor."""
MAX_WORK = 1 << 28
"""The most elements that the nodes of one operation read and write, over all of its datums: a few seconds."""
MAX_DATUM_WORK = 1 << 27
"""The same of one datum: what is kept for its gradient is freed after it."""
_MAX_ARGUMENTS = 20_000
_MAX_DEPTH = 8
_MAX_TEXT = 256
_MAX_NUMBER = 2**63
# Multiplications of a matrix product that take about as long as reading an element.
_PRODUCTS_AN_ELEMENT = 16
_SORTING = 8
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
_FLOATS = ("float64", "double", "float32", "float", "float16", "half", "bfloat16")
_DTYPES = frozenset((*_FLOATS, "int64", "long", "int32", "int", "int16", "int8", "uint8", "bool"))
_LAYOUTS = frozenset({"strided"})
_MEMORY_FORMATS = frozenset({"contiguous_format", "preserve_format"})
_TEXTS = frozenset({"none", "mean", "sum", "batchmean", "floor", "trunc", "tanh"})
_WITH_OTHER_TEXTS = frozenset({"getattr", "builtins.getattr", "to"})
_CODED = frozenset({"ref", "float", "dtype", "device", "layout", "memory_format", "ellipsis"})
_REFUSED_KEYWORDS = frozenset({"out", "inplace", "generator", "pin_memory", "requires_grad", "names"})


class GraphError(ValueError):
    """A graph that is refused, or that cannot be computed; says which node."""


@dataclass(frozen=True)
class GraphInput:
    """A parameter of a loss: `logprobs`, or an input of the datum. `rank`: how many dimensions it has, 0 to 2."""

    name: str
    rank: int


@dataclass(frozen=True)
class GraphLoss:
    """The loss of a datum, a scalar, and its metrics by name, which have no gradient."""

    loss: Tensor
    metrics: Mapping[str, float]


@dataclass
class WorkBudget:
    """Elements that an operation may still read and write, and those that the datum at hand may."""

    operation: int = MAX_WORK
    datum: int = MAX_DATUM_WORK

    def next_datum(self) -> None:
        """Begins with another datum."""
        self.datum = MAX_DATUM_WORK

    def spend(self, elements: int) -> bool:
        """Counts the work; False if there is not that much left."""
        self.operation -= elements
        self.datum -= elements
        return min(self.operation, self.datum) >= 0


@dataclass(frozen=True)
class _Node:
    name: str
    call: Callable[..., Value]
    target: str
    args: Sequence[object]
    kwargs: Mapping[str, object]

    def refuse(self, why: str) -> NoReturn:
        raise GraphError(f"node {self.name!r} ({self.target}): {why}")

    def check_size(self, elements: int) -> None:
        if elements > MAX_ELEMENTS:
            self.refuse(f"it would make a tensor of {elements} elements: expected at most {MAX_ELEMENTS}")


@dataclass(frozen=True)
class LossGraph:
    """A checked graph: what it calls is allowed, and each node refers to earlier ones. `source` is what `parse` made it
    of, without the inputs: they are its own.
    """

    name: str
    inputs: tuple[GraphInput, ...]
    nodes: tuple[_Node, ...]
    loss: str
    metrics: Mapping[str, str]
    source: Mapping[str, object]

    @classmethod
    def parse(cls, *, name: str, inputs: Sequence[object], graph: Mapping[str, object]) -> LossGraph:
        """The graph of a request's three fields of these names. Raises GraphError for what is not allowed."""
        return _Parser(name, inputs, graph).parsed()

    def run(self, logprobs: Tensor, inputs: Mapping[str, Tensor], *, budget: WorkBudget) -> GraphLoss:
        """The loss of a datum. `inputs` has those that the graph takes beside `logprobs`. Raises GraphError."""
        budget.next_datum()
        values: dict[str, Value] = {
            each.name: logprobs if number == 0 else inputs[each.name] for number, each in enumerate(self.inputs)
        }
        for node in self.nodes:
            values[node.name] = _run(node, values, device=logprobs.device, budget=budget)
        loss = values[self.loss]
        if not (isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point()):
            raise GraphError(f"the loss, node {self.loss!r}, is {described(loss)}: expected a scalar tensor of floats")
        return GraphLoss(loss, {name: self._number(name, values[ref]) for name, ref in self.metrics.items()})

    def _number(self, name: str, value: Value) -> float:
        if isinstance(value, Tensor) and value.numel() == 1:
            return float(value.detach())
        if isinstance(value, int | float):
            return float(value)
        raise GraphError(f"the metric {name!r} is {described(value)}: expected a scalar")


class _Parser:
    """Reads a graph; `_known` are the names of nodes so far."""

    def __init__(self, name: str, inputs: Sequence[object], graph: Mapping[str, object]) -> None:
        self._name = name
        self._inputs = tuple(self._input(each) for each in inputs)
        self._graph = graph
        self._known: set[str] = set()
        self._arguments = 0

    def parsed(self) -> LossGraph:
        raw = self._graph.get("nodes")
        if self._graph.get("format", 1) != 1 or not isinstance(raw, list):
            raise GraphError("a graph of a format that is not known: expected format 1, with nodes. Use tinker 0.38")
        if not 1 <= len(self._inputs) <= MAX_INPUTS or self._inputs[0].name != "logprobs" or not self._inputs[0].rank:
            raise GraphError(f"expected 1 to {MAX_INPUTS} inputs, logprobs of rank 1 or 2 first")
        if len({each.name for each in self._inputs}) < len(self._inputs):
            raise GraphError("two inputs have the same name: expected each once")
        if len(raw) > MAX_NODES:
            raise GraphError(f"the loss has {len(raw)} nodes: expected at most {MAX_NODES}. Make it smaller.")
        placeholders = [node for node in raw if isinstance(node, dict) and node.get("op") == "placeholder"]
        self._check_placeholders(placeholders)
        nodes = [node for node in raw if not any(node is each for each in placeholders)]
        if not nodes or not isinstance(nodes[-1], dict) or nodes[-1].get("op") != "output":
            raise GraphError("the last node is no output: expected the loss and its metrics")
        parsed = tuple(self._node(node) for node in nodes[:-1])
        loss, metrics = self._output(nodes[-1])
        return LossGraph(
            name=self._name, inputs=self._inputs, nodes=parsed, loss=loss, metrics=metrics, source=self._graph
        )

    @staticmethod
    def _input(given: object) -> GraphInput:
        name, rank = (given.get("name"), given.get("rank")) if isinstance(given, Mapping) else (None, None)
        if not isinstance(name, str) or not _NAME.fullmatch(name) or rank not in (0, 1, 2):
            raise GraphError(f"an input is {str(given)[:80]}: expected a name and a rank of 0, 1 or 2")
        return GraphInput(name=name, rank=int(rank))

    def _check_placeholders(self, placeholders: Sequence[Mapping[str, object]]) -> None:
        names = [node.get("name") for node in placeholders]
        if names != [each.name for each in self._inputs]:
            expected = ", ".join(each.name for each in self._inputs)
            raise GraphError(f"the graph takes {str(names)[:200]}: expected the inputs {expected}")
        self._known.update(each.name for each in self._inputs)

    def _node(self, raw: object) -> _Node:
        op, name, target, args, kwargs = self._fields(raw)
        call = _called(op, name, target, args)
        for argument in (args, kwargs):
            self._check(argument, name, depth=0, inner=True)
        refused = sorted(_REFUSED_KEYWORDS & set(kwargs))
        if refused:
            raise GraphError(f"node {name!r} ({target}): the argument {refused[0]} is not allowed. Leave it out.")
        if target not in _WITH_OTHER_TEXTS:
            self._check_texts(name, [args, list(kwargs.values())])  # keywords may have the names of coded values
        self._known.add(name)
        return _Node(name=name, call=call, target=target, args=args, kwargs=kwargs)

    def _fields(self, raw: object) -> tuple[str, str, str, list[object], dict[str, object]]:
        if not isinstance(raw, dict):
            raise GraphError(f"a node is {str(raw)[:80]}: expected an object")
        op, name, target = raw.get("op"), raw.get("name"), raw.get("target")
        args, kwargs = raw.get("args", []), raw.get("kwargs", {})
        if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(op, str):
            raise GraphError(f"a node is named {str(name)[:80]!r}: expected letters, digits and underscores")
        if not isinstance(target, str) or len(target) > _MAX_TEXT or not isinstance(args, list):
            raise GraphError(f"node {name!r}: expected a target of at most {_MAX_TEXT} letters and a list of args")
        if not isinstance(kwargs, dict) or not all(isinstance(key, str) for key in kwargs):
            raise GraphError(f"node {name!r}: expected kwargs with names")
        if name in self._known:
            raise GraphError(f"node {name!r} comes twice: expected each name once")
        return op, name, target, args, kwargs

    def _check(self, value: object, node: str, *, depth: int, inner: bool = False) -> None:
        """An encoded argument; `inner`: a list or dict whose members are arguments."""
        self._arguments += 1
        if depth > _MAX_DEPTH or self._arguments > _MAX_ARGUMENTS:
            raise GraphError(f"node {node!r}: arguments are too many, or too deep in one another. Make it smaller.")
        if isinstance(value, list) or (inner and isinstance(value, dict)):
            for each in value.values() if isinstance(value, dict) else value:
                self._check(each, node, depth=depth + 1)
        elif isinstance(value, dict):
            self._check_kind(value, node, depth=depth)
        elif isinstance(value, str):
            if len(value) > _MAX_TEXT:
                raise GraphError(f"node {node!r}: a text of {len(value)} letters: expected at most {_MAX_TEXT}")
        elif isinstance(value, int) and not -_MAX_NUMBER <= value < _MAX_NUMBER:
            raise GraphError(f"node {node!r}: a number is beyond 64 bits")
        elif not (value is None or isinstance(value, int | float)):
            raise GraphError(f"node {node!r}: {str(value)[:80]} is no argument")

    @staticmethod
    def _check_texts(node: str, value: object) -> None:
        """Texts choose among ways to compute, of which some take very long."""
        if isinstance(value, str) and value not in _TEXTS:
            raise GraphError(f"node {node!r}: the text {value[:80]!r}: expected one of {', '.join(sorted(_TEXTS))}")
        if isinstance(value, list):
            for each in value:
                _Parser._check_texts(node, each)
        elif isinstance(value, dict):
            ((kind, inner),) = value.items()
            if kind == "dict":
                inner = list(inner.values())
            # Of a value such as {"ref": "name"} the text is not the call's.
            _Parser._check_texts(node, [] if kind in _CODED else inner)

    def _check_kind(self, value: Mapping[str, object], node: str, *, depth: int) -> None:
        kind, inner = next(iter(value.items()), (None, None))
        text = inner if isinstance(inner, str) else ""
        known = {
            "ref": text in self._known,
            "tuple": isinstance(inner, list),
            "dict": isinstance(inner, dict),
            "slice": isinstance(inner, list) and len(inner) == 3,
            "ellipsis": True,
            "float": text in ("inf", "-inf", "nan"),
            "dtype": text in _DTYPES,
            "device": True,
            "layout": text in _LAYOUTS,
            "memory_format": text in _MEMORY_FORMATS,
        }
        if len(value) != 1 or not known.get(str(kind)):
            hint = ": a node refers to nodes before it" if kind == "ref" else ""
            raise GraphError(f"node {node!r}: {str(dict(value))[:80]} is no argument that is known{hint}")
        if kind in ("tuple", "dict", "slice"):
            self._check(inner, node, depth=depth + 1, inner=True)

    def _output(self, raw: Mapping[str, object]) -> tuple[str, Mapping[str, str]]:
        args = raw.get("args")
        returned = args[0] if isinstance(args, list) and len(args) == 1 else None
        pair = returned.get("tuple") if isinstance(returned, dict) else returned
        loss, given = pair if isinstance(pair, list) and len(pair) == 2 else (None, None)
        metrics = given.get("dict") if isinstance(given, dict) else None
        if not isinstance(metrics, dict) or len(metrics) > MAX_METRICS:
            raise GraphError(f"the output is not (loss, metrics): expected a tensor and at most {MAX_METRICS} metrics")
        for key in metrics:
            if not isinstance(key, str) or not _METRIC.fullmatch(key):
                raise GraphError(f"a metric is named {str(key)[:80]!r}: expected custom/NAME:sum or custom/NAME:mean")
        return self._ref(loss, "the loss"), {key: self._ref(value, key) for key, value in metrics.items()}

    def _ref(self, value: object, of: str) -> str:
        name = value.get("ref") if isinstance(value, dict) and len(value) == 1 else None
        if not isinstance(name, str) or name not in self._known:
            raise GraphError(f"{of} is {str(value)[:80]}: expected a node of the graph")
        return name


def _called(op: str, name: str, target: str, args: Sequence[object]) -> Callable[..., Value]:
    """The function that a node calls."""
    if op == "call_method":
        found = client_graph_calls.method(target)
    elif op != "call_function":
        raise GraphError(f"node {name!r}: {op[:80]!r} is not allowed: expected call_function or call_method")
    elif target in ("getattr", "builtins.getattr"):
        attribute = args[1] if len(args) == 2 else None
        if not isinstance(attribute, str) or attribute not in ATTRIBUTES | FIELDS:
            known = ", ".join(sorted(ATTRIBUTES | FIELDS))
            raise GraphError(f"node {name!r}: the attribute {str(attribute)[:80]!r}: expected one of {known}")
        found = client_graph_calls.attribute
    else:
        found = client_graph_calls.function(target)
    if found is None:
        kind = "method" if op == "call_method" else "function"
        raise GraphError(
            f"node {name!r}: {target!r} is no {kind} that a custom loss may call here: expected one that computes "
            "with tensors and numbers, without chance. Compute the loss in your own process instead."
        )
    return found


def _run(node: _Node, values: Mapping[str, Value], *, device: torch.device, budget: WorkBudget) -> Value:
    args = [_decoded(each, values, device) for each in node.args]
    kwargs = {key: _decoded(each, values, device) for key, each in node.kwargs.items()}
    if node.target.removeprefix("torch.") in FACTORIES:
        kwargs["device"] = device
    try:
        elements = _elements(node, args, kwargs)
        if not budget.spend(elements):
            raise GraphError(
                f"node {node.name!r} ({node.target}): the loss has read and written more than {MAX_DATUM_WORK} "
                f"elements for a datum, or {MAX_WORK} for the call. Send fewer tokens, or make it simpler."
            )
        return node.call(*args, **kwargs)
    except GraphError:
        raise
    # The client's graph may be wrong in any way that torch knows.
    except Exception as error:
        text = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise GraphError(f"node {node.name!r} ({node.target}) cannot be computed: {text}") from error


def _elements(node: _Node, args: list[Value], kwargs: dict[str, Value]) -> int:
    """Number of elements that the node reads and writes, found out without computing it. Raises GraphError for a tensor
    is too large.
    """
    tensors = list(_tensors([args, kwargs]))
    read, within = sum(each.numel() for each in tensors), _broadcast(tensors)
    node.check_size(within)
    written = _largest_item(node, args) if _depends_on_data(node, args) else _sizes(node, args, kwargs)
    node.check_size(max(written, default=0))
    called = node.target.rpartition(".")[2]
    if called in PRODUCTS and args and isinstance(args[0], Tensor) and args[0].dim():
        read += max(sum(written), 1) * args[0].shape[-1] // _PRODUCTS_AN_ELEMENT
    return (read + within + sum(written)) * (_SORTING if called in SORTS else 1)


def _sizes(node: _Node, args: list[Value], kwargs: dict[str, Value]) -> list[int]:
    picks = node.target == "operator.getitem"
    if node.call is client_graph_calls.attribute or (picks and args and isinstance(args[0], tuple | list)):
        return []  # nothing is made
    # A tensor of one number as an index is read as a number.
    counted = [*_without_memory(args[:1]), *args[1:]] if picks else _without_memory(args)
    with torch.no_grad():
        made = node.call(*counted, **_without_memory(kwargs))
    return [each.numel() for each in _tensors(made)]


def _depends_on_data(node: _Node, args: Sequence[Value]) -> bool:
    """The size of the result is not known before it is computed, but for a bound."""
    if node.target in ("masked_select", "torch.masked_select"):
        return True
    return node.target == "operator.getitem" and any(each.dtype == torch.bool for each in _tensors(args[1:]))


def _largest_item(node: _Node, args: Sequence[Value]) -> list[int]:
    """The most elements that a mask can leave."""
    tensors = list(_tensors(args))
    if node.target == "operator.getitem":
        if len(tensors) != 2:
            node.refuse("a mask beside other tensors as index: expected the mask alone")
        return [tensors[0].numel()]
    return [_broadcast(tensors)]


def _broadcast(tensors: Sequence[Tensor]) -> int:
    """The elements of the tensors spread over each other, which a loss may hold before it adds them up; 0 for tensors
    that cannot be spread.
    """
    sizes = [set(each) - {1} for each in zip_longest(*(reversed(each.shape) for each in tensors), fillvalue=1)]
    return 0 if any(len(each) > 1 for each in sizes) else math.prod(next(iter(each), 1) for each in sizes)


def _tensors(value: Value) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, slice):
        yield from _tensors([value.start, value.stop, value.step])
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)


def _without_memory(value: Value) -> Any:
    """The same with tensors on torch's meta device, which have a size and nothing else."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, dict):
        return {key: _without_memory(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        parts = [_without_memory(each) for each in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def _decoded(value: object, values: Mapping[str, Value], device: torch.device) -> Value:
    """An encoded argument, which the parser has checked."""
    if isinstance(value, list):
        return [_decoded(each, values, device) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "ref":
        return values[inner]
    if kind == "dict":
        return {key: _decoded(each, values, device) for key, each in inner.items()}
    if kind in ("tuple", "slice"):
        parts = [_decoded(each, values, device) for each in inner]
        return tuple(parts) if kind == "tuple" else slice(*parts)
    if kind in ("float", "ellipsis"):
        return float(inner) if kind == "float" else ...
    constant: Value = device if kind == "device" else getattr(torch, inner)
    return constant
