"""`composite`: a reward made of other verifiers' rewards.

item -> parts, each judged by its own verifier, beside each other -> gates -> combination -> reward
"""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from protocol.rewards import ScoreError, ScoreItem
from reward_service.verifier.lanes import JudgeItem, Lane, Surroundings
from reward_service.verifier.submission import (
    MAX_MESSAGE_CHARS,
    Outcome,
    Score,
    UserError,
    error_of,
    validate_arguments,
)

MAX_DEPTH = 3
MAX_PARTS = 32

Combination = Literal["sum", "mean", "min", "max", "product"]


class Gate(BaseModel):
    """The bound that a part must reach."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    at_least: float = Field(
        allow_inf_nan=False, description="the part's own reward, without its weight, from which on it is open"
    )
    otherwise: float = Field(
        default=0.0, allow_inf_nan=False, description="the item's reward where the gate stays closed"
    )


class WeightedVerifier(BaseModel):
    """A verifier with its arguments, and what its reward counts for."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    verifier: str = Field(min_length=1, max_length=256, description="name of the verifier")
    arguments: dict[str, JsonValue] = Field(default_factory=dict, max_length=64, description="its arguments")
    name: str | None = Field(
        default=None, min_length=1, max_length=64, description="name of its components; the verifier's if left out"
    )
    weight: float = Field(
        default=1.0, allow_inf_nan=False, description="factor of its reward; 0 leaves it out of the combination"
    )
    gate: Gate | None = Field(default=None, description="a threshold without which the item's reward is a given value")
    optional: bool = Field(default=False, description="if it cannot be judged, the reward is made of the other parts")

    @model_validator(mode="after")
    def _gate_is_judged(self) -> Self:
        if self.gate is not None and self.optional:
            raise ValueError(
                "a part with a gate cannot be optional: without its reward the gate is neither open nor closed"
            )
        return self

    @property
    def label(self) -> str:
        """The name of its components."""
        return self.name or self.verifier


class CompositeArguments(BaseModel):
    """The parts, and how their rewards become one."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    parts: tuple[WeightedVerifier, ...] = Field(
        min_length=1, max_length=MAX_PARTS, strict=False, description="what the reward is made of"
    )
    combine: Combination = Field(
        default="sum",
        description="sum, min, max and product are of the weighted rewards; mean: their sum over that of the weights",
    )

    @model_validator(mode="after")
    def _can_be_combined(self) -> Self:
        repeated = sorted(name for name, count in Counter(part.label for part in self.parts).items() if count > 1)
        if repeated:
            raise ValueError(f"two parts are named {', '.join(repeated)}; give each a `name` of its own")
        counted = [part for part in self.parts if part.weight != 0]
        if not counted:
            raise ValueError("all weights are 0; at least one part must count")
        if self.combine == "mean" and any(part.weight < 0 for part in counted):
            raise ValueError("a mean needs weights of 0 or more")
        return self


@dataclass(frozen=True, kw_only=True)
class _PartScore:
    part: WeightedVerifier
    outcome: Outcome

    @property
    def score(self) -> Score | None:
        return self.outcome.result if isinstance(self.outcome.result, Score) else None


class CompositeLane(Lane):
    """Judges by the lanes of the other verifiers; their versions are part of its own."""

    def __init__(self, *, judge: JudgeItem, version: str, version_of: Callable[[str], str]) -> None:
        self._judge = judge
        self._version = version
        self._version_of = version_of

    def judge(self, item: ScoreItem, *, deadline: float) -> Outcome | Awaitable[Outcome]:
        """The outcome of all parts, at the deadline at the latest; arguments that do not fit are refused at once."""
        try:
            _check_depth(item.arguments)
            arguments = validate_arguments(model=CompositeArguments, arguments=item.arguments)
        except UserError as error:
            return Outcome(result=error_of(error))
        assert isinstance(arguments, CompositeArguments)
        return self._judge_parts(item, arguments, deadline=deadline)

    async def _judge_parts(self, item: ScoreItem, arguments: CompositeArguments, *, deadline: float) -> Outcome:
        async with asyncio.TaskGroup() as tasks:
            judged = [tasks.create_task(self._judge_part(item, part, deadline=deadline)) for part in arguments.parts]
        outcome = combined(arguments, [each.result() for each in judged])
        return replace(outcome, version=f"{self._version}({self._versions_of(arguments)})")

    def _versions_of(self, arguments: CompositeArguments) -> str:
        names = dict.fromkeys(part.verifier for part in arguments.parts)
        return ", ".join(f"{name} {self._version_of(name)}" for name in names)

    async def _judge_part(self, item: ScoreItem, part: WeightedVerifier, *, deadline: float) -> _PartScore:
        asked = item.model_copy(update={"verifier": part.verifier, "arguments": part.arguments})
        outcome = self._judge(asked, deadline=deadline)
        return _PartScore(part=part, outcome=outcome if isinstance(outcome, Outcome) else await outcome)


@asynccontextmanager
async def open_composite(surroundings: Surroundings) -> AsyncIterator[Lane]:
    """The lane of `composite`, which needs no resources of its own."""
    yield CompositeLane(
        judge=surroundings.judge, version=surroundings.verifier.version, version_of=surroundings.version_of
    )


def combined(arguments: CompositeArguments, judged: Sequence[_PartScore]) -> Outcome:
    """The outcome of all parts together. The error of a part is the whole's, unless the part is optional."""
    scored = [each for each in judged if each.score is not None]
    attempts = max(each.outcome.attempts for each in judged)
    cached = all(each.outcome.cached for each in judged)
    failed = [each for each in judged if each.score is None]
    fatal = [each for each in failed if not each.part.optional]
    counted = [each for each in scored if each.part.weight != 0]
    if fatal or not counted:
        return Outcome(result=_error((fatal or failed)[0]), attempts=attempts)
    components = _components(scored, failed)
    reward = _gated(scored)
    if reward is None:
        reward = _COMBINE[arguments.combine](counted)
    if not math.isfinite(reward):
        overflow = ScoreError(kind="data", message=f"the {arguments.combine} of the parts' rewards is not finite")
        return Outcome(result=overflow, attempts=attempts)
    said = "\n".join(
        f"{each.part.label}: {words}" for each in scored if each.score and (words := each.score.explanation)
    )
    score = Score(reward=reward, components=components, explanation=said[:MAX_MESSAGE_CHARS])
    return Outcome(result=score, attempts=attempts, cached=cached)


