"""Verifiers that open lanes of their own: what they may use, and what their faults cost."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from pydantic import BaseModel

from protocol.rewards import ScoreItem, ScoreRequest, ScoreResult
from reward_service.config import RewardServiceConfig
from reward_service.requests.scoring import Scorer
from reward_service.verifier.lanes import Lane, Registry, Surroundings, Verifier, make_metrics
from reward_service.verifier.submission import Outcome, Score, UserError
from services.http.metrics import Metrics

Open = Callable[[Surroundings], AbstractAsyncContextManager[Lane]]


class EmptyArguments(BaseModel):
    """For verifiers that take none."""


def verifier(name: str, open: Open) -> Verifier:
    return Verifier(name=name, version="1", description="", arguments=EmptyArguments, open=open)


def scorer_of(*verifiers: Verifier) -> Scorer:
    metrics = make_metrics(Metrics("reward-service"))
    return Scorer(registry=Registry(verifiers), config=RewardServiceConfig(), metrics=metrics, service_id="rewards-0")


async def score(scorer: Scorer, *names: str) -> tuple[ScoreResult, ...]:
    items = tuple(ScoreItem(id=name, verifier=name, completion="") for name in names)
    return (await scorer.score(ScoreRequest(items=items))).results


class Always(Lane):
    """Gives everything the same reward."""

    def __init__(self, reward: float) -> None:
        self._reward = reward

    def judge(self, item: ScoreItem, *, deadline: float) -> Outcome:
        return Outcome(result=Score(reward=self._reward))


class FailsAtOnce(Lane):
    """Breaks its promise not to raise."""

    def judge(self, item: ScoreItem, *, deadline: float) -> Outcome:
        raise KeyError("inside")


class FailsLater(Lane):
    """Breaks its promise not to raise when it is waited for."""

    def judge(self, item: ScoreItem, *, deadline: float) -> Awaitable[Outcome]:
        return self._fail()

    async def _fail(self) -> Outcome:
        raise KeyError("inside")


def opening(lane: Lane) -> Open:
    @asynccontextmanager
    async def opened(surroundings: Surroundings) -> AsyncIterator[Lane]:
        yield lane

    return opened


async def test_a_lane_that_fails_fails_its_own_items_alone() -> None:
    lanes = {"at_once": FailsAtOnce(), "later": FailsLater(), "right": Always(0.5)}
    async with scorer_of(*[verifier(name, opening(lane)) for name, lane in lanes.items()]) as scorer:
        at_once, later, right = await score(scorer, *lanes)
    for failed in (at_once, later):
        assert failed.reward is None
        assert failed.error is not None
        assert failed.error.kind == "infrastructure"
        assert "KeyError" in failed.error.message
    assert right.reward == 0.5


async def test_an_error_at_the_start_names_the_verifier() -> None:
    @asynccontextmanager
    async def refuses(surroundings: Surroundings) -> AsyncIterator[Lane]:
        raise UserError("its key is missing")
        yield Always(0.0)

    with pytest.raises(UserError, match="verifier 'judge': its key is missing"):
        async with scorer_of(verifier("judge", refuses)):
            pass


async def test_what_lanes_share_is_opened_once_and_closed_after_them() -> None:
    events: list[str] = []

    @asynccontextmanager
    async def session() -> AsyncIterator[str]:
        events.append("session opened")
        yield "session"
        events.append("session closed")

    @asynccontextmanager
    async def uses(surroundings: Surroundings) -> AsyncIterator[Lane]:
        assert await surroundings.shared.get(session) == "session"
        yield Always(1.0)
        events.append(f"{surroundings.verifier.name} closed")

    async with scorer_of(verifier("a", uses), verifier("b", uses)) as scorer:
        assert [result.reward for result in await score(scorer, "a", "b")] == [1.0, 1.0]
    assert events == ["session opened", "b closed", "a closed", "session closed"]


async def test_a_lane_may_ask_the_lane_of_another_verifier() -> None:
    class Doubled(Lane):
        def __init__(self, surroundings: Surroundings) -> None:
            self._judge = surroundings.judge

        def judge(self, item: ScoreItem, *, deadline: float) -> Outcome:
            inner = self._judge(item.model_copy(update={"verifier": "half"}), deadline=deadline)
            assert isinstance(inner, Outcome)
            assert isinstance(inner.result, Score)
            return Outcome(result=Score(reward=2 * inner.result.reward), cached=True)

    @asynccontextmanager
    async def doubled(surroundings: Surroundings) -> AsyncIterator[Lane]:
        yield Doubled(surroundings)

    async with scorer_of(verifier("double", doubled), verifier("half", opening(Always(0.5)))) as scorer:
        (result,) = await score(scorer, "double")
    assert (result.reward, result.cached, result.service_id) == (1.0, True, "rewards-0")
