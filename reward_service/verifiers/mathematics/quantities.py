"""Quantities compared: constants by their values, functions at several points, and then their units.

Two expressions that agree in 40 digits at several pseudo-random rational points are one function, for all that an
answer can hold. No simplification is needed, so the time is bounded. A point at which neither is defined tells
nothing; one at which only one is defined tells them apart.

Before they are compared answers are rewritten: signs of choice written out, and names that are free to choose.
"""

import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from reward_service.verifiers.mathematics.answers import (
    DEGREE,
    MAX_SIGNS,
    PERCENT,
    Answer,
    BracketedTuple,
    Combination,
    FunctionCall,
    Grid,
    Listing,
    Node,
    Number,
    OverLimits,
    Ratio,
    Relation,
    Scalar,
    Side,
    Symbol,
    UndefinedValue,
    Unit,
    Unreadable,
)
from reward_service.verifiers.mathematics.values import EvaluationSettings, Value, evaluate, less, near, rational, same

# A decimal stands for a value that has no finite decimal if it is as near as this: six digits of 1/3 or of pi.
DECIMAL_TOLERANCE = 1.000001e-6

_LOG_BASES = (10, None)
_MIN_POINTS = 3
_FIRST_WHOLE = 6  # the first trial of whole numbers
_OF_WHOLES = ("!", r"\binom")
_HUNDREDTH = Number(Fraction(1, 100))
_HALF_TURN = FunctionCall("/", (FunctionCall(r"\pi"), Number(Fraction(180))))
_PLUS_MINUS = (r"\pm", r"\mp")
_CONSTANTS = frozenset(("C", "c", "K"))
_FUNCTION = re.compile(r"([A-Za-z])\(([a-z])\)")


def constant(node: Node, *, log_base: int | None = 10) -> Value:
    """The value of an expression without variables. Raises Unreadable, Undefined, OverLimits."""
    return evaluate(node, EvaluationSettings(variables={}, log_base=log_base))


def symbols(node: Node) -> frozenset[str]:
    """The variables of an expression."""
    return frozenset(part.name for part in _parts(node) if isinstance(part, Symbol))


def calls(node: Node, *names: str) -> bool:
    """True if one of these operations is in the expression."""
    return any(isinstance(part, FunctionCall) and part.name in names for part in _parts(node))


def has_decimal(node: Node) -> bool:
    """True if a number with a decimal point is in the expression."""
    return any(isinstance(part, Number) and part.decimal for part in _parts(node))


def _parts(node: Node) -> Iterable[Node]:
    pending = [node]
    while pending:
        part = pending.pop()
        yield part
        if isinstance(part, FunctionCall):
            pending.extend(part.arguments)


def same_expression(gold: Node, given: Node, *, tolerance: float | None) -> bool:
    """True if the expressions are equal. `tolerance`: relative, wherever a decimal is; None: see `same_number`.

    Raises Unreadable, OverLimits.
    """
    if gold == given:
        return True
    names = symbols(gold) | symbols(given)
    bare_log = any(
        isinstance(part, FunctionCall) and part.name == r"\log" and len(part.arguments) == 1
        for node in (gold, given)
        for part in _parts(node)
    )
    bases = _LOG_BASES if bare_log else _LOG_BASES[:1]
    if not names:
        return any(_same_constants(gold, given, base, tolerance) for base in bases)
    return any(_same_functions(gold, given, names, base, tolerance) for base in bases)


def _same_constants(gold: Node, given: Node, log_base: int | None, tolerance: float | None) -> bool:
    try:
        right, answer = constant(gold, log_base=log_base), constant(given, log_base=log_base)
    except UndefinedValue:
        return False
    return same_number(right, answer, decimals=(has_decimal(gold), has_decimal(given)), tolerance=tolerance)