def _check_depth(arguments: Mapping[str, JsonValue], *, depth: int = 1) -> None:
    """Raises UserError for composites in composites beyond the limit, before anything is judged."""
    if depth > MAX_DEPTH:
        raise UserError(f"a composite of composites more than {MAX_DEPTH} deep; combine the parts in fewer steps")
    parts = arguments.get("parts")
    for part in parts if isinstance(parts, list) else ():
        inner = part.get("arguments") if isinstance(part, dict) and part.get("verifier") == "composite" else None
        if isinstance(inner, dict):
            _check_depth(inner, depth=depth + 1)


def _error(judged: _PartScore) -> ScoreError:
    error = judged.outcome.result
    assert isinstance(error, ScoreError)
    return ScoreError(kind=error.kind, message=f"part {judged.part.label}: {error.message}"[:MAX_MESSAGE_CHARS])


def _components(scored: Sequence[_PartScore], failed: Sequence[_PartScore]) -> dict[str, float]:
    """Each part's reward by the part's name, its components as part.component, that it failed as part.failed."""
    components: dict[str, float] = {}
    for each in scored:
        assert each.score is not None
        components[each.part.label] = each.score.reward
        components.update({f"{each.part.label}.{name}": value for name, value in each.score.components.items()})
    components.update({f"{each.part.label}.failed": 1.0 for each in failed})
    return components


def _gated(scored: Sequence[_PartScore]) -> float | None:
    """The value of the first gate that stays closed, in the order of the parts."""
    for each in scored:
        gate = each.part.gate
        if gate is not None and each.score is not None and each.score.reward < gate.at_least:
            return gate.otherwise
    return None


def _weighted(counted: Sequence[_PartScore]) -> list[float]:
    return [each.part.weight * each.score.reward for each in counted if each.score is not None]


def _mean(counted: Sequence[_PartScore]) -> float:
    return sum(_weighted(counted)) / sum(each.part.weight for each in counted)


_COMBINE: Mapping[Combination, Callable[[Sequence[_PartScore]], float]] = {
    "sum": lambda counted: sum(_weighted(counted)),
    "mean": _mean,
    "min": lambda counted: min(_weighted(counted)),
    "max": lambda counted: max(_weighted(counted)),
    "product": lambda counted: math.prod(_weighted(counted)),
}
