"""Encoded values, and when two of them are equal."""

import collections
import datetime
import decimal
import fractions
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_service.code.arguments import Tolerance
from reward_service.code.comparison import outputs_equal, values_equal
from reward_service.code.inside.plain import Json, NotPlain, PlainDecoder, PlainEncoder

# Those that are equal to numbers of other types come often.
_SMALL = st.sampled_from(
    [0, 1, False, True, 0.0, -0.0, 1.0, 0j, 1 + 0j, complex(-0.0, -0.0), 0.5, 2.0**70, 2**70]
    + [decimal.Decimal(text) for text in ("0", "-0.0", "1", "1.00", "0.5", "1E+3", "Infinity")]
    + [fractions.Fraction(1, 2), fractions.Fraction(3), 1000, math.inf, 0.1, decimal.Decimal("0.1")]
)
_NUMBERS = (
    st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.decimals(allow_nan=False)
    | st.fractions()
    | _SMALL
)
_HASHABLE = st.recursive(
    st.none() | _NUMBERS | st.text() | st.binary() | st.sampled_from([b"", "", b"0", "0", range(0), range(0, 3, 2)]),
    lambda parts: st.tuples(parts, parts) | st.frozensets(parts, max_size=3),
    max_leaves=5,
)
VALUES = st.recursive(
    _HASHABLE | st.binary().map(bytearray),
    lambda parts: (
        st.lists(parts)
        | st.dictionaries(_HASHABLE, parts)
        | st.tuples(parts)
        | st.sets(_HASHABLE)
        | st.lists(parts).map(collections.deque)
        | st.dictionaries(_HASHABLE, parts).map(lambda pairs: collections.defaultdict(int, pairs))
    ),
    max_leaves=20,
)


def refuse(*given: object) -> Json:
    raise NotPlain("no other values here")


def encoded(value: object) -> Json:
    text = json.dumps(PlainEncoder(refuse).encode(value))
    loaded: Json = json.loads(text)
    return loaded


def equal(actual: object, expected: object, *, tuples_are_lists: bool = False, near: bool = False) -> bool:
    tolerance = Tolerance() if near else None
    return values_equal(encoded(actual), encoded(expected), tuples_are_lists=tuples_are_lists, tolerance=tolerance)


@settings(deadline=None)
@given(VALUES)
def test_a_value_comes_back_as_it_was(value: object) -> None:
    back = PlainDecoder(refuse).decode(encoded(value))
    assert back == value
    assert type(back) is type(value)


@settings(deadline=None)
@given(VALUES)
def test_a_value_equals_itself(value: object) -> None:
    assert equal(value, value)


@settings(deadline=None)
@given(VALUES, VALUES)
def test_values_are_equal_when_python_says_so(left: object, right: object) -> None:
    assert equal(left, right) == (left == right)


@st.composite
def siblings(draw: st.DrawFn) -> tuple[object, object]:
    """Two values of one form, whose numbers are often equal and of different types."""
    one, other = draw(_SMALL | _NUMBERS), draw(_SMALL)
    wrap = draw(
        st.sampled_from(
            [
                lambda number: number,
                lambda number: [number, (number,)],
                lambda number: {number: [number]},
                lambda number: {number, "x"},
                lambda number: (frozenset([number, (1, number)]), None),
                lambda number: collections.deque([number], 3 if number else None),
            ]
        )
    )
    return wrap(one), wrap(other)


@settings(deadline=None)
@given(siblings())
def test_equal_numbers_are_equal_whatever_their_types(pair: tuple[object, object]) -> None:
    left, right = pair
    assert equal(left, right) == (left == right)
    assert equal(left, right, near=True) or left != right


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (0j, False, True),
        (1 + 0j, decimal.Decimal("1.0"), True),
        (1j, 1, False),
        (b"ab", bytearray(b"ab"), True),
        (decimal.Decimal("0.1"), 0.1, False),
        ({decimal.Decimal(1): 2}, {True: 2}, True),
        (range(0, 3, 2), range(0, 4, 2), True),
        (range(3, 3), range(0), True),
        (range(2), [0, 1], False),
        (range(0, 2**80, 2**79), range(0, 2**80 - 1, 2**79), True),
        (collections.deque([1], 5), collections.deque([1.0]), True),
        (collections.deque([1]), [1], False),
        (decimal.Decimal("1E+999999"), decimal.Decimal("10E+999998"), True),
        ({decimal.Decimal("1E+999999")}, {decimal.Decimal("10E+999998")}, True),
        ("1", 1, False),
        (frozenset([1]), {1.0}, True),
        ([True, 0.0], [1, -0.0], True),
        (None, False, False),
        ("", b"", False),
    ],
)
def test_what_python_has_equal_is_equal(left: object, right: object, same: bool) -> None:
    assert equal(left, right) is same
    assert (left == right) is same


