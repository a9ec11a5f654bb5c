"""Answers as they are read: expressions, units, and what holds them together; how much work one answer may ask for."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeAlias

from reward_service.verifiers.mathematics.latex import modulus_of
from reward_service.verifiers.mathematics.tokens import Token

PERCENT = "percent"
DEGREE = "degree"

# dimension: the names of one unit, and its size in the dimension's first unit
_TABLE: dict[str, tuple[tuple[str, str], ...]] = {
    "length": (
        ("m meter metre meters metres", "1"),
        ("km kilometer kilometre kilometers kilometres", "1000"),
        ("dm decimeter decimetre decimeters", "1/10"),
        ("cm centimeter centimetre centimeters centimetres", "1/100"),
        ("mm millimeter millimetre millimeters millimetres", "1/1000"),
        ("nm nanometer nanometers", "1/1000000000"),
        ("mi mile miles", "1609.344"),
        ("yd yard yards yds", "0.9144"),
        ("ft foot feet", "0.3048"),
        ("inch inches in", "0.0254"),
    ),
    "mass": (
        ("g gram grams gm", "1"),
        ("kg kilogram kilograms kgs", "1000"),
        ("mg milligram milligrams", "1/1000"),
        ("t tonne tonnes", "1000000"),
        ("lb lbs pound pounds", "453.59237"),
        ("oz ounce ounces", "28.349523125"),
    ),
    "time": (
        ("s sec secs second seconds", "1"),
        ("ms millisecond milliseconds", "1/1000"),
        ("min mins minute minutes", "60"),
        ("h hr hrs hour hours", "3600"),
        ("day days", "86400"),
        ("week weeks", "604800"),
        ("month months", "2629800"),
        ("yr yrs year years", "31557600"),
    ),
    "volume": (
        ("l L liter litre liters litres", "1"),
        ("ml mL milliliter milliliters millilitre millilitres", "1/1000"),
        ("gal gallon gallons", "3.785411784"),
    ),
    "money": (("$ dollar dollars usd USD", "1"), ("cent cents ¢", "1/100")),
    "euro": (("€ euro euros EUR", "1"),),
    "sterling": (("£ GBP", "1"),),
    "rupee": (("₹ rupee rupees Rs rs INR", "1"),),
    "yen": (("¥ yen JPY", "1"),),
    "angle": ((f"° {DEGREE} degrees deg", "1"), ("rad radian radians", "0")),
    "ratio": ((f"% {PERCENT} percentage pct", "1"),),
    "force": (("N newton newtons", "1"),),
    "energy": (("J joule joules", "1"), ("kJ kilojoule kilojoules", "1000")),
    "power": (("W watt watts", "1"), ("kW kilowatt kilowatts", "1000")),
    "electric": (("V volt volts", "1"),),
    "current": (("A amp amps ampere amperes", "1"),),
    "resistance": ((r"\Omega ohm ohms", "1"),),
    "frequency": (("Hz hertz", "1"),),
    "amount": (("mol mole moles", "1"),),
    "temperature": (("K kelvin", "1"),),
}
_COMPOUND = {"mph": ("mi", "/", "h"), "kmh": ("km", "/", "h"), "kph": ("km", "/", "h"), "kmph": ("km", "/", "h")}
_NOON = frozenset({"am", "pm"})
_SQUARES = {"sq": 2, "square": 2, "cubic": 3, "cu": 3}
_POWERS = {"squared": 2, "cubed": 3}
_FILLERS = frozenset({"of", "the", "a", "an", "total", "about", "each"})
_MARKS = frozenset("*.()-'")
_VERDICTS = frozenset({"is", "are", "not", "wrong", "incorrect", "false", "impossible"})
# Letters that plainly written may also be variables.
_UNIT_LETTERS = frozenset("mgshLNJWVAK")
_SIGNS = frozenset({"°", "%", r"\$", "€", "£", "¥", "₹", "¢"})
CURRENCY = frozenset({r"\$", "€", "£", "¥", "₹"})
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


@dataclass(frozen=True, slots=True)
class _KnownName:
    name: str
    dimension: str
    size: Fraction


_KNOWN = {
    alias: _KnownName(names.split()[0], dimension, Fraction(size))
    for dimension, rows in _TABLE.items()
    for names, size in rows
    for alias in names.split()
}


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Known units with their powers, and other words (what is counted) in the singular."""

    powers: frozenset[tuple[str, int]] = frozenset()
    words: frozenset[str] = frozenset()

    def is_only(self, name: str) -> bool:
        """True if it is that unit alone."""
        return self.powers == {(_KNOWN[name].name, 1)} and not self.words

    @property
    def modulus(self) -> int | None:
        """The whole number n of `mod n`, which notation writes as a word."""
        if self.powers or len(self.words) != 1:
            return None
        return modulus_of(next(iter(self.words)))

    def agrees_with(self, other: "Unit") -> bool:
        """The same known units; of the other words one says no more than the other."""
        return self.powers == other.powers and (self.words <= other.words or other.words <= self.words)

    def size(self) -> tuple[Fraction, frozenset[tuple[str, int]]] | None:
        """In the first units of its dimensions, and those; None where that is not known."""
        size = Fraction(1)
        dimensions: dict[str, int] = {}
        for name, power in self.powers:
            known = _KNOWN[name]
            if known.size == 0:
                return None
            size *= known.size**power
            # A litre is a thousandth of a cubic metre.
            dimension, times = ("length", 3) if known.dimension == "volume" else (known.dimension, 1)
            size *= Fraction(1, 1000) ** power if known.dimension == "volume" else 1
            dimensions[dimension] = dimensions.get(dimension, 0) + times * power
        return size, frozenset((name, power) for name, power in dimensions.items() if power)


