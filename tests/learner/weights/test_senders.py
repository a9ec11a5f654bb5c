"""Several ranks that send: whose turn it is, and a publisher whose other rank is a real sender in this process."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import httpx
import pytest
import torch
from torch._C._distributed_c10d import HashStore

from learner.weights.probe import Probe
from learner.weights.process_group import BroadcastGroup, Bucket, LaidOut, lay_out
from learner.weights.published import Packer, Snapshot
from learner.weights.rank_sender import RankCopies, RankSender, sender_place
from learner.weights.senders import CopyShare, CopyTicket, SenderLost, brought_here, in_turns
from protocol.fleet import Announcement
from services.http.client import HttpClient
from services.process import DaemonThreads
from services.tensor_hash import tensor_hash
from tests.learner.generators import ScriptedGenerator, probe_logprobs
from tests.learner.weights.publishing import OPTIONS, PROBE, PublishingLearner, learner, tensors_of

PATIENT = replace(OPTIONS, bucket_timeout_s=30.0, meet_timeout_s=30.0, commit_timeout_s=30.0)


class SpoiledCopies(RankCopies):
    """Calls `spoil` when a version in `spoils` is asked for after its hashes."""

    def __init__(self, *spoils: int, spoil: Callable[[], object]) -> None:
        super().__init__()
        self.spoils = set(spoils)
        self._spoil = spoil
        self._hashed: set[int] = set()

    def of(self, number: int) -> tuple[LaidOut, ...]:
        if number in self.spoils & self._hashed:
            self._spoil()
        self._hashed.add(number)
        return super().of(number)


class Unstaged(ScriptedGenerator):
    """It loads what comes in place of what it serves."""

    def announcement(self) -> Announcement:
        return super().announcement().model_copy(update={"staging": False})


@contextmanager
def other_rank(copies: RankCopies | None = None) -> Iterator[tuple[RankCopies, RankSender]]:
    """The sender of rank 1."""
    copies = copies or RankCopies()
    sender = RankSender(copies, rank=1, host="127.0.0.1")
    try:
        yield copies, sender
    finally:
        sender.close()


def shared(version: int, copies: RankCopies, sender: RankSender) -> Snapshot:
    """A version of which rank 1 has all but the first tensor."""
    first, *rest = tensors_of(version)
    rest.append(("large", torch.full((4000,), version, dtype=torch.int64)))
    copies.put(version, lay_out(rest, bucket_bytes=4096))
    share = CopyShare(rank=1, nbytes=32_000, place=sender.place, ticket=CopyTicket(version))
    probe = Probe(texts=PROBE, logprobs=probe_logprobs(PROBE))
    return Snapshot(version=version, buckets=lay_out([first], bucket_bytes=4096), probe=probe, shares=[share])


def names_of(generator: ScriptedGenerator, version: int) -> set[str]:
    """Names of tensors that it has in the values of a version."""
    wanted = dict(tensors_of(version)) | {"large": torch.full((4000,), version, dtype=torch.int64)}
    return {name for name, value in generator.weights.items() if torch.equal(value, wanted[name])}


@asynccontextmanager
async def generators(ours: PublishingLearner, *names: str) -> AsyncIterator[Sequence[ScriptedGenerator]]:
    """Generators of two workers each, which have announced themselves."""
    made = [ScriptedGenerator(name, workers=2) for name in names]
    async with asyncio.TaskGroup() as tasks:
        ended = asyncio.Event()
        ready = asyncio.Semaphore(0)

        async def run(generator: ScriptedGenerator) -> None:
            async with generator.running():
                ready.release()
                await ended.wait()

        for generator in made:
            tasks.create_task(run(generator))
        for _ in made:
            await ready.acquire()
        ours.join(*made)
        try:
            yield made
        finally:
            ended.set()


async def test_joins_and_broadcasts_bring_the_parts_of_both_ranks_each_by_the_rank_that_has_it() -> None:
    with other_rank() as (copies, sender):
        async with learner(PATIENT) as ours, generators(ours, "a", "b") as made:
            for version in range(3):
                ours.publisher.offer(shared(version, copies, sender))
                await ours.until_served(a=version, b=version)
                for generator in made:
                    assert names_of(generator, version) == {"embedding", "norm", "large"}
        for generator in made:
            assert (len(generator.pulls), generator.joins[-1].senders) == (1, 2)
            mine, theirs = generator.received[0], generator.received[1]
            assert (mine % 12_000, theirs % 32_016) == (0, 0), "of each worker all that a rank has, and no more"
            assert mine == 2 * 2 * 12_000


async def test_a_copy_is_kept_as_long_as_rank_0_wants_it_and_without_it_nothing_is_published() -> None:
    with other_rank() as (copies, sender):
        async with learner(PATIENT) as ours, generators(ours, "a") as (generator,):
            ours.publisher.offer(shared(0, copies, sender))
            await ours.until_served(a=0)
            lost = shared(1, copies, sender)
            copies.keep_only([0])
            ours.publisher.offer(lost)
            ours.publisher.offer(shared(2, copies, sender))
            await ours.until_served(a=2)
        assert [commit.version for commit in generator.commits] == ["1.0", "1.2"]


async def test_a_rank_that_is_gone_keeps_versions_from_being_published_and_expels_nobody() -> None:
    with other_rank() as (copies, sender):
        async with learner(PATIENT) as ours, generators(ours, "a", "b"), HttpClient() as client:
            ours.publisher.offer(shared(0, copies, sender))
            await ours.until_served(a=0, b=0)
            gone = shared(1, copies, sender)
            sender.close()
            with pytest.raises(SenderLost, match="rank 1 of the learner does not answer"):
                await Packer(incarnation=1, threads=DaemonThreads(name="pack"), client=client).pack(gone)
            (place, *_) = [i for i, bucket in enumerate(ours.shelf.plan("1.0").buckets) if bucket.sender == 1]
            async with httpx.AsyncClient() as asking:
                url = f"{ours.url}/v1/weights/1.0/buckets/{place}?offset=0&length=8"
                answer = await asking.get(url)
            assert (answer.status_code, answer.json()["error"]["kind"]) == (503, "rank_silent")
            assert (ours.serving, ours.fleet.expulsions) == ({"a": "1.0", "b": "1.0"}, 0)


async def test_a_rank_that_hangs_takes_no_generator_out_of_service(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed_by: list[str] = []
    monkeypatch.setattr(BroadcastGroup, "close", lambda _: closed_by.append(threading.current_thread().name))
    freed = threading.Event()
    options = replace(OPTIONS, bucket_timeout_s=0.3, meet_timeout_s=0.5)
    with other_rank(SpoiledCopies(2, spoil=lambda: freed.wait(60))) as (copies, sender):
        async with learner(options) as ours, generators(ours, "a", "b"):
            for version in (0, 1):
                ours.publisher.offer(shared(version, copies, sender))
                await ours.until_served(a=version, b=version)
            ours.publisher.offer(shared(2, copies, sender))
            await ours.until(lambda: "version 1.2 comes later to a, b, which serve on" in caplog.text)
            freed.set()
            assert ours.history[-1] == {"a": "1.1", "b": "1.1"}
    ours_closed = [name for name in closed_by if name != "rank-sender"]
    assert ours_closed == ["weight-plane"] * 2, "over one it sent in vain, the other one was met in vain"


async def test_one_that_may_be_half_loaded_when_a_rank_hangs_is_out_of_service() -> None:
    freed = threading.Event()
    options = replace(OPTIONS, bucket_timeout_s=0.3, meet_timeout_s=0.5)
    with other_rank(SpoiledCopies(1, spoil=lambda: freed.wait(60))) as (copies, sender):
        async with learner(options) as ours, Unstaged("a").running() as a, ScriptedGenerator("b").running() as b:
            ours.join(a, b)
            ours.publisher.offer(shared(0, copies, sender))
            await ours.until_served(a=0, b=0)
            ours.publisher.offer(shared(1, copies, sender))
            await ours.until(lambda: ours.serving == {"b": "1.0"})
            freed.set()


def test_the_senders_take_turns_by_the_share_of_their_own_that_they_have_sent() -> None:
    few = [bucket.hashed(sender=0) for bucket in lay_out([(n, torch.zeros(4)) for n in "ab"], bucket_bytes=16)]
    many = [bucket.hashed(sender=1) for bucket in lay_out([(n, torch.zeros(4)) for n in "cdef"], bucket_bytes=16)]
    ordered = in_turns([few, many])
    assert all(isinstance(bucket, Bucket) for bucket in ordered)
    assert "".join(bucket.spec.tensors[0].name for bucket in ordered) == "cadebf"


async def test_a_sender_is_asked_by_nobody_who_lacks_its_token_and_is_found_in_the_ranks_store() -> None:
    store = HashStore()
    with other_rank() as (copies, sender):
        sender.register(store)
        assert sender_place(store, rank=1) == sender.place
        copies.put(7, lay_out([("a", torch.zeros(4))], bucket_bytes=16))
        async with httpx.AsyncClient() as asking:
            url = f"{sender.place.url}/v1/copies/7/hash"
            assert (await asking.post(url)).status_code == 401
            told, body = {"Authorization": f"Bearer {sender.place.token}"}, {"for_devices": False}
            assert [each["sender"] for each in (await asking.post(url, json=body, headers=told)).json()["buckets"]] == [
                1
            ]
            unknown = await asking.post(url.replace("/7/", "/8/"), json=body, headers=told)
            assert (unknown.status_code, unknown.json()["error"]["kind"]) == (404, "not_kept")


@pytest.mark.parametrize("for_devices", [False, True])
async def test_both_ranks_tell_the_hashes_that_devices_compute_where_weights_go_to_them(*, for_devices: bool) -> None:
    with other_rank() as (copies, sender):
        async with HttpClient() as client:
            packer = Packer(incarnation=1, threads=DaemonThreads(name="pack"), client=client, for_devices=for_devices)
            packed = await packer.pack(shared(1, copies, sender))
            assert {bucket.spec.sender for bucket in packed.buckets} == {0, 1}
            for bucket in await brought_here(packed.buckets):
                assert bucket.spec.device_hash == (tensor_hash(bucket.data) if for_devices else "")
