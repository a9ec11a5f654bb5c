"""The learner's verdict on its run, from generators over HTTP and from what env_services say."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
from aiohttp import web

from learner.reports import run_monitor
from learner.reports.run_monitor import GeneratorsLoad, RunMonitor
from learner.weights.fleet import FleetMembers
from protocol.costs import CostSums
from protocol.messages import StatusNote
from protocol.model import PolicyVersion
from protocol.status import AskedPeer, EventStatus, Status, UsageStatus
from services.diagnosis.asking import ask
from services.diagnosis.verdict import RunVerdict
from services.http.tls import TlsFiles
from tests.env_service.peers import hanging
from tests.learner.envs import SetClock
from tests.learner.generators import FINGERPRINTS, announcement
from tests.services.diagnosis.statuses import load, status

PUBLISHED = (EventStatus(name="publish", age_s=5.0),)
ENV = "http://127.0.0.1:7330"


class WatchedFleet:
    """A monitor over what a test sets, and the changes of its verdict."""

    def __init__(self) -> None:
        self.own = status("learner", name="run", load=load(busy=0.7), events=PUBLISHED)
        self.notes: list[StatusNote] = []
        self.changes: list[RunVerdict] = []
        self.clock = SetClock()
        self.fleet = FleetMembers(
            fingerprints=FINGERPRINTS, incarnation=3, announce_every_s=2.0, silence_s=15.0, changed=lambda: None
        )
        self.monitor = RunMonitor(
            own=lambda: self.own, url="http://127.0.0.1:7300", fleet=self.fleet, notes=lambda: self.notes,
            changed=self.changes.append, token=None, tls=TlsFiles(), clock=self.clock,
        )  # fmt: skip

    def join(self, url: str, name: str = "g") -> None:
        self.fleet.announce(announcement(name, url), now=0.0)
        self.fleet.committed(name, version=PolicyVersion(3, 1), fingerprint="f")

    def say(self, *rewards: AskedPeer, **waits: float) -> None:
        env = status("env-service", load=load(running=9, limit=32, **waits))
        self.notes = [StatusNote(url=ENV, status=env, rewards=rewards)]

    async def judged(self, times: int = 2) -> RunVerdict:
        for _ in range(times):
            await self.monitor.look()
        assert self.monitor.verdict is not None
        return self.monitor.verdict


@asynccontextmanager
async def generator(told: Status) -> AsyncIterator[str]:
    """The address of a generator that says this of itself."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=told.model_dump_json(), content_type="application/json")

    app = web.Application()
    app.router.add_get("/v1/status", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


GENERATOR = status("generator", load=load(busy=0.9, running=20, limit=64))


async def test_a_look_that_fails_is_said_once_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_monitor, "_EVERY_S", 0.001)
    watched, looks, said = WatchedFleet(), 0, asyncio.Event()

    def own() -> Status:
        nonlocal looks
        looks += 1
        if looks < 4:
            raise ValueError("a number that nobody expected")
        return watched.own

    watched.monitor = RunMonitor(
        own=own, url="http://127.0.0.1:7300", fleet=watched.fleet, notes=list, changed=lambda _: said.set(),
        token=None, tls=TlsFiles(), clock=watched.clock,
    )  # fmt: skip
    running = asyncio.create_task(watched.monitor.run())
    async with asyncio.timeout(60):
        await said.wait()
    assert not running.done()
    running.cancel()
    assert [record.getMessage()[:26] for record in caplog.records] == ["there is no verdict on thi"]


async def test_a_verdict_holds_once_it_was_found_twice_and_is_told_once() -> None:
    watched = WatchedFleet()
    watched.say()
    async with generator(GENERATOR) as url:
        watched.join(url)
        await watched.monitor.look()
        assert watched.monitor.verdict is None
        assert (await watched.judged()).state == "healthy"
        watched.say(rewards=9.0)
        watched.own = status("learner", name="run", load=load(busy=0.1), events=PUBLISHED)
        await watched.monitor.look()
        assert watched.monitor.verdict is not None
        assert watched.monitor.verdict.state == "healthy", "one late answer is no illness"
        assert (await watched.judged()).cause == "rewards"
        watched.say(rewards=8.0)
        assert (await watched.judged(1)).sentence.startswith("Rewards bound: 8 of 9")
    assert [verdict.cause for verdict in watched.changes] == ["", "rewards"], "numbers alone are no news"


