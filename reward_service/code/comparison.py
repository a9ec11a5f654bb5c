"""Compares an output or a returned value with the right one. What comes from a solution is never hashed or evaluated
here.

Values are compared in their encoded form (`harness.plain`): no hash of a value is taken, since a solution could choose
values that all have the same one.
"""

import cmath
import hashlib
import itertools
import math
import re
from decimal import Decimal
from fractions import Fraction

from reward_service.code.arguments import OutputComparison, Tolerance
from reward_service.code.inside.plain import Json

# Digits that a float or its exact decimal form can need; longer tokens are compared as text.
_MAX_NUMBER = 400
# Fractions and decimals beyond that are none that a test expects, and would take long to bring to a common form.
_MAX_EXACT = 1500
# What takes longer to compare than other requests should wait for: it is done in a thread.
LARGE_BYTES = 1 << 15

_INTEGER = re.compile(r"[+-]?[0-9]+")
_TYPES = {"d": "dict", "s": "set", "f": "set", "b": "bytes", "B": "bytes", "r": "range"}

# Any number that Python compares with any other.
_Number = int | float | complex | Decimal | Fraction


def outputs_equal(actual: str, expected: str, *, compare: OutputComparison, tolerance: Tolerance) -> bool:
    """True if a program has printed what is right."""
    if compare == "exact":
        return actual == expected
    if compare == "lines":
        return _lines(actual) == _lines(expected)
    if compare == "tokens":
        return actual.split() == expected.split()
    pairs = itertools.zip_longest(actual.split(), expected.split())
    return all(a is not None and b is not None and _tokens_equal(a, b, tolerance) for a, b in pairs)


def values_equal(actual: Json, expected: Json, *, tuples_are_lists: bool, tolerance: Tolerance | None) -> bool:
    """True if two encoded values are equal, as Python has it but for NaN, which equals itself.

    The tolerance holds for all numbers but the elements of sets and the keys of dicts.
    """
    try:
        if actual == expected:  # the usual case, at once
            return True
        return _Comparison(tuples_are_lists=tuples_are_lists, tolerance=tolerance).equal(actual, expected)
    except RecursionError:  # no expected value is that deep
        return False


class _Comparison:
    def __init__(self, *, tuples_are_lists: bool, tolerance: Tolerance | None) -> None:
        self._tuples_are_lists = tuples_are_lists
        self._tolerance = tolerance

    def equal(self, actual: Json, expected: Json) -> bool:
        numbers = _number(actual), _number(expected)
        if numbers[0] is not None and numbers[1] is not None:
            return _numbers_equal(numbers[0], numbers[1], self._tolerance)
        actual_tag, actual_body = self._tagged(actual)
        expected_tag, expected_body = self._tagged(expected)
        if actual_tag != expected_tag:
            return False
        if actual_tag in ("list", "tuple"):
            return self._sequences(actual_body, expected_body)
        if actual_tag == "dict":
            return self._dicts(actual_body, expected_body)
        if actual_tag == "set":
            return self._sets(actual_body, expected_body)
        if actual_tag == "deque":
            return self._sequences(actual_body, expected_body)
        return _digest(actual) == _digest(expected)

    def _sequences(self, actual: Json, expected: Json) -> bool:
        if not isinstance(actual, list) or not isinstance(expected, list) or len(actual) != len(expected):
            return False
        return all(map(self.equal, actual, expected))

    def _dicts(self, actual: Json, expected: Json) -> bool:
        left, right = self._by_key(actual), self._by_key(expected)
        return left.keys() == right.keys() and all(self.equal(value, right[key]) for key, value in left.items())

    def _sets(self, actual: Json, expected: Json) -> bool:
        left, right = (body if isinstance(body, list) else [] for body in (actual, expected))
        return {_digest(part) for part in left} == {_digest(part) for part in right}

    def _by_key(self, pairs: Json) -> dict[bytes, Json]:
        listed = pairs if isinstance(pairs, list) else []
        return {_digest(pair[0]): pair[1] for pair in listed if isinstance(pair, list) and len(pair) == 2}

    def _tagged(self, value: Json) -> tuple[str, Json]:
        """A value's type and content, where types that can be equal count as one."""
        if isinstance(value, list):
            return "list", value
        if not isinstance(value, dict) or len(value) != 1:
            return "other", value
        ((tag, body),) = value.items()
        if tag == "t":
            return "list" if self._tuples_are_lists else "tuple", body
        if tag == "C" and isinstance(body, list) and len(body) == 2:
            return "dict", body[1]
        if tag == "C" and isinstance(body, list) and len(body) == 3:
            return "deque", body[1]
        return _TYPES.get(tag, "other"), body


