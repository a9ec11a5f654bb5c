"""What answers are made of: expressions, and what holds them together; and how much work one answer may ask for."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeAlias

from reward_service.verifiers.mathematics.units import Unit


@dataclass(frozen=True, slots=True)
class Number:
    """A number as written; `decimal`: with a decimal point, so that it may stand for a value that has no end."""

    value: Fraction
    decimal: bool = False


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable, with its subscript and primes."""

    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """An operation or function of its arguments."""

    name: str
    arguments: tuple["Node", ...] = ()


Node = Number | Symbol | Call


MAX_CHARS = 4000
MAX_TOKENS = 800
MAX_DEPTH = 60
MAX_OPERATIONS = 150  # of one expression
MAX_DIGITS = 1000  # of a number as written
MAX_WHOLE_BITS = 1 << 17  # of a whole number in the computation
MAX_FRACTION_BITS = 1 << 11  # of a denominator; beyond it a fraction is computed to 100 digits
MAX_MAGNITUDE_BITS = 1 << 20  # of a power to 100 digits; 9^9^9 is above it
MAX_FACTORIAL = 5000
MAX_ANGLE_BITS = 512  # of the argument of a periodic function
MAX_ITEMS = 32  # of a list, a set, a matrix
MAX_SIGNS = 8  # parts of an answer with a plus-minus sign


class OverLimits(Exception):
    """The answer asks for more work than any answer of ours needs."""


class Unreadable(Exception):
    """This is not the notation that we read; another reader may know it."""


class Undefined(Exception):
    """The expression has no value there: a division by zero, a logarithm of zero."""


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
