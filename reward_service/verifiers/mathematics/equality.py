"""Whether two answers are the same, by what kind of answers they are. The first is the right one throughout.

What the right answer leaves unsaid (a unit, a name) the other may add; what both say must agree. Order counts in
tuples, intervals and vectors, and not among several answers or in sets; all of them have to be there.
"""

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

from reward_service.verifiers.mathematics.answers import (
    MAX_SIGNS,
    Answer,
    Call,
    Combination,
    Grid,
    Listing,
    Node,
    Number,
    Ordered,
    OverLimits,
    Ratio,
    RealLine,
    Relation,
    Scalar,
    Text,
    Undefined,
    Unreadable,
)
from reward_service.verifiers.mathematics.conditions import (
    names_agree,
    proportional,
    region,
    same_inequality,
    same_region,
    solved_value,
)
from reward_service.verifiers.mathematics.quantities import (
    Rules,
    calls,
    points,
    same_expression,
    same_quantity,
    symbols,
)
from reward_service.verifiers.mathematics.values import Setting, evaluate
from reward_service.verifiers.mathematics.words import number_of

_PLUS_MINUS = (r"\pm", r"\mp")


def same_answer(gold: Answer, given: Answer, rules: Rules) -> bool:
    """Whether the answers are the same. Raises OverLimits; Unreadable where that cannot be said."""
    return _same(_expanded(gold), _expanded(given), rules)


def check(answer: Answer) -> None:
    """Raises OverLimits if a part of the answer is beyond the limits."""
    for node in _nodes(answer):
        try:
            evaluate(node, Setting(variables=next(iter(points(symbols(node))))))
        except (Undefined, Unreadable):
            continue


def _same(gold: Answer, given: Answer, rules: Rules) -> bool:
    if gold == given:
        return True
    if isinstance(gold, Relation) or isinstance(given, Relation):
        return _same_relation(gold, given, rules)
    if isinstance(gold, Scalar) and isinstance(given, Scalar):
        return same_quantity(gold, given, rules)
    if isinstance(gold, Text) or isinstance(given, Text):
        return _same_text(gold, given, rules)
    if isinstance(gold, Ratio) or isinstance(given, Ratio):
        return _same_ratio(gold, given, rules)
    return _same_collection(gold, given, rules)


def _same_collection(gold: Answer, given: Answer, rules: Rules) -> bool:
    if isinstance(gold, Grid) and isinstance(given, Grid):
        return len(gold.rows) == len(given.rows) and all(
            _pairwise(ours, theirs, rules) for ours, theirs in zip(gold.rows, given.rows, strict=True)
        )
    if isinstance(gold, Listing) and isinstance(given, Listing):
        return _same_listing(gold, given, rules)
    if isinstance(gold, Ordered) and isinstance(given, Ordered):
        alike = _brackets_agree(gold, given) and _pairwise(gold.items, given.items, rules)
        return alike or _same_numbers(gold, given, rules)
    if isinstance(gold, Combination) and isinstance(given, Combination) and _same_parts(gold, given, rules):
        return True
    ours, theirs = _sequence(gold), _sequence(given)
    if ours is not None and theirs is not None and not (_is_condition(gold) or _is_condition(given)):
        return _pairwise(ours, theirs, rules)
    if isinstance(gold, Listing) and isinstance(given, Scalar):
        return len(gold.items) == 1 and _same(gold.items[0], given, rules)
    if isinstance(given, Listing) and isinstance(gold, Scalar):
        return len(given.items) == 1 and _same(gold, given.items[0], rules)
    return _same_numbers(gold, given, rules)


def _pairwise(gold: Sequence[Answer], given: Sequence[Answer], rules: Rules) -> bool:
    return len(gold) == len(given) and all(
        same_answer(right, answer, rules) for right, answer in zip(gold, given, strict=True)
    )


def _same_parts(gold: Combination, given: Combination, rules: Rules) -> bool:
    """Whether they put the same parts together, as those of sets that are only names."""
    if gold.operator != given.operator:
        return False
    if gold.operator == "difference":
        return _pairwise(gold.items, given.items, rules)
    return _each_in_the_other(gold.items, given.items, rules)


