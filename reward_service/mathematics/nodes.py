"""What expressions are made of."""

from dataclasses import dataclass
from fractions import Fraction


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