def starts_unit(token: Token, *, lenient: bool) -> bool:
    """True if a unit may begin here, after a value. `lenient`: a letter right after a digit may be one: `5m`."""
    if token.text in _SIGNS:
        return True
    if token.kind == "letter":
        return token.roman or (token.text in _UNIT_LETTERS and (token.spaced or lenient))
    if token.kind != "word":
        return token.roman and token.text == r"\Omega"
    known = token.text in _KNOWN or token.text in _COMPOUND or token.text in _SQUARES or token.text.lower() in _NOON
    foreign = not token.text.isascii()
    return token.roman or known or foreign or (token.spaced and len(token.text) >= 3) or len(token.text) > 4


def parse_unit(tokens: Sequence[Token]) -> Unit | None:
    """The unit that all the tokens make, or None."""
    powers: dict[str, int] = {}
    words: set[str] = set()
    sign, pending = 1, 1
    texts = [part for token in tokens for part in _COMPOUND.get(token.text, (token.text,))]
    at = 0
    while at < len(texts):
        text = texts[at].replace(r"\$", "$")
        at += 1
        if text.lower() in _VERDICTS:
            return None
        if text in ("/", "per"):
            sign = -1
        elif text in _SQUARES:
            pending = _SQUARES[text]
        elif (
            text in _MARKS or text.lower() in _FILLERS or (text == "in" and texts[at : at + 1] != ["^"] and texts[at:])
        ):
            continue
        elif text in _KNOWN:
            power, at = _power_after(texts, at)
            name = _KNOWN[text].name
            powers[name] = powers.get(name, 0) + sign * power * pending
            pending = 1
        elif text.isalpha():
            words.add(_singular(text))
        else:
            return None
    return Unit(powers=frozenset(powers.items()), words=frozenset(words)) if powers or words else None


def _power_after(texts: Sequence[str], at: int) -> tuple[int, int]:
    """The power that stands there, and where it ends."""
    if at < len(texts) and texts[at] in _POWERS:
        return _POWERS[texts[at]], at + 1
    if at + 1 >= len(texts) or texts[at] != "^":
        return 1, at
    rest = "".join(texts[at + 1 : at + 5]).replace("(", "{")
    digits = rest.strip("{").partition("}")[0] if rest.startswith("{") else texts[at + 1]
    if not digits.lstrip("-").isdigit() or len(digits) > 2:
        return 1, at
    length = len(digits.lstrip("-")[:1]) + digits.startswith("-") + (2 if rest.startswith("{") else 0)
    return int(digits), at + 1 + length


def _singular(word: str) -> str:
    word = word.lower()
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 3 else word


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
class FunctionCall:
    """An operation or function of its arguments."""

    name: str
    arguments: tuple["Node", ...] = ()


Node = Number | Symbol | FunctionCall


class OverLimits(Exception):
    """The answer asks for more work than any answer of ours needs."""


class Unreadable(Exception):
    """This is not the notation that we read; another reader may know it."""


class UndefinedValue(Exception):
    """The expression has no value there: a division by zero, a logarithm of zero."""


SetOperator = Literal["union", "intersection", "difference"]


@dataclass(frozen=True, slots=True)
class Text:
    """Words, in lower case."""

    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Scalar:
    """An expression. `digits_base`: the base in which it says that its digits are written."""

    node: Node
    unit: Unit | None = None
    digits_base: str | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """Several answers in no order. `joined`: in braces, by commas and the like, or by `or` alone."""

    items: tuple["Answer", ...]
    joined: Literal["set", "bare", "or"] = "bare"


@dataclass(frozen=True, slots=True)
class BracketedTuple:
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
    """A side of a relation. `name`: what it is if it is only a name, such as x, f(x) or an area in words."""

    answer: "Answer | None"
    name: str | None


@dataclass(frozen=True, slots=True)
class Relation:
    """An equation, an inequality or a chain of them: one more side than operators."""

    sides: tuple[Side, ...]
    operators: tuple[str, ...]


Answer: TypeAlias = Text | Scalar | Listing | BracketedTuple | Combination | RealLine | Grid | Ratio | Relation
