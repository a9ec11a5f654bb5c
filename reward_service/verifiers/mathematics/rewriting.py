"""Answers rewritten before they are compared: signs of choice written out, and names that are free to choose."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from reward_service.verifiers.mathematics.answers import (
    MAX_SIGNS,
    Answer,
    Call,
    Combination,
    Grid,
    Listing,
    Node,
    Ordered,
    OverLimits,
    Ratio,
    Relation,
    Scalar,
    Side,
    Symbol,
)
from reward_service.verifiers.mathematics.quantities import calls, symbols

_PLUS_MINUS = (r"\pm", r"\mp")
_CONSTANTS = frozenset(("C", "c", "K"))
_FUNCTION = re.compile(r"([A-Za-z])\(([a-z])\)")


def expanded(answer: Answer) -> Answer:
    r"""With each `\pm` written out as two answers, and without what only says from where a parameter is taken."""
    if isinstance(answer, Listing):
        rest = [item for item in answer.items if not _is_declaration(item)] or list(answer.items)
        flat = [part for item in rest for part in _signed(item)]
        return flat[0] if len(flat) == 1 and answer.joined != "set" else Listing(tuple(flat), answer.joined)
    parts = _signed(answer)
    return parts[0] if len(parts) == 1 else Listing(parts)


def _is_declaration(item: Answer) -> bool:
    if not isinstance(item, Relation) or item.operators != (r"\in",):
        return False
    right = item.sides[1].answer
    return isinstance(right, Scalar) and any(name.startswith(r"\numbers") for name in symbols(right.node))


def _signed(answer: Answer) -> tuple[Answer, ...]:
    nodes = list(nodes_of(answer))
    if not any(calls(node, *_PLUS_MINUS) for node in nodes):
        return (answer,)
    if isinstance(answer, Listing | Grid | Combination | Ratio):
        return (answer,)
    if len(nodes) > MAX_SIGNS:
        raise OverLimits("a sign of choice in many parts")
    return (_with_sign(answer, 1), _with_sign(answer, -1))


def _with_sign(answer: Answer, sign: int) -> Answer:
    return _mapped(answer, lambda node: _resolved(node, sign))


def _resolved(node: Node, sign: int) -> Node:
    if not isinstance(node, Call):
        return node
    name = node.name
    if name in _PLUS_MINUS:
        name = "+" if (name == r"\pm") == (sign > 0) else "-"
    return Call(name, tuple(_resolved(argument, sign) for argument in node.arguments))


def with_names_of(gold: Answer, given: Answer) -> Answer:
    """The given answer with the right one's names, where a name is free to choose.

    An integer parameter that both declare, the constant that is added to an integral, and the variable of a function
    that is asked for: `f(n) = n^2` and `f(x) = x^2`.
    """
    ours, theirs = _free_names(gold), _free_names(given)
    for kind, name in ours.items():
        other = theirs.get(kind)
        if other is not None and other != name and name not in _all_symbols(given):
            given = _renamed(given, other, name)
    return given


def _free_names(answer: Answer) -> dict[str, str]:
    """By what they name."""
    found: dict[str, str] = {}
    declared = [item.sides[0].name for item in members(answer) if isinstance(item, Relation) and _is_declaration(item)]
    if len(declared) == 1 and declared[0] is not None:
        found["parameter"] = declared[0]
    value = answer.sides[-1].answer if isinstance(answer, Relation) else answer
    constants = _CONSTANTS.intersection(_summands(value.node)) if isinstance(value, Scalar) else frozenset()
    if len(constants) == 1:
        found["constant"] = next(iter(constants))
    if isinstance(answer, Relation) and (function := _FUNCTION.fullmatch(answer.sides[0].name or "")):
        found[function[1]] = function[2]
    return found


def _summands(node: Node) -> Sequence[str]:
    """The names that are added to something else."""
    if not isinstance(node, Call) or node.name not in ("+", "-"):
        return ()
    added = node.arguments if node.name == "+" else node.arguments[:1]
    names = [one.name for one in added if isinstance(one, Symbol)]
    return [*names, *(name for one in added for name in _summands(one))]


def _all_symbols(answer: Answer) -> frozenset[str]:
    return frozenset(name for node in nodes_of(answer) for name in symbols(node))


def _renamed(answer: Answer, old: str, new: str) -> Answer:
    def change(node: Node) -> Node:
        if isinstance(node, Symbol):
            return Symbol(new) if node.name == old else node
        return Call(node.name, tuple(map(change, node.arguments))) if isinstance(node, Call) else node

    return _mapped(answer, change)


def _mapped(answer: Answer, change: Callable[[Node], Node]) -> Answer:
    """The answer with all its expressions changed."""
    if isinstance(answer, Scalar):
        return replace(answer, node=change(answer.node))
    if isinstance(answer, Listing | Ordered | Combination):
        return replace(answer, items=tuple(_mapped(item, change) for item in answer.items))
    if isinstance(answer, Grid):
        return Grid(tuple(tuple(_mapped(cell, change) for cell in row) for row in answer.rows))
    if isinstance(answer, Ratio):
        return replace(answer, parts=tuple(_mapped(part, change) for part in answer.parts))
    if isinstance(answer, Relation):
        return replace(answer, sides=tuple(_mapped_side(side, change) for side in answer.sides))
    return answer


def _mapped_side(side: Side, change: Callable[[Node], Node]) -> Side:
    return side if side.answer is None else replace(side, answer=_mapped(side.answer, change))


def nodes_of(answer: Answer) -> Iterable[Node]:
    """All its expressions."""
    if isinstance(answer, Scalar):
        yield answer.node
    for part in _parts(answer):
        yield from nodes_of(part)


def _parts(answer: Answer) -> Iterable[Answer]:
    if isinstance(answer, Listing | Ordered | Combination):
        return answer.items
    if isinstance(answer, Grid):
        return [cell for row in answer.rows for cell in row]
    if isinstance(answer, Ratio):
        return answer.parts
    if isinstance(answer, Relation):
        return [side.answer for side in answer.sides if side.answer is not None]
    return ()


def members(answer: Answer) -> Sequence[Answer]:
    """The answers of a list, or the one that it is."""
    return answer.items if isinstance(answer, Listing) else (answer,)
