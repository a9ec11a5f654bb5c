"""Values as JSON: exact builtin types cross whole, everything else by a rule of the caller. Decoding runs no code.

A scalar and a list are themselves; anything else is an object with one key, which says its type:

    i: integer beyond 2**53 (hex)   t: tuple   s: set   f: frozenset   d: dict (pairs)   b, B: bytes, bytearray (hex)
    c: complex   r: range   l: slice   e: Ellipsis   n: a builtin type   D: Decimal   F: Fraction
    T: date, time, datetime, timedelta   C: Counter, OrderedDict, defaultdict, deque
"""

import builtins
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

MAX_DEPTH = 150
MAX_NODES = 1_000_000

_EXACT_INT = 1 << 53
_SCALARS = frozenset({type(None), bool, float, str})
_SEQUENCES: Mapping[type, str] = {tuple: "t", set: "s", frozenset: "f"}
_SEQUENCE_TAGS: Mapping[str, Callable[[list[object]], object]] = {"t": tuple, "s": set, "f": frozenset}
# Types that a value can name. None of them runs code when it is called.
_TYPES = (
    *("object", "bool", "int", "float", "complex", "str", "bytes", "bytearray", "list", "tuple", "set", "frozenset"),
    *("dict", "range", "slice", "enumerate", "zip", "map", "filter", "reversed"),
)
_TIMES = ("date", "datetime", "time", "timedelta")


class NotPlain(Exception):
    """A value that cannot cross, or a message that is no value."""


class PlainEncoder:
    """Values to JSON. `other` says how to write what is not plain; it raises NotPlain if it cannot."""

    def __init__(self, other: Callable[[object], Json]) -> None:
        self._other = other
        self._nodes = 0

    def encode(self, value: object, *, depth: int = 0) -> Json:
        """Raises NotPlain for what is too deep (cyclic, say) or too large."""
        self._nodes += 1
        if depth > MAX_DEPTH or self._nodes > MAX_NODES:
            raise NotPlain("the value is cyclic, too deep or too large")
        kind = type(value)
        if kind in _SCALARS:
            return value  # type: ignore[return-value]
        if kind is int:
            assert isinstance(value, int)
            return value if -_EXACT_INT <= value <= _EXACT_INT else {"i": hex(value)}
        if kind is list:
            return self._all(value, depth)
        if kind is dict:
            assert isinstance(value, dict)
            return {"d": self._pairs(value, depth)}
        if kind in _SEQUENCES:
            return {_SEQUENCES[kind]: self._all(value, depth)}
        small = _small(value)
        return small if small is not None else self._rare(value, depth)

    def _all(self, values: object, depth: int) -> list[Json]:
        assert isinstance(values, list | tuple | set | frozenset)
        return [self.encode(part, depth=depth + 1) for part in values]

    def _pairs(self, value: Mapping[object, object], depth: int) -> list[Json]:
        return [[self.encode(k, depth=depth + 1), self.encode(v, depth=depth + 1)] for k, v in value.items()]

    def _rare(self, value: object, depth: int) -> Json:
        """Types of the standard library; their modules are not imported to find that a value is none of them."""
        name = type(value).__name__
        if _is_of("decimal", value, "Decimal"):
            return {"D": str(value)}
        if _is_of("fractions", value, "Fraction"):
            parts: list[object] = [getattr(value, "numerator", 0), getattr(value, "denominator", 1)]
            return {"F": self._all(parts, depth)}
        if any(_is_of("datetime", value, kind) for kind in _TIMES) and getattr(value, "tzinfo", None) is None:
            return {"T": [name, *_time_fields(value)]}
        if any(_is_of("collections", value, kind) for kind in ("Counter", "OrderedDict", "defaultdict")):
            assert isinstance(value, dict)
            return {"C": [name, self._pairs(value, depth)]}
        if _is_of("collections", value, "deque"):
            return {"C": [name, self._all(_listed(value), depth), getattr(value, "maxlen", None)]}
        return self._other(value)


