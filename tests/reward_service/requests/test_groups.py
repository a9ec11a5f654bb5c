"""Reward functions as TRL's are: called once with all completions of a group, sync and async."""

import importlib.metadata
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from protocol.rewards import ScoreItem, ScoreRequest, ScoreResult
from reward_service.config import RewardServiceConfig
from reward_service.included import build_registry
from reward_service.requests.scoring import Scorer
from reward_service.verifier.config import CustomVerifier, WorkerConfig
from reward_service.verifier.lanes import make_metrics
from services.http.metrics import Metrics

BOTH = ["best_of_group", "best_of_group_async"]
BROKEN = ("breaks_on_groups", "dies_on_groups", "short_of_one", "hides_a_coroutine")
FUNCTIONS = (*BOTH, *BROKEN, "reads_messages", "reads_messages_async")


@asynccontextmanager
async def opened() -> AsyncIterator[Scorer]:
    verifiers = tuple(CustomVerifier(name=name, function=f"sample_verifiers:{name}") for name in FUNCTIONS)
    config = RewardServiceConfig(verifiers=verifiers, workers=WorkerConfig(count=1))
    metrics = make_metrics(Metrics("reward-service"))
    async with Scorer(
        registry=build_registry(config),
        config=config,
        metrics=metrics,
        service_id=importlib.metadata.version("headway"),
    ) as scorer:
        yield scorer


def group(verifier: str, completions: Sequence[str], *, name: str = "g", size: int | None = None) -> list[ScoreItem]:
    return [
        ScoreItem(
            id=f"{name}{number}",
            verifier=verifier,
            completion=text,
            prompt=f"prompt {number}",
            arguments={"answer": number},
            group=name,
            group_size=size or len(completions),
        )
        for number, text in enumerate(completions)
    ]


async def scored(scorer: Scorer, items: Sequence[ScoreItem]) -> dict[str, ScoreResult]:
    results = (await scorer.score(ScoreRequest(items=tuple(items), deadline_s=60.0))).results
    assert [each.id for each in results] == [item.id for item in items]
    return {each.id: each for each in results}


@pytest.mark.parametrize("verifier", BOTH)
async def test_a_function_is_called_once_with_all_of_a_group_and_what_it_notes_is_each_one_s(verifier: str) -> None:
    async with opened() as scorer:
        first, second = group(verifier, ["a", "abc", "ab"]), group(verifier, ["x" * 9, "", "x"], name="h")
        mixed = [item for pair in zip(first, second, strict=True) for item in pair]
        found = await scored(scorer, mixed)

    assert {name: one.reward for name, one in found.items()} == {
        "g0": 0.0, "g1": 1.0, "g2": 0.0, "h0": 1.0, "h1": None, "h2": 0.0
    }  # fmt: skip
    assert found["g0"].components == {"completions": 3.0}
    assert [found[f"g{number}"].explanation for number in range(3)] == [
        f"seen: prompt {number} {number}" for number in range(3)
    ]
    assert found["h1"].error is not None
    assert (found["h1"].error.kind, "does not judge" in found["h1"].error.message) == ("data", True)


@pytest.mark.parametrize("verifier", BOTH)
async def test_items_without_a_group_are_judged_one_by_one(verifier: str) -> None:
    items = [each.model_copy(update={"group": "", "group_size": 1}) for each in group(verifier, ["a", "abc"])]
    async with opened() as scorer:
        found = await scored(scorer, items)

    assert [one.reward for one in found.values()] == [1.0, 1.0]
    assert [one.components for one in found.values()] == [{"completions": 1.0}] * 2


@pytest.mark.parametrize("verifier", BOTH)
async def test_a_part_of_a_group_is_not_taken_for_all_of_it(verifier: str) -> None:
    async with opened() as scorer:
        found = await scored(scorer, group(verifier, ["a", "abc"], size=3))

    for one in found.values():
        assert one.error is not None
        assert one.error.kind == "infrastructure"
        assert "the 3 completions of a group, and this request holds 2" in one.error.message


@pytest.mark.parametrize("verifier", BOTH)
async def test_a_group_is_larger_than_what_a_lane_holds_at_once(verifier: str) -> None:
    async with opened() as scorer:
        found = await scored(scorer, group(verifier, ["x" * number for number in range(1, 301)]))

    assert sum(one.reward or 0.0 for one in found.values()) == 1.0
    assert found["g0"].components == {"completions": 300.0}


@pytest.mark.parametrize(
    ("verifier", "kind", "said"),
    [
        ("breaks_on_groups", "data", "KeyError"),
        ("dies_on_groups", "infrastructure", "the worker died"),
        ("reads_messages", "data", "read `completion` in place of `completion[0]['content']`"),
        ("reads_messages_async", "data", "read `completion` in place of `completion[0]['content']`"),
        ("hides_a_coroutine", "user", "written with `async def`"),
        ("short_of_one", "user", "for 2 completions, expected a list of as many numbers"),
    ],
)
async def test_what_goes_wrong_with_a_group_is_an_error_of_each_of_it(verifier: str, kind: str, said: str) -> None:
    async with opened() as scorer:
        found = await scored(scorer, [*group(verifier, ["a", "b"]), *group("best_of_group_async", ["a"], name="h")])

    for one in (found["g0"], found["g1"]):
        assert one.error is not None
        assert (one.error.kind, said in one.error.message) == (kind, True), one.error
    assert found["h0"].reward == 1.0
