"""Whether two values with their units are the same quantity."""

from dataclasses import dataclass
from fractions import Fraction

from reward_service.mathematics.answers import Scalar
from reward_service.mathematics.limits import Undefined
from reward_service.mathematics.nodes import Call, Node, Number
from reward_service.mathematics.scalars import constant, same_expression, symbols
from reward_service.mathematics.units import DEGREE, PERCENT, Unit
from reward_service.mathematics.values import less, rational

_HUNDREDTH = Number(Fraction(1, 100))
_HALF_TURN = Call("/", (Call(r"\pi"), Number(Fraction(180))))


@dataclass(frozen=True, kw_only=True)
class Rules:
    """`tolerance`: relative, for decimals. `convert_units`: 50 cm is 0.5 m, and 180 degrees are pi."""

    tolerance: float | None = None
    convert_units: bool = False


def same_quantity(gold: Scalar, given: Scalar, rules: Rules) -> bool:
    """Whether the values and what both say of their units are the same. Raises Unreadable, OverLimits."""
    if gold.digits_base is not None and given.digits_base is not None and gold.digits_base != given.digits_base:
        return False
    ours, theirs = gold.unit, given.unit
    if rules.convert_units and (converted := _same_converted(gold, given, rules)) is not None:
        return converted
    percents = [unit is not None and unit.is_only(PERCENT) for unit in (ours, theirs)]
    if any(percents) and (ours is None or theirs is None):
        return _same_percent(gold.node, given.node, gold_is_percent=percents[0], rules=rules)
    if ours is not None and theirs is not None and not ours.agrees_with(theirs):
        return False
    return same_expression(gold.node, given.node, tolerance=rules.tolerance)


def _same_percent(gold: Node, given: Node, *, gold_is_percent: bool, rules: Rules) -> bool:
    """50 % is one half; it is also 50 where that asks for percent, as no share above 1 does."""
    shares = [Call("*", (node, _HUNDREDTH)) for node in (gold, given)]
    ours, theirs = (shares[0], given) if gold_is_percent else (gold, shares[1])
    if same_expression(ours, theirs, tolerance=rules.tolerance):
        return True
    return _is_above_one(given if gold_is_percent else gold) and same_expression(gold, given, tolerance=rules.tolerance)


def _is_above_one(node: Node) -> bool:
    try:
        return not symbols(node) and less(rational(1), constant(node))
    except Undefined:
        return False


def _same_converted(gold: Scalar, given: Scalar, rules: Rules) -> bool | None:
    """Whether the quantities are equal in one unit; None if there is nothing to convert."""
    angles = [unit is not None and unit.is_only(DEGREE) for unit in (gold.unit, given.unit)]
    if angles[0] != angles[1] and all(
        angle or _is_radian(one.unit) for angle, one in zip(angles, (gold, given), strict=True)
    ):
        right, answer = (
            Call("*", (one.node, _HALF_TURN)) if angle else one.node
            for angle, one in zip(angles, (gold, given), strict=True)
        )
        return same_expression(right, answer, tolerance=rules.tolerance)
    sizes = [unit.size() if unit is not None else None for unit in (gold.unit, given.unit)]
    if sizes[0] is None or sizes[1] is None:
        return None
    if sizes[0][1] != sizes[1][1]:
        return False
    right, answer = (
        Call("*", (one.node, Number(size[0]))) for one, size in zip((gold, given), sizes, strict=True) if size
    )
    return same_expression(right, answer, tolerance=rules.tolerance)


def _is_radian(unit: Unit | None) -> bool:
    return unit is None or unit.is_only("rad")