def _each_in_the_other(gold: Sequence[Answer], given: Sequence[Answer], rules: Rules) -> bool:
    return all(any(same_answer(right, answer, rules) for answer in given) for right in gold) and all(
        any(same_answer(right, answer, rules) for right in gold) for answer in given
    )


def _sequence(answer: Answer) -> Sequence[Answer] | None:
    """The parts of what may stand for a tuple: a bare list, a vector, a row or a column, nested rows."""
    if isinstance(answer, Ordered):
        return answer.items if answer.opening == "(" or answer.opening == r"\langle" or len(answer.items) > 2 else None
    if isinstance(answer, Listing):
        return answer.items if answer.joined == "bare" and len(answer.items) > 1 else None
    if not isinstance(answer, Grid):
        return None
    if len(answer.rows) == 1:
        return answer.rows[0]
    if all(len(row) == 1 for row in answer.rows):
        return tuple(row[0] for row in answer.rows)
    return None


def _brackets_agree(gold: Ordered, given: Ordered) -> bool:
    """Brackets matter where they may be those of an interval."""
    brackets = [(one.opening, one.closing) for one in (gold, given)]
    if len(gold.items) != 2:
        return True
    plain = [("(", ")") if pair == (r"\langle", r"\rangle") else pair for pair in brackets]
    return plain[0] == plain[1]


def _same_listing(gold: Listing, given: Listing, rules: Rules) -> bool:
    ours, theirs = gold.items, given.items
    if _names(gold) and not _names(given):
        return _pairwise(ours, theirs, rules)
    once = "bare" in (gold.joined, given.joined) and "set" not in (gold.joined, given.joined)
    alike = _matched(ours, theirs, rules) if once else _each_in_the_other(ours, theirs, rules)
    return alike or _same_numbers_if_conditions(gold, given, rules)


def _matched(gold: Sequence[Answer], given: Sequence[Answer], rules: Rules) -> bool:
    """Whether each is equal to one of the other, and none is left: `2, 2, 3` is not `2, 3`."""
    left = list(given)
    for right in gold:
        at = next((at for at, answer in enumerate(left) if same_answer(right, answer, rules)), None)
        if at is None:
            return False
        del left[at]
    return not left


def _names(answer: Listing) -> bool:
    """Whether it gives values to different names, as in `x = 1, y = 2`."""
    names = [item.sides[0].name for item in answer.items if isinstance(item, Relation) and item.operators == ("=",)]
    return len(names) == len(answer.items) > 1 and None not in names and len(set(names)) == len(names)


def _is_condition(answer: Answer) -> bool:
    """Whether it says where numbers lie, in inequalities or intervals."""
    items = answer.items if isinstance(answer, Listing) else ()
    return any(isinstance(item, Ordered) or (isinstance(item, Relation) and item.operators != ("=",)) for item in items)


def _same_numbers_if_conditions(gold: Listing, given: Listing, rules: Rules) -> bool:
    return (_is_condition(gold) or _is_condition(given)) and _same_numbers(gold, given, rules)


def _same_numbers(gold: Answer, given: Answer, rules: Rules) -> bool:
    """Whether the answers are one set of real numbers. A point in no braces is not taken for one."""
    if not any(isinstance(one, Combination | RealLine | Ordered | Relation | Listing) for one in (gold, given)):
        return False
    try:
        return same_region(region(gold), region(given), tolerance=rules.tolerance)
    except Unreadable:
        return False


def _same_relation(gold: Answer, given: Answer, rules: Rules) -> bool:
    if isinstance(gold, Relation) and isinstance(given, Relation):
        return _same_relations(gold, given, rules)
    relation, other = (gold, given) if isinstance(gold, Relation) else (given, gold)
    assert isinstance(relation, Relation)
    value = solved_value(relation, lambda one, two: same_answer(one, two, rules))
    if value is not None:
        return same_answer(value, other, rules) if relation is gold else same_answer(other, value, rules)
    if isinstance(other, Listing) and _names(other):
        return False
    return not isinstance(other, Scalar) and _same_numbers(gold, given, rules)


