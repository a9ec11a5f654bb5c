"""What kinds of answers there are."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from reward_service.verifiers.mathematics.nodes import Node
from reward_service.verifiers.mathematics.units import Unit

SetOperator = Literal["union", "intersection", "difference"]


@dataclass(frozen=True, slots=True)
class Text:
    """Words, in lower case."""

    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Scalar:
    """One expression. `digits_base`: the base in which it says that its digits are written."""

    node: Node
    unit: Unit | None = None
    digits_base: str | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """Several answers in no order. `joined`: in braces, by commas and the like, or by `or` alone."""

    items: tuple["Answer", ...]
    joined: Literal["set", "bare", "or"] = "bare"


@dataclass(frozen=True, slots=True)
class Ordered:
    """A tuple, a vector, or the ends of an interval, in its brackets."""

    items: tuple["Answer", ...]
    opening: str
    closing: str


@dataclass(frozen=True, slots=True)
class Combination:
    """Sets of numbers that are put together, or one without the other."""

    operator: SetOperator
    items: tuple["Answer", ...]


@dataclass(frozen=True, slots=True)
class RealLine:
    """All real numbers."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A matrix."""

    rows: tuple[tuple["Answer", ...], ...]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Parts as in 2 : 3 : 4. `clock`: written as times are, as in 12:30."""

    parts: tuple["Answer", ...]
    clock: bool = False


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a relation. `name`: what it is if it is only a name, such as x, f(x) or an area in words."""

    answer: "Answer | None"
    name: str | None


@dataclass(frozen=True, slots=True)
class Relation:
    """An equation, an inequality or a chain of them: one more side than operators."""

    sides: tuple[Side, ...]
    operators: tuple[str, ...]


Answer: TypeAlias = Text | Scalar | Listing | Ordered | Combination | RealLine | Grid | Ratio | Relation
