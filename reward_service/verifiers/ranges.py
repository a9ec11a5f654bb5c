"""Ranges of rewards: the lowest and the highest that a verifier can give with certain arguments, as far as is known.

A verifier of one's own, a reward model or another service may give any number. A composite's range is made of its
parts', in the order in which it is computed, so that it is not above the reward that it can really have.
"""

import math
from collections.abc import Collection, Mapping, Sequence

from pydantic import JsonValue, ValidationError

from reward_service.verifiers.composite import CompositeArguments, WeightedVerifier
from reward_service.verifiers.lengths import LengthArguments, OverlongArguments, RepetitionArguments

Range = tuple[float, float]
_SHARES = frozenset(
    {
        "code",
        "exact_match",
        "format",
        "ifeval",
        "json_schema",
        "math",
        "multiple_choice",
        "numeric",
        "qa",
        "regex",
        "similarity",
    }
)
_SHARE: Range = (0.0, 1.0)


def reward_range(verifier: str, arguments: Mapping[str, JsonValue], *, shares: Collection[str] = ()) -> Range | None:
    """The range of a verifier that comes with the service, or that is one of `shares`, which give 0 to 1. None if it
    is not known, or the arguments do not fit.
    """
    try:
        return _range(verifier, arguments, frozenset(shares))
    except ValidationError:
        return None


def _range(verifier: str, arguments: Mapping[str, JsonValue], shares: frozenset[str]) -> Range | None:
    if verifier in _SHARES or verifier in shares:
        return _SHARE
    if verifier == "overlong":
        OverlongArguments.model_validate(arguments)
        return -1.0, 0.0
    if verifier == "repetition":
        return -RepetitionArguments.model_validate(arguments).scale, 0.0
    if verifier == "length":
        given = LengthArguments.model_validate(arguments)
        return given.floor, given.in_range
    return _of_composite(CompositeArguments.model_validate(arguments), shares) if verifier == "composite" else None


def _of_composite(arguments: CompositeArguments, shares: frozenset[str]) -> Range | None:
    """A gate that no reward opens decides what comes of those behind it, and of the combination."""
    ranges = [_range(part.verifier, part.arguments, shares) for part in arguments.parts]
    found: list[float] = []
    for part, its in zip(arguments.parts, ranges, strict=True):
        if part.gate is None:
            continue
        if its is None or its[0] < part.gate.at_least:
            found.append(part.gate.otherwise)
        if its is not None and its[1] < part.gate.at_least:
            return min(found), max(found)
    counted = [(part, its) for part, its in zip(arguments.parts, ranges, strict=True) if part.weight != 0]
    combined = _combined(arguments, [(part, its) for part, its in counted if its is not None])
    if combined is None or any(its is None for _, its in counted):
        return None
    return min(*found, *combined), max(*found, *combined)


def _combined(arguments: CompositeArguments, counted: Sequence[tuple[WeightedVerifier, Range]]) -> Range | None:
    """None of those from which parts may be missing: what is left may be more."""
    if not counted or any(part.optional for part, _ in counted):
        return None
    weighted = [sorted((part.weight * low, part.weight * high)) for part, (low, high) in counted]
    lows, highs = [low for low, _ in weighted], [high for _, high in weighted]
    whole = sum(part.weight for part, _ in counted)
    match arguments.combine:
        case "sum":
            return sum(lows), sum(highs)
        case "mean":
            return sum(lows) / whole, sum(highs) / whole
        case "min":
            return min(lows), min(highs)
        case "max":
            return max(lows), max(highs)
    low, high = 1.0, 1.0
    for least, most in weighted:
        ends = [math.prod(pair) for pair in ((low, least), (low, most), (high, least), (high, most))]
        low, high = min(ends), max(ends)
    return low, high
