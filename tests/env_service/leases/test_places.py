"""Places of environments whose rollouts take long beside short ones, in a time that only counts."""

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from env_service.leases.places import LeasePlaces, PlaceRule


@dataclass
class CountedTime:
    """A clock that moves to the next sleeper once nobody has anything to do."""

    now: int = 0
    _sleepers: list[tuple[int, int, asyncio.Event]] = field(default_factory=list)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    async def sleep(self, duration: int) -> None:
        woken = asyncio.Event()
        heapq.heappush(self._sleepers, (self.now + duration, next(self._numbers), woken))
        await woken.wait()

    async def run(self, until: int) -> None:
        while self._sleepers and self._sleepers[0][0] <= until:
            self.now, _, woken = heapq.heappop(self._sleepers)
            woken.set()
            for _ in range(8):
                await asyncio.sleep(0)


@dataclass(frozen=True)
class PlaceUse:
    """Ends by environment, the time in its places, and the most of them that it held at once, after a while."""

    ended: Counter[str]
    time: Counter[str]
    most: Counter[str]


async def simulated(
    count: int, rules: Mapping[str, PlaceRule], durations: Mapping[str, int], *, until: int, waiting: int = 20
) -> PlaceUse:
    """`waiting` leases of each environment want a place at any time, in turn; each holds it for the duration."""
    clock, places, ids = CountedTime(), LeasePlaces(count, rules), itertools.count()
    found = PlaceUse(Counter(), Counter(), Counter())

    async def ask_again_and_again(name: str) -> None:
        while True:
            async with places.held((1, next(ids), 0), name):
                assert places.running.total() <= count
                assert places.running[name] <= (rules.get(name, PlaceRule()).most or count)
                if clock.now > 2 * max(durations.values()):  # those who came first had the places that were free
                    found.most[name] = max(found.most[name], places.running[name])
                began = clock.now
                await clock.sleep(durations[name])
                found.time[name] += clock.now - began
                found.ended[name] += 1

    tasks = [asyncio.create_task(ask_again_and_again(name)) for _ in range(waiting) for name in durations]
    await asyncio.sleep(0)
    await clock.run(until)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert places.running.total() == places.waiting.total() == 0
    return found


def shares(of: Counter[str], names: Sequence[str]) -> list[float]:
    return [of[name] / of.total() for name in names]


HOURS = {"hours": 50, "short": 1}


async def test_without_rules_the_long_episodes_hold_nearly_all_places() -> None:
    held = await simulated(8, {}, HOURS, until=800)
    assert held.time["hours"] / held.time.total() > 0.9
    assert held.ended["short"] < 2 * held.ended["hours"] + 80


@pytest.mark.parametrize(("weights", "expected"), [((1.0, 1.0), 4), ((1.0, 3.0), 2), ((3.0, 1.0), 6)])
async def test_places_are_shared_by_weight_however_long_episodes_take(
    weights: tuple[float, float], expected: int
) -> None:
    rules = {name: PlaceRule(weight=weight) for name, weight in zip(HOURS, weights, strict=True)}
    held = await simulated(8, rules, HOURS, until=800)
    assert held.most == {"hours": expected, "short": 8 - expected}
    assert shares(held.time, ["hours"]) == pytest.approx([expected / 8], abs=0.05)


async def test_a_limit_is_never_exceeded_and_the_other_places_are_used() -> None:
    held = await simulated(8, {"hours": PlaceRule(most=3)}, HOURS, until=800)
    assert held.most == {"hours": 3, "short": 5}
    assert held.ended["short"] > 800 * 4


async def test_short_episodes_do_not_starve_long_ones() -> None:
    rules = {"short": PlaceRule(weight=100.0)}
    held = await simulated(8, rules, HOURS, until=800, waiting=40)
    assert held.ended["hours"] >= 10


async def test_a_lease_that_waits_behind_a_limit_keeps_no_other_one_waiting_and_goes_on_when_it_may() -> None:
    places = LeasePlaces(2, {"hours": PlaceRule(most=1)})
    order: list[str] = []
    gates = {name: asyncio.Event() for name in ("first", "second", "third")}

    async def hold(name: str, number: int, environment: str) -> None:
        async with places.held((1, number, 0), environment):
            order.append(name)
            await gates[name].wait()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(hold("first", 0, "hours"))
        blocked = tasks.create_task(hold("second", 1, "hours"))
        tasks.create_task(hold("third", 2, "short"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (order, places.waiting["hours"]) == (["first", "third"], 1)
        gates["first"].set()
        for _ in range(4):
            await asyncio.sleep(0)
        assert order[2:] == ["second"]
        blocked.cancel()
        gates["third"].set()
    assert places.running.total() == 0


async def test_a_place_that_is_given_to_a_lease_at_the_moment_of_its_cancellation_goes_to_the_next() -> None:
    places, got = LeasePlaces(1), asyncio.Event()

    async def hold(number: int, until: asyncio.Event, began: asyncio.Event) -> None:
        async with places.held((1, number, 0), "e"):
            began.set()
            await until.wait()

    leave, never = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(hold(0, leave, asyncio.Event()))
        await asyncio.sleep(0)
        second = tasks.create_task(hold(1, never, asyncio.Event()))
        third = tasks.create_task(hold(2, never, got))
        await asyncio.sleep(0)
        leave.set()
        await asyncio.sleep(0)
        second.cancel()
        async with asyncio.timeout(60):
            await got.wait()
        third.cancel()


@pytest.mark.parametrize(("most", "together"), [(1, 1), (2, 1), (3, 1), (4, 2)])
async def test_evaluation_and_training_of_an_environment_with_a_limit_starve_neither(most: int, together: int) -> None:
    """Of nine places; ten leases of either kind want one at any time."""
    clock, places, ids = CountedTime(), LeasePlaces(9, {"e": PlaceRule(most=most)}), itertools.count()
    held, ended, at_once = Counter[int](), Counter[int](), Counter[int]()

    async def ask_again_and_again(kind: int) -> None:
        while True:
            async with places.held((kind, next(ids), 0), "e"):
                held[kind] += 1
                assert held.total() <= most
                at_once[kind] = max(at_once[kind], held[kind])
                await clock.sleep(5)
                held[kind] -= 1
                ended[kind] += 1

    tasks = [asyncio.create_task(ask_again_and_again(kind)) for _ in range(10) for kind in (1, 0)]
    await asyncio.sleep(0)
    at_once.clear()
    await clock.run(400)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (at_once[0], at_once[1]) == (together, max(1, most - together))
    assert ended[0] / ended.total() == pytest.approx(1 / 2 if most == 1 else together / most, abs=0.02)


async def test_evaluation_has_all_places_of_an_environment_with_a_limit_while_no_training_of_it_waits() -> None:
    places, never = LeasePlaces(9, {"e": PlaceRule(most=3)}), asyncio.Event()

    async def hold(kind: int, number: int, environment: str) -> None:
        async with places.held((kind, number, 0), environment):
            await never.wait()

    tasks = [asyncio.create_task(hold(0, number, "e")) for number in range(5)]
    tasks += [asyncio.create_task(hold(1, number, "other")) for number in range(9)]
    for _ in range(2):
        await asyncio.sleep(0)
    assert (places.running["e"], places.running["other"]) == (3, 6)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert places.running.total() == places.waiting.total() == 0
