"""Equations and inequalities: what they say of a name, whether two say the same, and which real numbers they allow.

Sets of real numbers are intervals in order: `x > 3`, `(3, oo)` and `{x | x > 3}` are one region.
"""

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from reward_service.verifiers.mathematics.answers import (
    Answer,
    BracketedTuple,
    Combination,
    FunctionCall,
    Listing,
    Node,
    RealLine,
    Relation,
    Scalar,
    Side,
    Symbol,
    UndefinedValue,
    Unreadable,
)
from reward_service.verifiers.mathematics.expressions import parse_expression
from reward_service.verifiers.mathematics.quantities import constant, has_decimal, points, same_number, symbols
from reward_service.verifiers.mathematics.tokens import tokenise
from reward_service.verifiers.mathematics.values import (
    EvaluationSettings,
    Value,
    arithmetic,
    evaluate,
    less,
    rational,
    same,
)

_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!=", r"\in": r"\in"}
_INEQUALITIES = frozenset(("<", ">", "<=", ">="))
_HEAD = re.compile(r"(\\?[A-Za-z](?:_\w+)?'*|\\[a-z]+)(\([\w\\,]*\))?")
_EQUAL = frozenset(("=", r"\approx"))
_MIN_POINTS = 3
_INFINITY = parse_expression(tokenise(r"\infty"))


def solved_value(relation: Relation, same: Callable[[Answer, Answer], bool]) -> Answer | None:
    r"""The value that an equation gives its name (`x = 3`), or what all its sides are (`3 + 4 = 7`); else None.

    Of `x = \sqrt{2} \approx 1.414` that is the exact side. Sides that are not equal to each other say nothing.
    """
    if relation.operators == (r"\in",):
        return relation.sides[1].answer if relation.sides[0].name is not None else None
    if not _EQUAL.issuperset(relation.operators):
        return None
    named = relation.sides[0].name is not None
    flipped = not named and relation.sides[-1].name is not None
    sides = relation.sides[1:] if named else relation.sides[:-1] if flipped else relation.sides
    operators = relation.operators[1:] if named else relation.operators[: len(sides) - 1]
    values = [side.answer for side in sides]
    last = values[0]
    for operator, value in zip(operators, values[1:], strict=True):
        if operator == r"\approx":
            break
        if last is None or value is None or not same(last, value):
            return None
        last = value
    return last


def names_agree(gold: Relation, given: Relation) -> bool:
    """True if the equations may speak of one thing. Two different letters or functions surely do not, but f(x) is y."""
    names = [_name(relation) for relation in (gold, given)]
    if names[0] == names[1] or None in names:
        return True
    heads = [_HEAD.fullmatch(name or "") for name in names]
    if not all(heads):
        return True
    known = [(head[1], head[2] is not None) for head in heads if head is not None]
    return known[0][0] == known[1][0] or {known[0], known[1]} <= {("y", False), ("f", True)}


def _name(relation: Relation) -> str | None:
    name = relation.sides[0].name or relation.sides[-1].name
    if name is None:
        return None
    bare = name.replace("{", "").replace("}", "")
    return bare if len(bare) == 1 else bare.casefold()


def proportional(gold: Relation, given: Relation) -> bool:
    """True if two equations are one up to a factor."""
    if len(gold.sides) != 2 or len(given.sides) != 2:
        return False
    return _factor(gold, given) is not None


def same_inequality(gold: Relation, given: Relation) -> bool:
    """True if the relations are one up to a factor, link by link, read from either end."""
    if len(gold.operators) != len(given.operators):
        return False
    return any(_same_links(gold, one) for one in (given, _reversed(given)))


def _reversed(relation: Relation) -> Relation:
    operators = tuple(_FLIPPED.get(operator, operator) for operator in reversed(relation.operators))
    return Relation(sides=relation.sides[::-1], operators=operators)


def _same_links(gold: Relation, given: Relation) -> bool:
    return all(_same_link(ours, theirs) for ours, theirs in zip(_links(gold), _links(given), strict=True))


def _links(relation: Relation) -> Sequence[Relation]:
    pairs = zip(itertools.pairwise(relation.sides), relation.operators, strict=True)
    return [Relation(sides=pair, operators=(operator,)) for pair, operator in pairs]


def _same_link(gold: Relation, given: Relation) -> bool:
    factor = _factor(gold, given)
    if factor is None or not factor.is_real:
        return False
    operator = given.operators[0]
    # A negative factor turns an inequality round.
    turned = operator if less(rational(0), factor) else _FLIPPED.get(operator, operator)
    return gold.operators[0] == turned


