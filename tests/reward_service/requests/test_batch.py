"""A request's items on their way through lanes that do what a test says."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import cast

import pytest

from protocol.rewards import ScoreError, ScoreItem, ScoreRequest
from reward_service.requests.batch import ScoreBatch
from reward_service.requests.open_lanes import OpenLanes
from reward_service.requests.turns import Turns
from reward_service.verifier.submission import Outcome, Score

RIGHT = Outcome(result=Score(reward=1.0))


def item(id: str, *, deadline_s: float | None = None) -> ScoreItem:
    return ScoreItem(id=id, verifier="v", completion=id, deadline_s=deadline_s)


async def right() -> Outcome:
    return RIGHT


class ScriptedLanes:
    """A single lane for all, with places for `share` items, in which each becomes what `judge` makes of it."""

    def __init__(
        self, judge: Callable[[], Outcome | Coroutine[object, object, Outcome]] = right, *, share: int
    ) -> None:
        self._judge = judge
        self._share = share
        self.deadlines: dict[str, float] = {}

    def judge(self, item: ScoreItem, *, deadline: float) -> Outcome | Awaitable[Outcome]:
        self.deadlines[item.id] = deadline
        return self._judge() if item.id != "right" else right()

    def share(self, verifier: str) -> int:
        return self._share


async def outcomes(lanes: ScriptedLanes, *items: ScoreItem, deadline_s: float = 30.0) -> list[Outcome]:
    """Outcomes of all items, in order."""
    found: dict[int, Outcome] = {}
    batch = ScoreBatch(
        request=ScoreRequest(items=items, deadline_s=deadline_s),
        lanes=cast("OpenLanes", lanes),
        turns=Turns(),
        longest_s=1000.0,
        finish=found.__setitem__,
    )
    async with asyncio.timeout(60):
        await batch.run()
    return [found[index] for index in range(len(items))]


async def test_a_lane_is_told_of_each_item_when_its_own_time_is_over() -> None:
    lanes = ScriptedLanes(share=4)

    await outcomes(lanes, item("whole"), item("short", deadline_s=5.0), item("long", deadline_s=3000.0), deadline_s=100)

    assert lanes.deadlines["whole"] - lanes.deadlines["short"] == pytest.approx(95.0)
    assert lanes.deadlines["long"] == lanes.deadlines["whole"], "no item has longer than its request"


async def test_a_lane_that_raises_costs_its_item_the_reward_and_nobody_else() -> None:
    async def breaks() -> Outcome:
        raise RuntimeError("a bug")

    first, second, third = await outcomes(ScriptedLanes(breaks, share=1), item("a"), item("right"), item("b"))

    assert second == RIGHT
    for fault in (first.result, third.result):
        assert isinstance(fault, ScoreError)
        assert fault.kind == "infrastructure"
        assert fault.message == "the service failed at this item: RuntimeError; its log says more"


async def test_an_item_that_is_judged_gives_its_place_to_the_next_of_its_request() -> None:
    assert await outcomes(ScriptedLanes(share=1), *map(item, "abcde"), deadline_s=5.0) == [RIGHT] * 5
