"""Units after a value: their names, what they measure, and how large they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from reward_service.verifiers.mathematics.tokens import Token, modulus_of

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


@dataclass(frozen=True, slots=True)
class _Known:
    name: str
    dimension: str
    size: Fraction


_KNOWN = {
    alias: _Known(names.split()[0], dimension, Fraction(size))
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
        """Whether it is that unit alone."""
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
    """Whether a unit may begin here, after a value. `lenient`: a letter right after a digit may be one: `5m`."""
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
