"""Weight sync over real gloo groups and HTTP servers on loopback: who gets which version, and who leaves the fleet."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch

from learner.weights.fleet import Fleet, JoinRefused
from learner.weights.publisher import Publisher, PublisherOptions, PublishReport, Snapshot
from services.http_client import HttpClient
from services.waiting import Waiting
from tests.learner.generators import FINGERPRINTS, ScriptedGenerator, probe_logprobs

PROBE = (3, 1, 4, 1, 5)
OPTIONS = PublisherOptions(
    incarnation=1,
    backend="gloo",
    host="127.0.0.1",
    bucket_bytes=4096,
    bucket_timeout_s=1.0,
    meet_timeout_s=3.0,
    commit_timeout_s=2.0,
    probe_tolerance=1e-3,
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def snapshot(version: int, *, elements: int = 3000) -> Snapshot:
    return Snapshot(
        version=version,
        tensors=[
            ("embedding", torch.full((elements // 3, 3), float(version))),
            ("norm", torch.arange(7, dtype=torch.bfloat16) + version),
        ],
        probe_token_ids=PROBE,
        probe_logprobs=probe_logprobs(PROBE),
    )


@dataclass
class Learner:
    """A publisher and its fleet. `history` holds who served after each change."""

    options: PublisherOptions
    client: HttpClient
    stirred: asyncio.Event = field(default_factory=asyncio.Event)
    reports: list[PublishReport] = field(default_factory=list)
    history: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fleet = Fleet(
            fingerprints=FINGERPRINTS, incarnation=1, announce_every_s=1.0, silence_s=60.0, changed=self._changed
        )
        self.publisher = Publisher(
            fleet=self.fleet,
            client=self.client,
            options=self.options,
            waits=Waiting(),
            published=self._published,
        )

    def _changed(self) -> None:
        self.history.append(self.serving)
        self.publisher.fleet_changed()
        self.stirred.set()

    def _published(self, report: PublishReport) -> None:
        self.reports.append(report)
        self.stirred.set()

    @property
    def serving(self) -> dict[str, str]:
        return {generator.generator_id: generator.policy_version for generator in self.fleet.serving()}

    def join(self, *generators: ScriptedGenerator) -> None:
        for generator in generators:
            self.fleet.announce(generator.announcement(), now=0.0)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(15):
            while not condition():
                self.stirred.clear()
                await self.stirred.wait()

    async def until_served(self, **versions: int) -> None:
        expected = {name: f"1.{version}" for name, version in versions.items()}
        await self.until(lambda: self.serving == expected and bool(self.reports))


@asynccontextmanager
async def learner(options: PublisherOptions = OPTIONS) -> AsyncIterator[Learner]:
    async with HttpClient() as client:
        made = Learner(options=options, client=client)
        loop = asyncio.create_task(made.publisher.run())
        try:
            yield made
        finally:
            loop.cancel()
            await asyncio.wait([loop], timeout=5)
            assert loop.cancelled(), loop


async def test_a_generator_gets_every_tensor_bit_for_bit_and_then_serves_the_version() -> None:
    async with ScriptedGenerator("a").running() as a, learner() as ours:
        ours.join(a)
        ours.publisher.offer(snapshot(0))
        async with asyncio.timeout(10):
            await ours.publisher.wait_until_served(0)
        await ours.until_served(a=0)
        for name, tensor in snapshot(0).tensors:
            assert a.weights[name].dtype == tensor.dtype
            assert torch.equal(a.weights[name], tensor)
        (report,) = ours.reports
        assert (report.version, report.members, report.pause_s) == (0, 1, 0.002)
        assert report.probe_gap < 1e-9
        assert report.total_s == pytest.approx(report.prepare_s + report.commit_s)


async def test_versions_to_the_same_generators_share_one_process_group() -> None:
    async with ScriptedGenerator("a").running() as a, ScriptedGenerator("b").running() as b, learner() as ours:
        ours.join(a, b)
        for version in range(3):
            ours.publisher.offer(snapshot(version))
            await ours.until_served(a=version, b=version)
        assert a.versions == b.versions == ["1.0", "1.1", "1.2"]
        assert [(join.epoch, join.rank_offset, join.world_size) for join in (*a.joins, *b.joins)] == [
            (1, 1, 3),
            (1, 2, 3),
        ]
        assert torch.equal(b.weights["embedding"], snapshot(2).tensors[0][1])


async def test_a_member_that_dies_in_prepare_is_left_behind_and_the_others_go_on_serving() -> None:
    dying = ScriptedGenerator("a", dies_in_prepare=lambda prepare: prepare.version == "1.1")
    async with dying.running() as a, ScriptedGenerator("b").running() as b, learner() as ours:
        ours.join(a, b)
        ours.publisher.offer(snapshot(0))
        await ours.until_served(a=0, b=0)
        begun = len(ours.history)
        ours.publisher.offer(snapshot(1))
        await ours.until_served(b=1)
        assert b.versions == ["1.0", "1.1"]
        assert [join.epoch for join in b.joins] == [1, 2]
        assert all("b" in serving for serving in ours.history[begun:]), "b was never told to be gone"


async def test_a_member_that_hangs_in_prepare_is_dropped_after_the_deadline() -> None:
    hanging = ScriptedGenerator("a", hold_prepare=asyncio.Event())
    options = replace(OPTIONS, bucket_timeout_s=0.5, bucket_bytes=1 << 30)
    async with hanging.running() as a, ScriptedGenerator("b").running() as b, learner(options) as ours:
        ours.join(a, b)
        ours.publisher.offer(snapshot(0, elements=3 << 20))
        await ours.until_served(b=0)
        assert b.weights["embedding"].shape == (1 << 20, 3)
        assert [member.generator_id for member in ours.fleet.members()] == ["b"]


async def test_a_generator_with_a_wrong_probe_is_expelled_by_name_and_stays_out() -> None:
    async with ScriptedGenerator("a", gap=0.2).running() as a, ScriptedGenerator("b").running() as b, learner() as ours:
        ours.join(a, b)
        ours.publisher.offer(snapshot(0))
        await ours.until_served(b=0)
        assert all("a" not in serving for serving in ours.history)
        with pytest.raises(JoinRefused, match=r"generator a was expelled: .* differ by 0\.2 nats .* at most 0\.001"):
            ours.join(a)
        assert [(report.members, round(report.probe_gap, 6)) for report in ours.reports] == [(1, 0.0)]


async def test_a_wrong_generator_does_not_take_a_good_one_with_it() -> None:
    wrong = ScriptedGenerator("a", gap=0.2, loads_wrong=True)
    async with wrong.running() as a, ScriptedGenerator("b").running() as b, learner() as ours:
        ours.join(a, b)
        ours.publisher.offer(snapshot(0))
        await ours.until_served(b=0)
        assert [member.generator_id for member in ours.fleet.members()] == ["b"]


async def test_a_later_gap_may_be_three_times_the_first_and_no_more() -> None:
    async with ScriptedGenerator("a", gap=9e-4).running() as a, learner() as ours:
        ours.join(a)
        ours.publisher.offer(snapshot(0))
        await ours.until_served(a=0)
        a.gap = 2.6e-3
        ours.publisher.offer(snapshot(1))
        await ours.until_served(a=1)
        a.gap = 2.8e-3
        ours.publisher.offer(snapshot(2))
        await ours.until(lambda: not ours.fleet.members())
        with pytest.raises(JoinRefused, match=r"0\.0028 nats .* at version 1\.2; at most 0\.0027"):
            ours.join(a)


async def test_the_generator_whose_checksum_differs_from_the_others_is_expelled() -> None:
    odd = ScriptedGenerator("a", loads_wrong=True)
    good = ScriptedGenerator("b"), ScriptedGenerator("c")
    async with odd.running(), good[0].running(), good[1].running(), learner() as ours:
        ours.join(odd, *good)
        ours.publisher.offer(snapshot(0))
        await ours.until_served(b=0, c=0)
        with pytest.raises(JoinRefused, match="generator a was expelled: the checksum of its loaded weights"):
            ours.join(odd)


async def test_offers_made_during_a_publish_coalesce_to_the_newest() -> None:
    gate = asyncio.Event()
    async with ScriptedGenerator("a", hold_prepare=gate).running() as a, learner() as ours:
        ours.join(a)
        ours.publisher.offer(snapshot(0))
        async with asyncio.timeout(10):
            await a.preparing.wait()
        for version in (1, 2, 3):
            ours.publisher.offer(snapshot(version))
        gate.set()
        await ours.until_served(a=3)
        assert a.versions == ["1.0", "1.3"]
        assert [report.version for report in ours.reports] == [0, 3]


async def test_a_late_joiner_raises_the_epoch_and_gets_the_newest_version() -> None:
    async with ScriptedGenerator("a").running() as a, ScriptedGenerator("b").running() as b, learner() as ours:
        ours.join(a)
        for version in (0, 1):
            ours.publisher.offer(snapshot(version))
            await ours.until_served(a=version)
        ours.join(b)
        await ours.until_served(a=1, b=1)
        assert b.versions == ["1.1"]
        assert [join.epoch for join in a.joins] == [1, 2]
        assert [join.epoch for join in b.joins] == [2]


async def test_a_generator_that_was_started_afresh_under_its_name_is_met_anew() -> None:
    async with ScriptedGenerator("a").running() as a, learner() as ours:
        ours.join(a)
        ours.publisher.offer(snapshot(0))
        await ours.until_served(a=0)
        a.restart()
        ours.join(a)
        assert ours.serving == {}, "it holds nothing that was sent"
        await ours.until_served(a=0)
        assert [join.epoch for join in a.joins] == [1, 2]
        assert a.versions == ["1.0", "1.0"]


async def test_a_generator_that_fails_to_load_leaves_until_it_announces_itself_again() -> None:
    failing = ScriptedGenerator("a", refuses_commit=lambda commit: commit.version == "1.1")
    async with failing.running() as a, ScriptedGenerator("b").running() as b, learner() as ours:
        ours.join(a, b)
        ours.publisher.offer(snapshot(0))
        await ours.until_served(a=0, b=0)
        ours.publisher.offer(snapshot(1))
        await ours.until_served(b=1)
        failing.refuses_commit = lambda _: False
        ours.join(a)
        await ours.until_served(a=1, b=1)


async def test_a_generator_that_is_gone_before_the_meeting_does_not_hold_up_the_others() -> None:
    async with ScriptedGenerator("b").running() as b, learner() as ours:
        async with ScriptedGenerator("a").running() as a:
            ours.join(a, b)
        ours.publisher.offer(snapshot(0))
        await ours.until_served(b=0)


async def test_a_stop_does_not_wait_for_a_meeting() -> None:
    options = replace(OPTIONS, meet_timeout_s=60.0)
    missing = ScriptedGenerator("a")
    missing.url = "http://127.0.0.1:9"
    async with learner(options) as ours:
        ours.join(missing)
        ours.publisher.offer(snapshot(0))
        await ours.until(lambda: not ours.fleet.members())


async def test_without_generators_an_offer_waits_for_the_first() -> None:
    async with ScriptedGenerator("a").running() as a, learner() as ours:
        ours.publisher.offer(snapshot(5))
        served = asyncio.create_task(ours.publisher.wait_until_served(5))
        ours.join(a)
        async with asyncio.timeout(10):
            await served
        assert a.versions == ["1.5"]