class PlainDecoder:
    """JSON to values. `other` reads what has a tag that is not one of ours; it raises NotPlain if it cannot."""

    def __init__(self, other: Callable[[str, Json], object]) -> None:
        self._other = other
        self._readers: Mapping[str, Callable[[Json], object]] = {
            "i": lambda body: int(_text(body), 16),
            "d": lambda body: dict(self._pairs(body)),
            "b": lambda body: bytes.fromhex(_text(body)),
            "B": lambda body: bytearray.fromhex(_text(body)),
            "c": lambda body: complex(*map(_number, _items(body))),
            "r": lambda body: range(*map(_integer, self._all(body))),
            "l": lambda body: slice(*self._all(body)),
            "e": lambda body: ...,
            "n": _type_named,
            "D": lambda body: _of("decimal", "Decimal")(_text(body)),
            "F": lambda body: _of("fractions", "Fraction")(*map(_integer, self._all(body))),
            "T": _time,
            "C": self._collection,
        }

    def decode(self, given: Json) -> object:
        """Raises NotPlain for what is no value."""
        try:
            return self._decode(given)
        except (TypeError, ValueError, ArithmeticError, IndexError, RecursionError) as error:
            raise NotPlain(f"not a value: {type(error).__name__}") from error

    def _decode(self, given: Json) -> object:
        if isinstance(given, list):
            return self._all(given)
        if not isinstance(given, dict):
            return given
        if len(given) != 1:
            raise NotPlain("an object of a value has one key")
        ((tag, body),) = given.items()
        sequence = _SEQUENCE_TAGS.get(tag)
        if sequence is not None:
            return sequence(self._all(body))
        reader = self._readers.get(tag)
        return reader(body) if reader is not None else self._other(tag, body)

    def _all(self, body: Json) -> list[object]:
        return [self._decode(part) for part in _items(body)]

    def _pairs(self, body: Json) -> list[tuple[object, object]]:
        return [(self._decode(key), self._decode(value)) for key, value in map(_items, _items(body))]

    def _collection(self, body: Json) -> object:
        name, content, *rest = _items(body)
        if name == "deque":
            return _of("collections", "deque")(self._all(content), *map(self._decode, rest))
        pairs = self._pairs(content)
        if name == "Counter":
            return _of("collections", "Counter")(dict(pairs))
        if name == "OrderedDict":
            return _of("collections", "OrderedDict")(pairs)
        return _of("collections", "defaultdict")(None, pairs)


def content_of(value: object, kinds: Iterable[type]) -> object | None:
    """A value of a subclass as the first of the builtin types that it is of; None if it is of none."""
    for kind in kinds:
        if isinstance(value, kind):
            make: Callable[[object], object] = kind
            return make(value)
    return None


def _small(value: object) -> Json:
    """A builtin value of a fixed form as JSON, or None."""
    kind = type(value)
    if isinstance(value, bytes | bytearray) and kind in (bytes, bytearray):
        return {"b" if kind is bytes else "B": value.hex()}
    if isinstance(value, complex) and kind is complex:
        return {"c": [value.real, value.imag]}
    if isinstance(value, range):
        return {"r": [_whole(part) for part in (value.start, value.stop, value.step)]}
    if isinstance(value, slice) and all(
        part is None or type(part) is int for part in (value.start, value.stop, value.step)
    ):
        return {"l": [None if part is None else _whole(part) for part in (value.start, value.stop, value.step)]}
    if value is ...:
        return {"e": 0}
    if isinstance(value, type):
        name = value.__name__
        return {"n": name} if name in _TYPES and getattr(builtins, name) is value else None
    return None


def _listed(value: object) -> list[object]:
    assert isinstance(value, Iterable)
    return list(value)


def _whole(value: int) -> Json:
    return value if -_EXACT_INT <= value <= _EXACT_INT else {"i": hex(value)}


def _is_of(module: str, value: object, name: str) -> bool:
    loaded = sys.modules.get(module)
    return loaded is not None and type(value) is getattr(loaded, name, None)


def _of(module: str, name: str) -> Callable[..., object]:
    """A class of the standard library, imported when a value of it first comes: a third of the start-up otherwise."""
    found: Callable[..., object] = getattr(importlib.import_module(module), name)
    return found


def _time_fields(value: object) -> list[Json]:
    names = {
        "date": ("year", "month", "day"),
        "time": ("hour", "minute", "second", "microsecond"),
        "datetime": ("year", "month", "day", "hour", "minute", "second", "microsecond"),
        "timedelta": ("days", "seconds", "microseconds"),
    }[type(value).__name__]
    return [int(getattr(value, name)) for name in names]


def _time(body: Json) -> object:
    name, *fields = _items(body)
    if name not in _TIMES:
        raise NotPlain("an unknown kind of time")
    return _of("datetime", str(name))(*map(_integer, fields))


def _type_named(body: Json) -> object:
    if body not in _TYPES:
        raise NotPlain("an unknown type")
    return getattr(builtins, str(body))


def _items(body: Json) -> list[Json]:
    if not isinstance(body, list):
        raise NotPlain("expected an array")
    return body


def _text(body: Json) -> str:
    if not isinstance(body, str):
        raise NotPlain("expected a string")
    return body


def _number(body: object) -> float:
    if not isinstance(body, int | float):
        raise NotPlain("expected a number")
    return body


def _integer(body: object) -> int:
    if not isinstance(body, int):
        raise NotPlain("expected an integer")
    return body
