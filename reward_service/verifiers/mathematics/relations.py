"""Equations and inequalities: what they say of a name, and whether two say the same."""

import itertools
import re
from collections.abc import Callable, Sequence

from reward_service.verifiers.mathematics.answers import Answer, Relation, Scalar
from reward_service.verifiers.mathematics.nodes import Call, Node, Undefined, Unreadable
from reward_service.verifiers.mathematics.scalars import points, symbols
from reward_service.verifiers.mathematics.values import Setting, Value, arithmetic, evaluate, less, rational, same

_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!=", r"\in": r"\in"}
_EQUAL = frozenset(("=", r"\approx"))
_MIN_POINTS = 3


def solved_value(relation: Relation, same: Callable[[Answer, Answer], bool]) -> Answer | None:
    r"""What an equation says that its name is (`x = 3`), or what all its sides are (`3 + 4 = 7`); else None.

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
    """Whether the equations may speak of one thing. Only two single letters surely do not."""
    names = [_name(relation) for relation in (gold, given)]
    if names[0] == names[1] or None in names:
        return True
    return not all(re.fullmatch(r"\\?[A-Za-z](_\w+)?'*|\\[a-z]+", name or "") for name in names)


def _name(relation: Relation) -> str | None:
    name = relation.sides[0].name or relation.sides[-1].name
    if name is None:
        return None
    bare = name.replace("{", "").replace("}", "")
    return bare if len(bare) == 1 else bare.casefold()


def proportional(gold: Relation, given: Relation) -> bool:
    """Whether two equations are one up to a factor."""
    if len(gold.sides) != 2 or len(given.sides) != 2:
        return False
    return _factor(gold, given) is not None


def same_inequality(gold: Relation, given: Relation) -> bool:
    """Whether the relations are one up to a factor, link by link, read from either end."""
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
    ours, theirs = _difference(gold), _difference(given)
    if ours is None or theirs is None or symbols(ours) != symbols(theirs) or not symbols(ours):
        return None
    quotient = Call("/", (theirs, ours))
    factors: list[Value] = []
    for point in points(symbols(ours)):
        try:
            factors.append(evaluate(quotient, Setting(variables=point)))
        except (Undefined, Unreadable):
            continue
    alike = len(factors) >= _MIN_POINTS and all(same(factors[0], factor) for factor in factors[1:])
    return factors[0] if alike and not same(factors[0], arithmetic("-", (factors[0], factors[0]))) else None


def _difference(relation: Relation) -> Node | None:
    left, right = (side.answer for side in relation.sides)
    return Call("-", (left.node, right.node)) if isinstance(left, Scalar) and isinstance(right, Scalar) else None