def test_numbers_that_are_expensive_to_bring_to_one_form_are_no_trouble() -> None:
    texts = ("sNaN", "9" * 5000, "1E+99999999999999999999", "NaN", "1E+999999", "x")
    fractions_: list[Json] = [{"F": [1, 0]}, {"F": [{"i": hex(1 << 20_000)}, 3]}, {"F": [1.5, 2]}, {"i": "0x"}]
    others: list[Json] = [{"c": [1]}, {"c": ["1", 2]}, {"c": [{"i": hex(1 << 5000)}, 0]}, {"r": [1, 2, 0]}, {"r": [1]}]
    decimals: list[Json] = [{"D": text} for text in texts]
    for message in (*decimals, *fractions_, *others):
        assert not equal_to_one(message)
        assert not values_equal({"s": [message]}, {"s": [1]}, tuples_are_lists=True, tolerance=None)


@pytest.mark.parametrize(
    "value",
    [
        decimal.Decimal("1.50"),
        fractions.Fraction(1, 3),
        datetime.date(2024, 2, 29),
        datetime.datetime(2024, 2, 29, 1, 2, 3, 4),
        datetime.time(1, 2),
        datetime.timedelta(1, 2, 3),
        collections.Counter("aab"),
        collections.OrderedDict(b=1, a=2),
        collections.defaultdict(list, {1: [2]}),
        collections.deque([1, 2], 3),
        range(1, 2**70, 3),
        slice(1, None),
        ...,
        bytearray(b"x"),
        int,
        [str, {dict}],
    ],
)
def test_values_of_the_standard_library_come_back(value: object) -> None:
    back = PlainDecoder(refuse).decode(encoded(value))
    assert (back, type(back)) == (value, type(value))


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"t": 1},
        {"i": "x"},
        {"i": 1},
        {"n": "eval"},
        {"n": "__import__"},
        {"h": [1]},
        {"s": [[]]},
        {"d": [[1]]},
        {"d": [[[], 1]]},
        {"b": "zz"},
        {"r": ["a"]},
        {"r": [1, 2, 0]},
        {"T": ["eval", 1]},
        {"T": ["date", 99999, 1, 1]},
        {"C": ["x"]},
        {"D": "nothing"},
        {"F": [1, 0]},
        {"t": [], "s": []},
    ],
)
def test_what_is_no_value_is_refused(message: Json) -> None:
    with pytest.raises(NotPlain):
        PlainDecoder(refuse).decode(message)


def test_cyclic_and_deep_values_are_refused() -> None:
    cyclic: list[object] = []
    cyclic.append(cyclic)
    doubled: list[object] = []
    for _ in range(100):
        doubled = [doubled, doubled]
    for value in (cyclic, doubled):
        with pytest.raises(NotPlain):
            PlainEncoder(refuse).encode(value)


def test_a_hostile_encoding_is_unequal_and_no_error() -> None:
    deep: Json = []
    for _ in range(100_000):
        deep = [deep]
    assert not values_equal(deep, [[]], tuples_are_lists=True, tolerance=None)
    messages: list[Json] = [{"d": 1}, {"d": [1]}, {"s": 2}, {"t": None}, {"i": []}, {"C": [1]}, {"zz": 1}, {}]
    for message in messages:
        assert not equal_to_one(message)


def equal_to_one(message: Json) -> bool:
    return values_equal(message, 1, tuples_are_lists=True, tolerance=Tolerance())


def test_colliding_hashes_cost_nothing() -> None:
    values: list[Json] = [{"i": hex(n * (2**61 - 1))} for n in range(1, 50_000)]
    assert values_equal({"s": values}, {"s": values[::-1]}, tuples_are_lists=True, tolerance=None)


def test_nested_sets_cost_in_proportion_to_their_size() -> None:
    left: Json = "left"
    right: Json = "right"
    for _ in range(100):
        left, right = {"f": [left, 1]}, {"f": [1, right]}
    assert not values_equal(left, right, tuples_are_lists=True, tolerance=None)


def test_tolerance_holds_for_floats_inside_of_values() -> None:
    assert equal({"a": [0.1 + 0.2]}, {"a": [0.3]}, near=True)
    assert not equal({"a": [0.1 + 0.2]}, {"a": [0.3]})
    assert not equal(10**20, 10**20 + 1, near=True)
    assert equal(math.nan, math.nan)
    assert equal(math.inf, math.inf)
    assert not equal(math.inf, -math.inf, near=True)
    assert not equal(10**400, 1e308, near=True)
    assert not equal("1", 1, near=True)


def test_tuples_are_lists_only_where_asked() -> None:
    assert equal((1, [2]), [1, (2,)], tuples_are_lists=True)
    assert not equal((1, 2), [1, 2])
    assert not equal({1, 2}, [1, 2], tuples_are_lists=True)


@pytest.mark.parametrize(
    ("actual", "expected", "same"),
    [
        ("1.0 nan inf", "1 nan inf", True),
        ("1e-12", "0", True),
        ("YES", "yes", False),
        ("9" * 5000, "9" * 5000, True),
        ("9" * 5000, "9" * 4999 + "8", False),
        ("1_0", "10", False),
        ("10000000", "10000001", False),
        ("-0 +7 -07", "0 7 -7", True),
        ("10000000.0", "10000001", True),
        ("0x10", "16", False),
        ("3", "3.1", False),
    ],
)
def test_numbers_in_outputs_are_compared_as_numbers(actual: str, expected: str, same: bool) -> None:
    assert outputs_equal(actual, expected, compare="numbers", tolerance=Tolerance()) is same