def same_number(gold: Value, given: Value, *, decimals: tuple[bool, bool], tolerance: float | None) -> bool:
    """Equal; or within the tolerance, if there is a decimal (`decimals`: in which of the two).

    Without a tolerance of the caller's, a decimal may differ by `DECIMAL_TOLERANCE` from a value that is written
    exactly and has no finite decimal; two finite decimals are equal only if they are the same number.
    """
    if same(gold, given):
        return True
    if not any(decimals):
        return False
    if tolerance is not None:
        return near(given, gold, relative=tolerance)
    exact = given if decimals[0] else gold
    return decimals[0] != decimals[1] and not exact.is_finite_decimal and near(given, gold, relative=DECIMAL_TOLERANCE)


def _same_functions(
    gold: Node, given: Node, names: frozenset[str], log_base: int | None, tolerance: float | None
) -> bool:
    agreed = 0
    decimals = has_decimal(gold), has_decimal(given)
    # A factorial has a value at whole numbers alone, and not at all of them: n!/(n-k)! says nothing of n below k.
    of_wholes = calls(gold, *_OF_WHOLES) or calls(given, *_OF_WHOLES)
    fault: Unreadable | None = None
    for point in points(names, whole=of_wholes):
        setting = EvaluationSettings(variables=point, log_base=log_base)
        try:
            right, answer = _value_or_none(gold, setting), _value_or_none(given, setting)
        except Unreadable as error:  # a factorial of a fraction: another point is a whole number
            fault = error
            continue
        if (right is None) != (answer is None) and not of_wholes:
            return False
        if right is None or answer is None:
            continue
        if not same(right, answer) and not _near_enough(right, answer, decimals, tolerance):
            return False
        agreed += 1
    if agreed < _MIN_POINTS:
        raise fault or Unreadable("the expressions are not defined at any of our points")
    return True


def _near_enough(right: Value, answer: Value, decimals: tuple[bool, bool], tolerance: float | None) -> bool:
    if tolerance is not None:
        return any(decimals) and near(answer, right, relative=tolerance)
    return decimals[0] != decimals[1] and near(answer, right, relative=DECIMAL_TOLERANCE)


def _value_or_none(node: Node, setting: EvaluationSettings) -> Value | None:
    try:
        return evaluate(node, setting)
    except UndefinedValue:
        return None


def points(names: Iterable[str], *, whole: bool = False) -> Iterable[Mapping[str, Fraction]]:
    """Values for the variables: positive ones, ones of either sign, and positive whole numbers; `whole`: only these."""
    ordered = sorted(names)
    for trial in range(_FIRST_WHOLE, _FIRST_WHOLE + 20) if whole else range(_FIRST_WHOLE + 5):
        yield {name: _draw(name, trial) for name in ordered}


def _draw(name: str, trial: int) -> Fraction:
    # A checksum and not `hash`, which differs from process to process.
    drawn = zlib.crc32(f"{name}/{trial}".encode())
    if trial >= _FIRST_WHOLE:
        return Fraction(3 + drawn % 29)
    value = Fraction(1 + drawn % 9973, 2477 + trial)
    return -value if trial >= 3 and (drawn >> 16) % 2 else value


@dataclass(frozen=True, kw_only=True)
class QuantityRules:
    """`tolerance`: relative, for decimals. `convert_units`: 50 cm is 0.5 m, and 180 degrees are pi."""

    tolerance: float | None = None
    convert_units: bool = False


