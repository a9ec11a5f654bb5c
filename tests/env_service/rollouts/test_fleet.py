"""The choice of a generator."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from math import inf
from pathlib import Path

import pytest
from aiohttp import web

from env_service.app import watch_rollouts
from env_service.config import EnvServiceConfig
from env_service.leases.running import RunningLeases
from env_service.rollouts.completions import RolloutProgress
from env_service.rollouts.concurrency import Concurrency, ConcurrencyBounds, ConcurrencyWindow
from env_service.rollouts.fleet import GeneratorFleet
from env_service.rollouts.outcomes import Outcome, RolloutMetrics
from protocol.generation import GeneratorState
from protocol.lease_keys import key_of
from protocol.messages import FailedLease, Lease, ServingGenerator
from services.http.breakers import Breakers, BreakerSettings
from services.http.client import HttpClient, ServiceError, ServiceTimeout
from services.http.metrics import Metrics
from services.http.waiting import Waiting
from tests.env_service.peers import lease, serving

A, B, C = (serving(name, f"http://{name}") for name in "abc")


class LoopClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def fail(fleet: GeneratorFleet, generator: ServingGenerator) -> None:
    with suppress(ServiceError), fleet.occupy(generator, completions=1):
        raise ServiceTimeout(generator.url, "it died")


async def test_the_generator_with_the_fewest_completions_outstanding_is_chosen() -> None:
    fleet = GeneratorFleet()
    fleet.replace([A, B])
    with fleet.occupy(A, completions=8):
        assert await fleet.choose() == B
        with fleet.occupy(B, completions=16):
            assert await fleet.choose() == A
    assert not fleet.outstanding


async def test_one_that_was_tried_is_chosen_only_if_there_is_no_other() -> None:
    fleet = GeneratorFleet()
    fleet.replace([A, B])
    assert await fleet.choose(avoid=["a"]) == B
    fleet.replace([A])
    assert await fleet.choose(avoid=["a"]) == A


async def test_one_that_has_failed_rests_for_a_while() -> None:
    clock = LoopClock()
    fleet = GeneratorFleet(breakers=Breakers("generator", settings=BreakerSettings(rest_s=2.0), clock=clock))
    fleet.replace([A, B])
    fail(fleet, A)
    with fleet.occupy(B, completions=8):
        assert await fleet.choose() == B
        clock.now = 3.0
        assert await fleet.choose() == A


async def test_a_choice_waits_until_somebody_serves() -> None:
    fleet = GeneratorFleet()
    choice = asyncio.ensure_future(fleet.choose())
    await asyncio.sleep(0)
    assert not choice.done()
    fleet.replace([C])
    assert await choice == C


async def test_a_choice_waits_for_the_rest_of_the_only_one() -> None:
    fleet = GeneratorFleet(breakers=Breakers("generator", settings=BreakerSettings(rest_s=0.01)))
    fleet.replace([A])
    fail(fleet, A)
    assert not fleet.answering
    async with asyncio.timeout(60):
        assert await fleet.choose() == A


async def test_one_that_was_away_and_serves_again_is_asked_at_once() -> None:
    fleet = GeneratorFleet(breakers=Breakers("generator", settings=BreakerSettings(rest_s=1000.0)))
    fleet.replace([A])
    fail(fleet, A)
    choice = asyncio.ensure_future(fleet.choose())
    await asyncio.sleep(0)
    fleet.replace([])
    fleet.replace([A])
    async with asyncio.timeout(60):
        assert await choice == A


async def test_a_cancelled_choice_ends() -> None:
    fleet = GeneratorFleet()
    choice = asyncio.ensure_future(fleet.choose())
    await asyncio.sleep(0)
    choice.cancel()
    await asyncio.wait([choice])
    assert choice.cancelled()


async def test_a_turn_goes_to_the_generator_that_holds_its_prefix() -> None:
    fleet = GeneratorFleet()
    fleet.replace([A, B, C])
    with fleet.occupy(C, completions=4):
        assert await fleet.choose(prefer="c") == C
        assert await fleet.choose(prefer="c", avoid=["c"]) != C
        assert await fleet.choose() != C
    assert await fleet.choose(prefer="gone") in (A, B, C)


async def test_a_prefix_is_left_behind_where_its_generator_is_much_busier_than_another() -> None:
    fleet = GeneratorFleet()
    fleet.replace([A, B])
    with fleet.occupy(A, completions=9):
        assert await fleet.choose(prefer="a") == B
        with fleet.occupy(B, completions=2):
            assert await fleet.choose(prefer="a") == A


async def test_a_generator_is_given_no_more_than_is_allowed_and_the_oldest_lease_has_the_next_place() -> None:
    fleet = GeneratorFleet()
    fleet.replace([A])
    fleet.allow("a", 2)
    order: list[int] = []

    async def ask(rank: int) -> None:
        generator = await fleet.choose(rank=(rank,))
        with fleet.occupy(generator, completions=1):
            order.append(rank)
            await asyncio.sleep(0)

    with fleet.occupy(A, completions=2):
        asked = [asyncio.ensure_future(ask(rank)) for rank in (7, 3, 9, 1)]
        await asyncio.sleep(0)
        asked.append(asyncio.ensure_future(ask(0)))
        for _ in range(5):
            await asyncio.sleep(0)
        assert order == []
    async with asyncio.timeout(60):
        await asyncio.gather(*asked)
    assert order == [0, 1, 3, 7, 9]


async def test_one_who_no_longer_waits_lets_the_others_pass() -> None:
    fleet = GeneratorFleet()
    fleet.replace([A])
    fleet.allow("a", 1)
    with fleet.occupy(A, completions=1):
        first = asyncio.ensure_future(fleet.choose(rank=(1,)))
        second = asyncio.ensure_future(fleet.choose(rank=(2,)))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        assert await second == A


def test_a_queue_that_stays_makes_the_bound_smaller_and_none_makes_it_larger() -> None:
    window = ConcurrencyWindow(ConcurrencyBounds(least=8, most=110, queue_share=0.1))
    assert window.told(running=200, waiting=100, outstanding=200) == inf, "a group that has just come is no queue"
    assert window.told(running=200, waiting=100, outstanding=200) == 160
    assert window.told(running=160, waiting=0, outstanding=50) == 110, "no more than the most"
    for _ in range(20):
        window.told(running=40, waiting=39, outstanding=40)
    assert window.allowed == 8, "no fewer than the least"
    assert window.told(running=8, waiting=0, outstanding=7) == 8, "not more than is asked for"
    assert window.told(running=8, waiting=0, outstanding=8) == 9


def test_short_completions_of_which_some_are_always_read_in_get_their_places_back() -> None:
    window = ConcurrencyWindow(ConcurrencyBounds(least=64, most=4096, queue_share=0.5))
    for _ in range(60):  # a start: all come at once
        window.told(running=2048, waiting=2000, outstanding=int(min(window.allowed, 2048)))
    assert window.allowed == 64
    for _ in range(30):
        outstanding = int(window.allowed)
        window.told(running=outstanding, waiting=outstanding // 8, outstanding=outstanding)
    assert window.allowed > 128
    before = window.allowed
    window.told(running=200, waiting=70, outstanding=200)
    assert window.allowed == before, "between few and too many it stays"


async def test_generators_are_asked_for_their_queue_and_bounded_by_it() -> None:
    state = GeneratorState(
        generator_id="a", serving=True, policy_version="1.0", running=100, waiting=60, tokens_generated=0, idle_s=0,
        uptime_s=1,
    )  # fmt: skip

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=state.model_dump_json())

    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(HttpClient())
        url = await stack.enter_async_context(served_at("/v1/state", answer))
        fleet = GeneratorFleet()
        fleet.replace([serving("a", url), serving("b", "http://127.0.0.1:1")])
        bounds = ConcurrencyBounds(least=4, most=4096, queue_share=0.1)
        concurrency = Concurrency(http=http, fleet=fleet, bounds=bounds, poll_s=1.0)
        with fleet.occupy(serving("a", url), completions=10):
            await concurrency.look()
            await concurrency.look()
        with fleet.occupy(serving("a", url), completions=8):
            assert (await fleet.choose(prefer="a")).generator_id == "b"


@asynccontextmanager
async def served_at(path: str, answer: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get(path, answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


async def test_the_oldest_lease_has_the_next_place_whenever_it_came() -> None:
    begun: list[int] = []
    go_on = asyncio.Event()

    async def run(granted: Lease, progress: RolloutProgress) -> Outcome:
        begun.append(granted.lease_id)
        await go_on.wait()
        return FailedLease(
            incarnation=1, lease_id=granted.lease_id, attempt=0, purpose=granted.purpose, data_fault=False, reason="x"
        )

    async def report(outcome: Outcome) -> None:
        assert isinstance(outcome, FailedLease)

    async with asyncio.TaskGroup() as tasks:
        metrics = RolloutMetrics(Metrics("env-service"))
        leases = RunningLeases(run=run, report=report, capacity=2, tasks=tasks, metrics=metrics)
        for lease_id in (8, 9, 7, 5):
            await leases.start(lease(lease_id))
        await leases.start(lease(6, purpose="evaluate"))
        await leases.start(lease(3))
        for _ in range(3):
            await asyncio.sleep(0)
        assert begun == [8, 9]
        leases.cancel([key_of(lease(5))])
        go_on.set()
    assert begun == [8, 9, 6, 3, 7]


async def test_rollouts_that_wait_for_a_verifier_that_hangs_are_said_and_shown_with_what_to_do() -> None:
    judged = asyncio.Event()

    async def run(granted: Lease, progress: RolloutProgress) -> Outcome:
        with progress.waiting_for("rewards"):
            await judged.wait()
        return FailedLease(
            incarnation=1, lease_id=granted.lease_id, attempt=0, purpose=granted.purpose, data_fault=False, reason="x"
        )

    async def report(outcome: Outcome) -> None:
        assert isinstance(outcome, FailedLease)

    told, ended = asyncio.Event(), asyncio.Event()
    waits = Waiting(on_waited=lambda whom, seconds: ended.set())
    async with asyncio.TaskGroup() as tasks:
        metrics = RolloutMetrics(Metrics("env-service"))
        leases = RunningLeases(run=run, report=report, capacity=2, tasks=tasks, metrics=metrics)
        config = EnvServiceConfig(model=Path("model"))

        async def look() -> None:
            for _ in range(60_000):
                if any("the reward service" in wait.whom for wait in waits.status()):
                    told.set()
                    return
                await asyncio.sleep(0.001)

        watching = tasks.create_task(watch_rollouts(leases, waits, config, poll_s=0.001, quiet_s=0.0))
        looking = tasks.create_task(look())
        await leases.start(lease(1))
        async with asyncio.timeout(60):
            await looking
            assert told.is_set()
            (wait,) = [wait for wait in waits.status() if "the reward service" in wait.whom]
            assert "reward_timeout_s" in wait.whom
            assert not wait.blocks_readiness
            judged.set()
            await ended.wait()
        watching.cancel()


async def test_a_wait_that_was_cancelled_is_over_and_the_next_one_is_named() -> None:
    progress = RolloutProgress()

    async def wait() -> None:
        with progress.waiting_for("generators"):
            await asyncio.Event().wait()

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    named = [progress.waits_for]
    waiting.cancel()
    await asyncio.wait([waiting])
    with progress.waiting_for("rewards"):
        named.append(progress.waits_for)
    assert named == ["generators", "rewards"]


async def test_whom_a_rollout_waited_for_when_its_time_was_over_stays_named() -> None:
    progress = RolloutProgress()

    with suppress(TimeoutError):
        async with progress.within(0.01):
            with progress.waiting_for("environment"), progress.waiting_for("generators"):
                await asyncio.Event().wait()
    assert (progress.cut_short, progress.waits_for) == (True, "generators")


def test_the_longest_wait_of_a_rollout_is_named_though_it_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = RolloutProgress()
    progress.begin()
    now += 2  # the environment makes its task
    with progress.waiting_for("generators"):
        now += 50
        with progress.waiting_for("environment"):
            now += 10
    with progress.waiting_for("environment"):
        now += 7
        progress._cut_short()
    assert (progress.waits_for, progress.longest_wait()) == ("environment", ("generators", 60.0))
