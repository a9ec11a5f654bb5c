"""What expressions are made of.

How much work one answer may ask for. Beyond it an answer is not computed at all.
"""

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