def _number(value: Json) -> _Number | None:
    """An encoded number; a bool is one, as in Python."""
    if isinstance(value, bool | int | float):
        return value
    if not isinstance(value, dict) or len(value) != 1:
        return None
    ((tag, body),) = value.items()
    try:
        return _tagged_number(tag, body)
    except (ValueError, ArithmeticError):
        return None


def _tagged_number(tag: str, body: Json) -> _Number | None:
    if tag == "i" and isinstance(body, str):
        return int(body, 16)
    if tag == "D" and isinstance(body, str) and len(body) <= _MAX_EXACT:
        decimal = Decimal(body)
        return None if decimal.is_snan() else decimal
    if not isinstance(body, list) or len(body) != 2:
        return None
    first, second = map(_number, body)
    if tag == "c" and isinstance(first, int | float) and isinstance(second, int | float):
        return complex(first, second)
    if tag == "F" and isinstance(first, int) and isinstance(second, int) and max(map(_bits, (first, second))) < 1 << 14:
        return Fraction(first, second)
    return None


def _bits(number: int) -> int:
    return number.bit_length()


def _numbers_equal(actual: _Number, expected: _Number, tolerance: Tolerance | None) -> bool:
    if actual == expected or (actual != actual and expected != expected):
        return True
    if tolerance is None or (isinstance(actual, int) and isinstance(expected, int)):
        return False
    try:
        return cmath.isclose(complex(actual), complex(expected), rel_tol=tolerance.relative, abs_tol=tolerance.absolute)
    except OverflowError:  # a number beyond all floats
        return False


def _exact(number: _Number) -> bytes:
    """The same for equal numbers, of whatever types."""
    if isinstance(number, complex):
        if number.imag == 0:
            return _exact(number.real)
        return b"complex" + _exact(number.real) + b"," + _exact(number.imag)
    if isinstance(number, Decimal):
        if number.is_finite() and abs(number.adjusted()) > _MAX_EXACT:
            return str(number.normalize()).encode()  # beyond all floats, and not worth the digits
        number = Fraction(number) if number.is_finite() else float(number)
    if isinstance(number, float) and not math.isfinite(number):
        return repr(number).encode()
    numerator, denominator = number.as_integer_ratio()
    return f"{numerator:x}/{denominator:x}".encode()


def _tokens_equal(actual: str, expected: str, tolerance: Tolerance) -> bool:
    if actual == expected:
        return True
    if _INTEGER.fullmatch(actual) and _INTEGER.fullmatch(expected):
        return _plain_integer(actual) == _plain_integer(expected)
    left, right = _parsed(actual), _parsed(expected)
    return left is not None and right is not None and _numbers_equal(left, right, tolerance)


def _plain_integer(token: str) -> str:
    """Without a needless sign and zeros: as text, since it may have any number of digits."""
    digits = token.lstrip("+-").lstrip("0")
    return f"-{digits}" if token[0] == "-" and digits else digits


def _parsed(token: str) -> float | None:
    if len(token) > _MAX_NUMBER or "_" in token:
        return None
    try:
        return float(token)
    except ValueError:
        return None


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _digest(value: Json) -> bytes:
    """The same for all encodings of equal values, and for no others. It takes time in proportion to the size."""
    return hashlib.blake2b(_content(value), digest_size=20).digest()


def _content(value: Json) -> bytes:
    number = _number(value)
    if number is not None:
        return b"number" + _exact(number)
    if isinstance(value, str):
        return b"text" + value.encode(errors="surrogatepass")
    if isinstance(value, list):
        return b"list" + b"".join(map(_digest, value))
    if isinstance(value, dict) and len(value) == 1:
        ((tag, body),) = value.items()
        parts: list[Json] = list(body) if isinstance(body, list) else [body]
        if tag in ("s", "f"):
            return b"set" + b"".join(sorted(set(map(_digest, parts))))
        if tag == "r":
            return b"range" + b"".join(map(_digest, _range_parts(parts)))
        tag = _TYPES.get(tag, tag)
        return tag.encode(errors="surrogatepass") + b":" + b"".join(map(_digest, parts))
    return b"none" if value is None else b"no value"


def _range_parts(parts: list[Json]) -> list[Json]:
    """The identity of a range: two are equal if they hold the same numbers."""
    numbers = [_number(part) for part in parts]
    try:
        start, stop, step = (number for number in numbers if isinstance(number, int))
        held = range(start, stop, step)
    except ValueError:
        return parts
    # Its length may be beyond what len() tells.
    return [] if not held else [hex(start)] if held[0] == held[-1] else [hex(start), hex(step), hex(held[-1])]