def same_quantity(gold: Scalar, given: Scalar, rules: QuantityRules) -> bool:
    """True if the values and what both say of their units are the same. Raises Unreadable, OverLimits."""
    if gold.digits_base is not None and given.digits_base is not None and gold.digits_base != given.digits_base:
        return False
    ours, theirs = gold.unit, given.unit
    if rules.convert_units and (converted := _same_converted(gold, given, rules)) is not None:
        return converted
    moduli = [unit.modulus if unit is not None else None for unit in (ours, theirs)]
    if theirs is not None and moduli[1] is not None:
        given = Scalar(_residue(given.node, moduli[1]), theirs)
    if ours is not None and moduli[0] is not None:
        residue = _residue(gold.node, moduli[0])
        if moduli[1] is None and theirs is None and same_expression(residue, given.node, tolerance=rules.tolerance):
            return True
        gold = gold if moduli[1] is None else Scalar(residue, ours)
    percents = [unit is not None and unit.is_only(PERCENT) for unit in (ours, theirs)]
    if any(percents) and (ours is None or theirs is None):
        return _same_percent(gold.node, given.node, gold_is_percent=percents[0], rules=rules)
    if ours is not None and theirs is not None and not ours.agrees_with(theirs):
        return False
    return same_expression(gold.node, given.node, tolerance=rules.tolerance)


def _residue(node: Node, modulus: int) -> Node:
    return FunctionCall("mod", (node, Number(Fraction(modulus))))


def _same_percent(gold: Node, given: Node, *, gold_is_percent: bool, rules: QuantityRules) -> bool:
    """50 % is one half; it is also 50 where that asks for percent, as no share above 1 does."""
    shares = [FunctionCall("*", (node, _HUNDREDTH)) for node in (gold, given)]
    ours, theirs = (shares[0], given) if gold_is_percent else (gold, shares[1])
    if same_expression(ours, theirs, tolerance=rules.tolerance):
        return True
    return _is_above_one(given if gold_is_percent else gold) and same_expression(gold, given, tolerance=rules.tolerance)


def _is_above_one(node: Node) -> bool:
    try:
        return not symbols(node) and less(rational(1), constant(node))
    except UndefinedValue:
        return False


def _same_converted(gold: Scalar, given: Scalar, rules: QuantityRules) -> bool | None:
    """True if the quantities are equal in one unit; None if there is nothing to convert."""
    angles = [unit is not None and unit.is_only(DEGREE) for unit in (gold.unit, given.unit)]
    if angles[0] != angles[1] and all(
        angle or _is_radian(one.unit) for angle, one in zip(angles, (gold, given), strict=True)
    ):
        right, answer = (
            FunctionCall("*", (one.node, _HALF_TURN)) if angle else one.node
            for angle, one in zip(angles, (gold, given), strict=True)
        )
        return same_expression(right, answer, tolerance=rules.tolerance)
    sizes = [unit.size() if unit is not None else None for unit in (gold.unit, given.unit)]
    if sizes[0] is None or sizes[1] is None:
        return None
    if sizes[0][1] != sizes[1][1]:
        return False
    right, answer = (
        FunctionCall("*", (one.node, Number(size[0]))) for one, size in zip((gold, given), sizes, strict=True) if size
    )
    return same_expression(right, answer, tolerance=rules.tolerance)


def _is_radian(unit: Unit | None) -> bool:
    return unit is None or unit.is_only("rad")


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
    if not isinstance(node, FunctionCall):
        return node
    name = node.name
    if name in _PLUS_MINUS:
        name = "+" if (name == r"\pm") == (sign > 0) else "-"
    return FunctionCall(name, tuple(_resolved(argument, sign) for argument in node.arguments))


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
    if not isinstance(node, FunctionCall) or node.name not in ("+", "-"):
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
        return FunctionCall(node.name, tuple(map(change, node.arguments))) if isinstance(node, FunctionCall) else node

    return _mapped(answer, change)


def _mapped(answer: Answer, change: Callable[[Node], Node]) -> Answer:
    """The answer with all its expressions changed."""
    if isinstance(answer, Scalar):
        return replace(answer, node=change(answer.node))
    if isinstance(answer, Listing | BracketedTuple | Combination):
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
    for part in _answers_within(answer):
        yield from nodes_of(part)


def _answers_within(answer: Answer) -> Iterable[Answer]:
    if isinstance(answer, Listing | BracketedTuple | Combination):
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
