"""The range that is said of a verifier holds the rewards that it gives, and a composite's ends are its own rewards."""

from collections.abc import Mapping

import pytest
from pydantic import JsonValue

from reward_service.verifiers.ranges import reward_range

ONE: dict[str, JsonValue] = {"verifier": "exact_match", "arguments": {"answer": "1"}}
OWN: dict[str, JsonValue] = {"verifier": "mine"}
LESS: dict[str, JsonValue] = {"verifier": "repetition", "arguments": {"scale": 2.0}}


def composite(*parts: dict[str, JsonValue], combine: str = "sum") -> tuple[float, float] | None:
    named: list[JsonValue] = [{**part, "name": str(place)} for place, part in enumerate(parts)]
    return reward_range("composite", {"parts": named, "combine": combine})


@pytest.mark.parametrize(
    ("verifier", "arguments", "expected"),
    [
        ("math", {"answer": "1"}, (0.0, 1.0)),
        ("overlong", {"maximum": 4, "buffer": 2}, (-1.0, 0.0)),
        ("overlong", {}, None),
        ("repetition", {"scale": 3.0}, (-3.0, 0.0)),
        ("length", {"in_range": 2.0, "floor": -1.0}, (-1.0, 2.0)),
        ("mine", {}, None),
        ("reasoning_gym", {}, None),
    ],
)
def test_a_verifiers_range(verifier: str, arguments: Mapping[str, JsonValue], expected: object) -> None:
    assert reward_range(verifier, arguments) == expected


def test_a_composites_range_is_made_of_its_parts() -> None:
    assert composite(ONE, {**LESS, "weight": 0.5}) == (-1.0, 1.0)
    assert composite({**ONE, "weight": -1.0}, ONE) == (-1.0, 1.0)
    assert composite({**ONE, "weight": 3.0}, {**ONE, "weight": 1.0}, combine="mean") == (0.0, 1.0)
    assert composite({**ONE, "weight": 3.0}, ONE, combine="min") == (0.0, 1.0)
    assert composite({**ONE, "weight": 3.0}, ONE, combine="max") == (0.0, 3.0)
    assert composite(LESS, {**LESS, "weight": -1.0}, combine="product") == (-4.0, 0.0)
    assert composite(ONE, OWN) is None
    assert composite(ONE, {**OWN, "weight": 0.0}) == (0.0, 1.0)
    assert composite(ONE, {**LESS, "optional": True}, combine="mean") is None


def test_a_gate_that_stays_closed_decides() -> None:
    closed: dict[str, JsonValue] = {**ONE, "gate": {"at_least": 2.0, "otherwise": -1.0}}
    assert composite(closed, OWN) == (-1.0, -1.0)
    assert composite({**ONE, "gate": {"at_least": 1.0, "otherwise": -1.0}}, ONE) == (-1.0, 2.0)
    assert composite({**ONE, "gate": {"at_least": 0.0, "otherwise": -9.0}}) == (0.0, 1.0)
    assert composite({**OWN, "weight": 0.0, "gate": {"at_least": 3.0, "otherwise": 7.0}}, ONE) == (0.0, 7.0)
