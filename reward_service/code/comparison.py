"""Whether an output or a returned value is the right one. What comes from a solution is never hashed or evaluated here.

Values are compared in their encoded form (`harness.plain`): no hash of a value is taken, since a solution could choose
values that all have the same one.
"""

import hashlib
import itertools
import math

from reward_service.code.arguments import OutputComparison, Tolerance
from reward_service.code.harness.plain import Json

# Digits that a float or its exact decimal form can need; longer tokens are compared as text.
_LONGEST_NUMBER = 400
# What takes longer to compare than other requests should wait for: it is done in a thread.
LARGE_BYTES = 1 << 15

_TYPES = {"d": "dict", "s": "set", "f": "set"}


def outputs_equal(actual: str, expected: str, *, compare: OutputComparison, tolerance: Tolerance) -> bool:
    """Whether a program has printed what is right."""
    if compare == "exact":
        return actual == expected
    if compare == "lines":
        return _lines(actual) == _lines(expected)
    if compare == "tokens":
        return actual.split() == expected.split()
    pairs = itertools.zip_longest(actual.split(), expected.split())
    return all(a is not None and b is not None and _tokens_equal(a, b, tolerance) for a, b in pairs)


def values_equal(actual: Json, expected: Json, *, tuples_are_lists: bool, tolerance: Tolerance | None) -> bool:
    """Whether two encoded values are equal, as Python has it but for NaN, which equals itself.

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
        return _TYPES.get(tag, "other"), body


def _number(value: Json) -> int | float | None:
    """An encoded number; a bool is one, as in Python."""
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, dict) and isinstance(text := value.get("i"), str):
        try:
            return int(text, 16)
        except ValueError:
            return None
    return None


def _numbers_equal(actual: int | float, expected: int | float, tolerance: Tolerance | None) -> bool:
    if actual == expected or (actual != actual and expected != expected):
        return True
    if tolerance is None or (isinstance(actual, int) and isinstance(expected, int)):
        return False
    try:
        return math.isclose(actual, expected, rel_tol=tolerance.relative, abs_tol=tolerance.absolute)
    except OverflowError:  # an integer beyond all floats
        return False


def _tokens_equal(actual: str, expected: str, tolerance: Tolerance) -> bool:
    if actual == expected:
        return True
    left, right = _parsed(actual), _parsed(expected)
    return left is not None and right is not None and _numbers_equal(left, right, tolerance)


def _parsed(token: str) -> float | None:
    if len(token) > _LONGEST_NUMBER or "_" in token:
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
        # Of equal numbers one may be an integer and the other a float.
        whole = number if isinstance(number, int) else int(number) if number.is_integer() else None
        return b"number" + (repr(number) if whole is None else hex(whole)).encode()
    if isinstance(value, str):
        return b"text" + value.encode(errors="surrogatepass")
    if isinstance(value, list):
        return b"list" + b"".join(map(_digest, value))
    if isinstance(value, dict) and len(value) == 1:
        ((tag, body),) = value.items()
        parts = body if isinstance(body, list) else [body]
        if tag in ("s", "f"):
            return b"set" + b"".join(sorted(map(_digest, parts)))
        return tag.encode(errors="surrogatepass") + b":" + b"".join(map(_digest, parts))
    return b"none" if value is None else b"no value"
