"""Equality of two answers, by what kind of answers they are. The first is the right one throughout.

What the right answer leaves unsaid (a unit, a name) the other may add; what both say must agree. Order counts in
tuples, intervals and vectors, and not among several answers or in sets; all of them have to be there.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

from reward_service.verifiers.mathematics.answers import (
    Answer,
    BracketedTuple,
    Combination,
    FunctionCall,
    Grid,
    Listing,
    Node,
    Number,
    Ratio,
    RealLine,
    Relation,
    Scalar,
    Symbol,
    Text,
    UndefinedValue,
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
    QuantityRules,
    expanded,
    members,
    nodes_of,
    points,
    same_expression,
    same_quantity,
    symbols,
    with_names_of,
)
from reward_service.verifiers.mathematics.values import EvaluationSettings, evaluate
from reward_service.verifiers.mathematics.words import number_of


def same_answer(gold: Answer, given: Answer, rules: QuantityRules) -> bool:
    """True if the answers are the same. Raises OverLimits; Unreadable where that cannot be said."""
    return _same(expanded(gold), expanded(with_names_of(gold, given)), rules)


def check(answer: Answer) -> None:
    """Raises OverLimits if a part of the answer is beyond the limits."""
    for node in nodes_of(answer):
        try:
            evaluate(node, EvaluationSettings(variables=next(iter(points(symbols(node))))))
        except (UndefinedValue, Unreadable):
            continue


def _same(gold: Answer, given: Answer, rules: QuantityRules) -> bool:
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


def _same_collection(gold: Answer, given: Answer, rules: QuantityRules) -> bool:
    if isinstance(gold, Grid) or isinstance(given, Grid):
        return _same_matrix(gold, given, rules)
    if isinstance(gold, Listing) and isinstance(given, Listing):
        return _same_listing(gold, given, rules)
    if isinstance(gold, BracketedTuple) and isinstance(given, BracketedTuple):
        alike = _brackets_agree(gold, given) and _pairwise(gold.items, given.items, rules)
        return alike or _same_numbers(gold, given, rules)
    if isinstance(gold, Combination) and isinstance(given, Combination) and _same_parts(gold, given, rules):
        return True
    ours, theirs = _sequence(gold), _sequence(given)
    if ours is not None and theirs is not None and not (_is_condition(gold) or _is_condition(given)):
        return _pairwise(ours, theirs, rules)
    if _same_letters(gold, given):
        return True
    if isinstance(gold, Listing) and isinstance(given, Scalar):
        return len(gold.items) == 1 and _same(gold.items[0], given, rules)
    if isinstance(given, Listing) and isinstance(gold, Scalar):
        # `0.1 or 10%` says one value twice.
        once = len(given.items) == 1 or (given.joined == "or" and given.items)
        return bool(once) and all(_same(gold, item, rules) for item in given.items)
    return _same_numbers(gold, given, rules)


def _same_matrix(gold: Answer, given: Answer, rules: QuantityRules) -> bool:
    """True if one of them is a matrix, and the other its rows in brackets, or the entries of its one row or column."""
    ours, theirs = (_rows(one) if isinstance(one, BracketedTuple) else one for one in (gold, given))
    if isinstance(ours, Grid) and isinstance(theirs, Grid):
        return len(ours.rows) == len(theirs.rows) and all(
            _pairwise(right, answer, rules) for right, answer in zip(ours.rows, theirs.rows, strict=True)
        )
    right, answer = (one.items if isinstance(one, BracketedTuple) else _sequence(one) for one in (gold, given))
    return right is not None and answer is not None and _pairwise(right, answer, rules)


def _pairwise(gold: Sequence[Answer], given: Sequence[Answer], rules: QuantityRules) -> bool:
    return len(gold) == len(given) and all(
        same_answer(right, answer, rules) for right, answer in zip(gold, given, strict=True)
    )


def _same_parts(gold: Combination, given: Combination, rules: QuantityRules) -> bool:
    """True if they put the same parts together, as those of sets that are only names."""
    if gold.operator != given.operator:
        return False
    if gold.operator == "difference":
        return _pairwise(gold.items, given.items, rules)
    return _each_in_the_other(gold.items, given.items, rules)


def _each_in_the_other(gold: Sequence[Answer], given: Sequence[Answer], rules: QuantityRules) -> bool:
    return all(any(same_answer(right, answer, rules) for answer in given) for right in gold) and all(
        any(same_answer(right, answer, rules) for right in gold) for answer in given
    )


def _sequence(answer: Answer) -> Sequence[Answer] | None:
    """The parts of what may stand for a tuple: a bare list, a vector, a row or a column, nested rows."""
    if isinstance(answer, BracketedTuple):
        vector = answer.opening == "(" or answer.opening == r"\langle" or len(answer.items) > 2
        return answer.items if vector or not _may_be_interval(answer) else None
    if isinstance(answer, Listing):
        return answer.items if answer.joined == "bare" and len(answer.items) > 1 else None
    if not isinstance(answer, Grid):
        return None
    if len(answer.rows) == 1:
        return answer.rows[0]
    if all(len(row) == 1 for row in answer.rows):
        return tuple(row[0] for row in answer.rows)
    return None


def _rows(answer: BracketedTuple) -> Grid | None:
    """`[[1, 2], [3, 4]]` as a matrix."""
    rows = [item.items for item in answer.items if isinstance(item, BracketedTuple) and item.opening == "["]
    whole = answer.opening == "[" and len(rows) == len(answer.items) and len({len(row) for row in rows}) == 1
    return Grid(tuple(rows)) if whole else None


def _may_be_interval(answer: BracketedTuple) -> bool:
    """True if two ends in brackets are in order; `[2, 1]` is a list."""
    try:
        region(answer)
    except Unreadable:
        return any(symbols(node) for node in nodes_of(answer))
    return True


def _brackets_agree(gold: BracketedTuple, given: BracketedTuple) -> bool:
    """Brackets matter where they may be those of an interval."""
    brackets = [(one.opening, one.closing) for one in (gold, given)]
    if len(gold.items) != 2 or not (_may_be_interval(gold) or _may_be_interval(given)):
        return True
    plain = [("(", ")") if pair == (r"\langle", r"\rangle") else pair for pair in brackets]
    return plain[0] == plain[1]


def _same_listing(gold: Listing, given: Listing, rules: QuantityRules) -> bool:
    ours, theirs = gold.items, given.items
    if _names(gold) and not _names(given):
        return _pairwise(ours, theirs, rules)
    once = "bare" in (gold.joined, given.joined) and "set" not in (gold.joined, given.joined)
    alike = _matched(ours, theirs, rules) if once else _each_in_the_other(ours, theirs, rules)
    return alike or _same_numbers_if_conditions(gold, given, rules)


def _matched(gold: Sequence[Answer], given: Sequence[Answer], rules: QuantityRules) -> bool:
    """True if each is equal to one of the other, and none is left: `2, 2, 3` is not `2, 3`."""
    left = list(given)
    for right in gold:
        at = next((at for at, answer in enumerate(left) if same_answer(right, answer, rules)), None)
        if at is None:
            return False
        del left[at]
    return not left


def _names(answer: Listing) -> bool:
    """True if it gives values to different names, as in `x = 1, y = 2`."""
    names = [item.sides[0].name for item in answer.items if isinstance(item, Relation) and item.operators == ("=",)]
    return len(names) == len(answer.items) > 1 and None not in names and len(set(names)) == len(names)


def _is_condition(answer: Answer) -> bool:
    """True if it says where numbers lie, in inequalities or intervals."""
    items = answer.items if isinstance(answer, Listing) else ()
    return any(
        isinstance(item, BracketedTuple) or (isinstance(item, Relation) and item.operators != ("=",)) for item in items
    )


def _same_numbers_if_conditions(gold: Listing, given: Listing, rules: QuantityRules) -> bool:
    return (_is_condition(gold) or _is_condition(given)) and _same_numbers(gold, given, rules)


def _same_numbers(gold: Answer, given: Answer, rules: QuantityRules) -> bool:
    """True if the answers are one set of real numbers. A point in no braces is not taken for one."""
    if not any(isinstance(one, Combination | RealLine | BracketedTuple | Relation | Listing) for one in (gold, given)):
        return False
    try:
        return same_region(region(gold), region(given), tolerance=rules.tolerance)
    except Unreadable:
        return False


def _same_relation(gold: Answer, given: Answer, rules: QuantityRules) -> bool:
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


def _same_relations(gold: Relation, given: Relation, rules: QuantityRules) -> bool:
    right, answer = (solved_value(one, lambda a, b: same_answer(a, b, rules)) for one in (gold, given))
    if right is not None and answer is not None:
        if names_agree(gold, given):
            return same_answer(right, answer, rules)
        return proportional(gold, given)
    if same_inequality(gold, given):
        return True
    variables = [frozenset(name for node in nodes_of(one) for name in symbols(node)) for one in (gold, given)]
    return variables[0] == variables[1] and _same_numbers(gold, given, rules)


def _same_letters(gold: Answer, given: Answer) -> bool:
    """True if the same options are chosen: `ACD` and `A, C, D`."""
    ours, theirs = _letters(gold), _letters(given)
    return len(ours) > 1 and ours == theirs


def _letters(answer: Answer) -> str:
    """The different capital letters from A to J that it is made of, in order; empty if it is something else."""
    nodes = [item.node for item in members(answer) if isinstance(item, Scalar) and item.unit is None]
    found = [letter for node in nodes for letter in _factors(node)]
    chosen = len(nodes) == len(members(answer)) and len(set(found)) == len(found) and set(found) <= set("ABCDEFGHIJ")
    return "".join(sorted(found)) if chosen else ""


def _factors(node: Node) -> Sequence[str]:
    """The names of a product of names."""
    if isinstance(node, Symbol):
        return (node.name,)
    if isinstance(node, FunctionCall) and node.name == "*":
        return [name for argument in node.arguments for name in _factors(argument)]
    return ("",)


def _same_text(gold: Answer, given: Answer, rules: QuantityRules) -> bool:
    if isinstance(gold, Text) and isinstance(given, Text):
        return gold.words == given.words
    text, other = (gold, given) if isinstance(gold, Text) else (given, gold)
    assert isinstance(text, Text)
    number = number_of(text.words)
    if number is None or not isinstance(other, Scalar):
        return False
    scalar = Scalar(Number(number))
    return same_quantity(scalar, other, rules) if text is gold else same_quantity(other, scalar, rules)


def _same_ratio(gold: Answer, given: Answer, rules: QuantityRules) -> bool:
    if isinstance(gold, Ratio) and isinstance(given, Ratio) and gold.clock and given.clock and _same_time(gold, given):
        return True
    ours, theirs = _ratio_parts(gold), _ratio_parts(given)
    if ours is None or theirs is None or len(ours) != len(theirs) or not _units_agree(gold, given):
        return False
    if isinstance(gold, Ratio) and gold.clock:
        if isinstance(given, Ratio) and given.clock:
            return ours == theirs
        if not _is_reduced(ours):
            return False  # 12:30 is a time, as no ratio is written so; 11:21 may be one
    return all(
        same_expression(
            FunctionCall("*", (right, theirs[0])), FunctionCall("*", (answer, ours[0])), tolerance=rules.tolerance
        )
        for right, answer in zip(ours[1:], theirs[1:], strict=True)
    )


def _same_time(gold: Ratio, given: Ratio) -> bool:
    """True if 20:34 is 8:34 p.m. and 20:34:00. Without a.m. or p.m. only what no morning has is known."""
    ours, theirs = _seconds(gold), _seconds(given)
    return ours is not None and ours == theirs


def _seconds(time: Ratio) -> Fraction | None:
    """Since midnight; None if it may be meant in the morning and in the afternoon."""
    parts = [part.node.value for part in time.parts if isinstance(part, Scalar) and isinstance(part.node, Number)]
    last = time.parts[-1]
    noon = last.unit.words if isinstance(last, Scalar) and last.unit is not None else frozenset[str]()
    hours, minutes, seconds = (*parts, Fraction(0))[:3] if len(parts) in (2, 3) else (Fraction(0),) * 3
    if not noon <= {"am", "pm"} or len(parts) != len(time.parts) or (not noon and 1 <= hours <= 12):
        return None
    if noon:
        hours = hours % 12 + (12 if "pm" in noon else 0)
    return 3600 * hours + 60 * minutes + seconds


def _is_reduced(parts: Sequence[Node]) -> bool:
    wholes = [part.value.numerator for part in parts if isinstance(part, Number)]
    return all(wholes) and math.gcd(*wholes) == 1


def _units_agree(gold: Answer, given: Answer) -> bool:
    """True if the last parts agree: 3:30 PM is not 3:30 AM."""
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