async def test_an_env_service_that_cannot_say_hello_yet_tells_of_the_reward_service_that_is_not_there() -> None:
    watched = WatchedFleet()
    watched.say(AskedPeer(kind="reward-service", url="http://127.0.0.1:7320", condition="dead", complaint="no one"))

    found = await watched.judged()

    assert (found.state, found.who) == ("sick", "reward-service localhost:7320")
    assert found.remedy.startswith("start it: reward-service --config")


async def test_a_generator_that_hangs_is_asked_also_after_the_fleet_has_lost_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_monitor, "ask", partial(ask, deadline_s=0.5))
    watched, connections = WatchedFleet(), list[asyncio.StreamWriter]()
    watched.say()
    async with hanging(connections) as url:
        watched.join(url)
        before = await watched.judged()
        watched.fleet.lost("g")
        after = await watched.judged()

    for found in (before, after):
        assert found.state == "sick"
        assert found.sentence.startswith("generator localhost:")
        assert "hangs" in found.sentence


async def test_a_generator_that_took_its_leave_and_one_whose_work_others_do_are_not_missed() -> None:
    watched = WatchedFleet()
    watched.say()
    async with generator(GENERATOR) as url:
        watched.join(url, "stays")
        watched.join("http://127.0.0.1:1", "dies")
        watched.join("http://127.0.0.1:2", "leaves")
        leaving = announcement("leaves", "http://127.0.0.1:2", condition="leaving")
        watched.fleet.announce(leaving, now=1.0)
        await watched.monitor.look()
        watched.fleet.lost("dies")
        watched.fleet.lost("leaves")
        assert (await watched.judged()).state == "healthy"
        assert {proc.name for proc in watched.monitor.procs if proc.kind == "generator"} == {
            f"generator localhost:{url.rpartition(':')[2]}"
        }


@pytest.mark.parametrize(("has_all", "expected"), [(True, [None, 1.5, None, None]), (False, [None] * 4)])
async def test_the_cores_that_a_machine_uses_are_told_between_two_loads_of_one_that_has_all_of_them(
    monkeypatch: pytest.MonkeyPatch, has_all: bool, expected: list[float | None]
) -> None:
    watched, used_s = WatchedFleet(), iter([100.0, 130.0, None, 150.0])
    monkeypatch.setattr(run_monitor, "machine_cpu_s", lambda: next(used_s))
    monkeypatch.setattr(run_monitor, "has_whole_machine", lambda: has_all)
    told = list[float | None]()
    async with generator(GENERATOR) as url:
        watched.join(url)
        await watched.monitor.look()
        for _ in range(4):
            found = watched.monitor.generators_load()
            assert found is not None
            told.append(found.machine_cores)
            watched.clock.now += 20.0
    assert told == expected, "30 s of cores in 20 s; nobody tells; no load before"


async def test_the_load_of_all_generators_is_told_together() -> None:
    watched = WatchedFleet()
    assert watched.monitor.generators_load() is None
    costs = CostSums(products=((1, 2, 0), (2, 4, 0), (0, 0, 0)), seconds=(0.5, 1.0, 0.0))
    first = GENERATOR.model_copy(
        update={"usage": UsageStatus(cores=0.5, cpu_s=30.0, memory_bytes=1), "step_costs": costs}
    )
    other = first.model_copy(update={"pid": 2, "load": load(busy=0.5, per_s=3, running=10, limit=64)})
    watched.own = watched.own.model_copy(update={"usage": UsageStatus(cores=0.75, memory_bytes=1), "host": "elsewhere"})
    async with generator(first) as one, generator(other) as two:
        watched.join(one, "a")
        watched.join(two, "b")
        await watched.monitor.look()

    assert watched.monitor.generators_load() == GeneratorsLoad(
        generators=2,
        running=30.0,
        limit=128,
        tokens_per_s=4.0,
        busy=0.7,
        cores={"generator": 1.0, "learner": 0.75},
        cpu_s={"generator": 60.0},
        step_costs=(costs + costs).model_dump(),
        hosts=2,
    )