def _factor(gold: Relation, given: Relation) -> Value | None:
    """By what the difference of the sides of the one is multiplied in the other, if that is the same everywhere."""
    ours, theirs = _left_minus_right(gold), _left_minus_right(given)
    if ours is None or theirs is None or symbols(ours) != symbols(theirs) or not symbols(ours):
        return None
    quotient = FunctionCall("/", (theirs, ours))
    factors: list[Value] = []
    for point in points(symbols(ours)):
        try:
            factors.append(evaluate(quotient, EvaluationSettings(variables=point)))
        except (UndefinedValue, Unreadable):
            continue
    alike = len(factors) >= _MIN_POINTS and all(same(factors[0], factor) for factor in factors[1:])
    return factors[0] if alike and not same(factors[0], arithmetic("-", (factors[0], factors[0]))) else None


def _left_minus_right(relation: Relation) -> Node | None:
    left, right = (side.answer for side in relation.sides)
    return (
        FunctionCall("-", (left.node, right.node)) if isinstance(left, Scalar) and isinstance(right, Scalar) else None
    )


@dataclass(frozen=True, slots=True)
class End:
    """End of an interval: if the interval holds it, and if it is written as a decimal."""

    value: Value
    closed: bool
    decimal: bool = False


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval; a point has the same closed end twice."""

    low: End
    high: End


Region = tuple[Interval, ...]

_TOP = End(constant(_INFINITY), closed=False)
_BOTTOM = End(constant(FunctionCall("neg", (_INFINITY,))), closed=False)
ALL_REALS: Region = (Interval(_BOTTOM, _TOP),)


def same_region(one: Region, other: Region, *, tolerance: float | None) -> bool:
    """True if the regions hold the same numbers."""
    return len(one) == len(other) and all(
        _same_end(mine, theirs, tolerance)
        for left, right in zip(one, other, strict=True)
        for mine, theirs in ((left.low, right.low), (left.high, right.high))
    )


def _same_end(one: End, other: End, tolerance: float | None) -> bool:
    if one.closed != other.closed:
        return False
    return same_number(one.value, other.value, decimals=(one.decimal, other.decimal), tolerance=tolerance)


def region(answer: Answer) -> Region:
    """The numbers that the answer allows. Raises Unreadable if it is no such set, OverLimits."""
    try:
        return merged(_region(answer))
    except UndefinedValue as error:
        raise Unreadable(str(error)) from error


def _region(answer: Answer) -> Region:
    if isinstance(answer, RealLine):
        return ALL_REALS
    if isinstance(answer, Scalar):
        return (_point(answer),)
    if (
        isinstance(answer, BracketedTuple)
        and len(answer.items) == 2
        and answer.opening in "(["
        and answer.closing in ")]"
    ):
        return (_interval(answer),)
    if isinstance(answer, Relation):
        return _region_of_relation(answer)
    if isinstance(answer, Listing):
        return _region_of_listing(answer)
    if isinstance(answer, Combination):
        return functools.reduce(_COMBINE[answer.operator], (region(item) for item in answer.items))
    raise Unreadable("no set of real numbers")


def _interval(answer: BracketedTuple) -> Interval:
    """Raises Unreadable if it would be empty: `(2, 1)` and `(1, 1)` are tuples."""
    low, high = (_end_of(item, closed=False) for item in answer.items)
    if not less(low.value, high.value):
        raise Unreadable("an interval that ends before it starts")
    return Interval(
        End(low.value, answer.opening == "[" and not low.value.is_infinite, low.decimal),
        End(high.value, answer.closing == "]" and not high.value.is_infinite, high.decimal),
    )


def _region_of_listing(answer: Listing) -> Region:
    """Several conditions hold together if they can (`x > 1, x < 5`), and else each is one case (`x < 1, x > 5`)."""
    parts = [region(item) for item in answer.items]
    conditions = [isinstance(item, Relation) and item.operators != ("=",) for item in answer.items]
    if (
        answer.joined == "bare"
        and conditions
        and all(conditions)
        and (together := functools.reduce(_intersection, parts))
    ):
        return together
    pieces = tuple(piece for part in parts for piece in part)
    # Cases do not overlap: `(1, 5), (2, 3)` names two candidates, and is not (1, 5).
    if len(merged(pieces)) < len(pieces) and answer.joined != "set":
        raise Unreadable("cases that overlap")
    return pieces


def _region_of_relation(answer: Relation) -> Region:
    if answer.operators in ((r"\in",), ("=",)) and answer.sides[0].name is not None:
        right = answer.sides[1].answer
        if right is None:
            raise Unreadable("a name for a name")
        return _region(right)
    bounds = [
        _half_line(left, operator, right)
        for left, operator, right in zip(answer.sides, answer.operators, answer.sides[1:], strict=False)
    ]
    return functools.reduce(_intersection, bounds, ALL_REALS)


def _half_line(left: Side, operator: str, right: Side) -> Region:
    """The solutions of an inequality that is linear in one variable, or in whose amount it is."""
    return _solutions(_side_node(left), operator, _side_node(right))


def _side_node(side: Side) -> Node:
    """Its expression; what only names a value, such as f(x), is one variable."""
    if side.name is not None and "(" in side.name:
        return Symbol(side.name)
    if not isinstance(side.answer, Scalar):
        raise Unreadable("an inequality of what is no expression")
    return side.answer.node


def _solutions(left: Node, operator: str, right: Node) -> Region:
    if operator in _INEQUALITIES and _is_absolute(right) and not symbols(left):
        left, operator, right = right, _FLIPPED[operator], left
    if operator in _INEQUALITIES and isinstance(left, FunctionCall) and _is_absolute(left) and not symbols(right):
        above = _solutions(left.arguments[0], operator, right)
        below = _solutions(left.arguments[0], _FLIPPED[operator], FunctionCall("neg", (right,)))
        return _union(above, below) if operator in (">", ">=") else _intersection(above, below)
    difference = FunctionCall("-", (left, right))
    names = symbols(difference)
    if len(names) != 1 or operator not in (*_INEQUALITIES, "!="):
        raise Unreadable("an inequality that is not of one variable")
    slope, end = _linear(difference, next(iter(names)))
    bound = End(end, closed=operator in ("<=", ">="), decimal=has_decimal(difference))
    if operator == "!=":
        return (Interval(_BOTTOM, bound), Interval(bound, _TOP))
    upward = operator in (">", ">=")
    return (Interval(bound, _TOP),) if upward == less(rational(0), slope) else (Interval(_BOTTOM, bound),)


def _is_absolute(node: Node) -> bool:
    return isinstance(node, FunctionCall) and node.name == r"\abs"


def _linear(node: Node, name: str) -> tuple[Value, Value]:
    """The slope, and where the function is zero. Raises Unreadable if it is not linear."""
    start, *others = (evaluate(node, EvaluationSettings(variables={name: Fraction(place)})) for place in (0, 1, 2, 7))
    rises = [arithmetic("-", (other, start)) for other in others]
    slope = rises[0]
    if not all(same(rise, arithmetic("*", (slope, rational(by)))) for rise, by in zip(rises, (1, 2, 7), strict=True)):
        raise Unreadable("an inequality that is not linear")
    if same(slope, rational(0)) or not slope.is_real:
        raise Unreadable("an inequality without its variable")
    return slope, arithmetic("/", (arithmetic("neg", (start,)), slope))


def _point(answer: Scalar) -> Interval:
    end = _end_of(answer, closed=True)
    return Interval(end, end)


def _end_of(answer: Answer, *, closed: bool) -> End:
    if not isinstance(answer, Scalar) or symbols(answer.node):
        raise Unreadable("an end that is no number")
    value = constant(answer.node)
    if not value.is_real:
        raise Unreadable("a complex number is no end")
    return End(value, closed, has_decimal(answer.node))


def _piece(low: End, high: End) -> Region:
    """The interval, unless it holds nothing."""
    if less(high.value, low.value) or (same(low.value, high.value) and not (low.closed and high.closed)):
        return ()
    return (Interval(low, high),)


def merged(pieces: Sequence[Interval]) -> Region:
    """In order, and as one where they touch."""
    ordered = sorted(pieces, key=functools.cmp_to_key(_order))
    found: list[Interval] = []
    for piece in ordered:
        if found and _touches(found[-1].high, piece.low):
            last = found.pop()
            piece = Interval(last.low, _higher(last.high, piece.high))
        found.append(piece)
    return tuple(found)


def _order(left: Interval, right: Interval) -> int:
    one, other = left.low, right.low
    if same(one.value, other.value):
        return other.closed - one.closed
    return -1 if less(one.value, other.value) else 1


def _touches(high: End, low: End) -> bool:
    if same(high.value, low.value):
        return high.closed or low.closed
    return less(low.value, high.value)


def _higher(one: End, other: End) -> End:
    if same(one.value, other.value):
        return one if one.closed else other
    return other if less(one.value, other.value) else one


def _lower(one: End, other: End, *, of_lows: bool) -> End:
    """The end that is further inside: the greater of two low ends, or the smaller of two high ones."""
    if same(one.value, other.value):
        return other if one.closed else one
    return (other if of_lows else one) if less(one.value, other.value) else (one if of_lows else other)


def _union(one: Region, other: Region) -> Region:
    return merged((*one, *other))


def _intersection(one: Region, other: Region) -> Region:
    pairs = ((left, right) for left in one for right in other)
    return tuple(
        piece
        for left, right in pairs
        for piece in _piece(_lower(left.low, right.low, of_lows=True), _lower(left.high, right.high, of_lows=False))
    )


def _difference(one: Region, other: Region) -> Region:
    rest: Region = one
    for piece in other:
        below = (Interval(_BOTTOM, End(piece.low.value, not piece.low.closed, piece.low.decimal)),)
        above = (Interval(End(piece.high.value, not piece.high.closed, piece.high.decimal), _TOP),)
        rest = (*_intersection(rest, below), *_intersection(rest, above))
    return rest


_COMBINE = {"union": _union, "intersection": _intersection, "difference": _difference}