def _same_relations(gold: Relation, given: Relation, rules: Rules) -> bool:
    right, answer = (solved_value(one, lambda a, b: same_answer(a, b, rules)) for one in (gold, given))
    if right is not None and answer is not None:
        if names_agree(gold, given):
            return same_answer(right, answer, rules)
        return proportional(gold, given)
    if same_inequality(gold, given):
        return True
    variables = [frozenset(name for node in _nodes(one) for name in symbols(node)) for one in (gold, given)]
    return variables[0] == variables[1] and _same_numbers(gold, given, rules)


def _same_text(gold: Answer, given: Answer, rules: Rules) -> bool:
    if isinstance(gold, Text) and isinstance(given, Text):
        return gold.words == given.words
    text, other = (gold, given) if isinstance(gold, Text) else (given, gold)
    assert isinstance(text, Text)
    number = number_of(text.words)
    if number is None or not isinstance(other, Scalar):
        return False
    scalar = Scalar(Number(Fraction(number)))
    return same_quantity(scalar, other, rules) if text is gold else same_quantity(other, scalar, rules)


def _same_ratio(gold: Answer, given: Answer, rules: Rules) -> bool:
    ours, theirs = _ratio_parts(gold), _ratio_parts(given)
    if ours is None or theirs is None or len(ours) != len(theirs) or not _units_agree(gold, given):
        return False
    if isinstance(gold, Ratio) and gold.clock:
        if isinstance(given, Ratio) and given.clock:
            return ours == theirs
        if not _is_reduced(ours):
            return False  # 12:30 is a time, as no ratio is written so; 11:21 may be one
    return all(
        same_expression(Call("*", (right, theirs[0])), Call("*", (answer, ours[0])), tolerance=rules.tolerance)
        for right, answer in zip(ours[1:], theirs[1:], strict=True)
    )


def _is_reduced(parts: Sequence[Node]) -> bool:
    wholes = [part.value.numerator for part in parts if isinstance(part, Number)]
    return all(wholes) and math.gcd(*wholes) == 1


def _units_agree(gold: Answer, given: Answer) -> bool:
    """Whether the last parts agree: 3:30 PM is not 3:30 AM."""
    last = [answer.parts[-1] if isinstance(answer, Ratio) else answer for answer in (gold, given)]
    units = [part.unit for part in last if isinstance(part, Scalar) and part.unit is not None]
    return len(units) < 2 or units[0].agrees_with(units[1])


def _ratio_parts(answer: Answer) -> Sequence[Node] | None:
    if isinstance(answer, Ratio):
        nodes = [part.node for part in answer.parts if isinstance(part, Scalar)]
        return nodes if len(nodes) == len(answer.parts) else None
    if isinstance(answer, Scalar):
        return [answer.node, Number(Fraction(1))]
    return None


def _expanded(answer: Answer) -> Answer:
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
    nodes = list(_nodes(answer))
    if not any(calls(node, *_PLUS_MINUS) for node in nodes):
        return (answer,)
    if isinstance(answer, Listing | Grid | Combination | Ratio):
        return (answer,)
    if len(nodes) > MAX_SIGNS:
        raise OverLimits("a sign of choice in many parts")
    return (_with_sign(answer, 1), _with_sign(answer, -1))


def _with_sign(answer: Answer, sign: int) -> Answer:
    if isinstance(answer, Scalar):
        return Scalar(_resolved(answer.node, sign), answer.unit, answer.digits_base)
    if isinstance(answer, Ordered):
        return Ordered(tuple(_with_sign(item, sign) for item in answer.items), answer.opening, answer.closing)
    if isinstance(answer, Relation):
        sides = tuple(
            type(side)(answer=None if side.answer is None else _with_sign(side.answer, sign), name=side.name)
            for side in answer.sides
        )
        return Relation(sides=sides, operators=answer.operators)
    return answer


def _resolved(node: Node, sign: int) -> Node:
    if not isinstance(node, Call):
        return node
    name = node.name
    if name in _PLUS_MINUS:
        name = "+" if (name == r"\pm") == (sign > 0) else "-"
    return Call(name, tuple(_resolved(argument, sign) for argument in node.arguments))


def _nodes(answer: Answer) -> Iterable[Node]:
    if isinstance(answer, Scalar):
        yield answer.node
    for part in _parts(answer):
        yield from _nodes(part)


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
