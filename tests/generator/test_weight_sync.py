"""A real engine that catches up by downloads, hands its requests back, and stops answering for a while."""

import asyncio
import dataclasses
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING

import pytest

from generator.weights.plan import WeightSyncError
from protocol.fleet import PULL_TOOK_TOO_LONG, PULLED_EPOCH, Commit, Pull
from services.http.client import HttpClient
from services.http.metrics import Metrics
from services.http.refusals import RequestRefused
from tests.generator.conftest import Rig, largest_gap, pack, sample
from tests.generator.engine.test_engine import TOLERANCE, covers, gaps
from tests.generator.scripted_learner import ScriptedDownloads

if TYPE_CHECKING:
    from generator.serving import Serving
    from generator.weight_sync import WeightSync

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

PROBE = (3, 4, 5, 9, 11)


async def until(condition: Callable[[], bool]) -> None:
    """Looks every hundredth of a second, for a minute."""
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("waited a minute in vain")


def serving_of(rig: Rig) -> "Serving":
    from generator.serving import GeneratorMetrics, Serving

    return Serving(
        engine=rig.engine,
        generator_id="g",
        vocabulary_size=32,
        max_model_len=1024,
        max_waiting_requests=100,
        metrics=GeneratorMetrics(Metrics("generator"), engine=rig.engine),
    )


@asynccontextmanager
async def sync_with(rig: Rig, learner: ScriptedDownloads) -> AsyncIterator["tuple[WeightSync, Serving]"]:
    from generator.serving import GeneratorMetrics
    from generator.weight_sync import Puller, WeightSync

    serving = serving_of(rig)
    rig.sender = None
    async with learner.running(), HttpClient() as client:
        yield (
            WeightSync(
                engine=rig.engine,
                serving=serving,
                metrics=GeneratorMetrics(Metrics("generator"), engine=rig.engine),
                puller=Puller(client=client, learner=learner.url),
                folder=None,
            ),
            serving,
        )


def changed(rig: Rig, *, seed: int) -> ScriptedDownloads:
    """A learner with other weights than the engine's."""
    rig.policy.change(seed=seed)
    return ScriptedDownloads(buckets=pack(rig.policy.tensors()), version=rig.next_version())


async def test_a_downloaded_version_is_committed_and_agrees_with_the_learners_logprobs(rig: Rig) -> None:
    learner = changed(rig, seed=21)
    async with sync_with(rig, learner) as (sync, serving):
        await sync.pull(Pull(version=learner.version, deadline_s=60.0))
        committed = await sync.commit(Commit(version=learner.version, epoch=PULLED_EPOCH, probe=(PROBE, PROBE[1:])))
        expected = (*rig.policy.logprobs(PROBE), *rig.policy.logprobs(PROBE[1:]))
        assert committed.probe_logprobs == pytest.approx(expected, abs=TOLERANCE)
        assert (serving.version, serving.condition) == (learner.version, "able")
    assert await gaps(rig) < TOLERANCE


async def test_damaged_and_failed_chunks_are_asked_for_again(rig: Rig) -> None:
    learner = changed(rig, seed=22)
    chunks = sum(-(-bucket.spec.nbytes // 50_000) for bucket in learner.buckets)
    learner.spoil = lambda number: {1: "damage", 3: "fail"}.get(number, "")
    async with sync_with(rig, learner) as (sync, _):
        await sync.pull(Pull(version=learner.version, deadline_s=60.0))
        await sync.commit(Commit(version=learner.version, epoch=PULLED_EPOCH))
    assert learner.asked == chunks + 2
    assert await gaps(rig) < TOLERANCE


async def test_a_download_that_does_not_end_leaves_the_old_weights_serving_and_names_the_learner(rig: Rig) -> None:
    await rig.publish()
    before = rig.policy.snapshot()
    learner = changed(rig, seed=23)
    learner.spoil = lambda _: "hang"
    async with sync_with(rig, learner) as (sync, _):
        with pytest.raises(RequestRefused, match=f"version {learner.version} from {learner.url} failed") as refusal:
            await sync.pull(Pull(version=learner.version, deadline_s=1.0))
        assert refusal.value.problem.kind == PULL_TOOK_TOO_LONG
        with pytest.raises(RequestRefused, match="connect again first"):
            await sync.commit(Commit(version=learner.version, epoch=PULLED_EPOCH))
        with pytest.raises(RequestRefused, match="not kept here"):
            await sync.pull(Pull(version="9.9", deadline_s=10.0))
    rig.policy.restore(before)
    assert await gaps(rig) < TOLERANCE


async def test_a_later_download_ends_an_earlier_one(rig: Rig) -> None:
    learner = changed(rig, seed=24)
    learner.spoil = lambda number: "hang" if number == 0 else ""
    async with sync_with(rig, learner) as (sync, _):
        first = asyncio.create_task(sync.pull(Pull(version=learner.version, deadline_s=60.0)))
        await learner.hanging.wait()
        await sync.pull(Pull(version=learner.version, deadline_s=60.0))
        with pytest.raises(RequestRefused, match="was given up: another sync began"):
            await first
        await sync.commit(Commit(version=learner.version, epoch=PULLED_EPOCH))
    assert await gaps(rig) < TOLERANCE


async def test_a_generator_that_leaves_takes_no_weights_but_ends_a_commit(rig: Rig) -> None:
    learner = changed(rig, seed=25)
    async with sync_with(rig, learner) as (sync, serving):
        await sync.pull(Pull(version=learner.version, deadline_s=60.0))
        await serving.drain(timeout_s=0.1)
        assert serving.condition == "leaving"
        with pytest.raises(RequestRefused, match="this generator is leaving"):
            await sync.pull(Pull(version=learner.version, deadline_s=60.0))
        await sync.commit(Commit(version=learner.version, epoch=PULLED_EPOCH))
    assert await gaps(rig) < TOLERANCE


async def test_requests_that_are_handed_back_end_with_all_their_tokens_and_an_abort(rig: Rig) -> None:
    version = await rig.publish()
    sampling = asyncio.create_task(sample(rig, n=3, max_tokens=900))
    alone = asyncio.create_task(sample(rig, n=1, max_tokens=900))
    before = rig.engine.counters().tokens_total
    await until(lambda: rig.engine.counters().tokens_total >= before + 200)
    await rig.engine.hand_back()
    async with asyncio.timeout(60):
        completions = [*await sampling, *await alone]
    assert [completion.finish_reason for completion in completions] == ["abort"] * 4
    for completion in completions:
        assert covers(completion)
        assert 0 < len(completion.token_ids) == len(completion.behavior_logprobs) < 900
        assert {span.version for span in completion.spans} == {version}
        assert largest_gap(rig, completion) < TOLERANCE
    assert await gaps(rig) < TOLERANCE


async def test_requests_that_wait_for_weights_are_handed_back_without_tokens(rig: Rig) -> None:
    await rig.engine.llm.close_gate()
    try:
        waiting = asyncio.create_task(sample(rig, n=2))
        await until(lambda: rig.engine.llm.waiting_at_the_gate > 0)
        await rig.engine.hand_back()
        completions = await waiting
        assert [(one.finish_reason, one.token_ids) for one in completions] == [("abort", ())] * 2
    finally:
        rig.engine.llm.open_gate()


async def test_an_engine_that_is_stopped_is_noticed_and_its_requests_go_back_until_it_answers_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from generator.service import watch_answers

    await rig.publish()
    monkeypatch.setattr(rig.engine._calls, "stall_timeout_s", 1.0)
    serving = serving_of(rig)
    serving.holds(rig.engine.version)
    watch = asyncio.create_task(watch_answers(rig.engine, serving=serving))
    await rig.stage(pack(rig.policy.tensors()), version="9.9")
    sampling = asyncio.create_task(sample(rig, n=2, max_tokens=900))
    await until(lambda: rig.engine.counters().running > 0)
    with stopped_engine():
        await until(lambda: serving.condition == "stalled")
        assert not serving.ready
        async with asyncio.timeout(60):
            completions = await sampling
        assert {completion.finish_reason for completion in completions} == {"abort"}
        assert all(covers(completion) for completion in completions)
        with pytest.raises(WeightSyncError, match="did not answer within 1 s"):
            await rig.engine.commit(version="9.9")
    await until(lambda: serving.condition == "able")
    watch.cancel()
    with suppress(asyncio.CancelledError):
        await watch
    assert not rig.engine.unloaded
    monkeypatch.undo()
    rig.sender = None
    rig.policy.change(seed=31)
    await rig.publish()
    assert await gaps(rig) < TOLERANCE


async def test_an_engine_that_is_stopped_within_a_load_serves_nothing_until_a_whole_load(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = await rig.publish()
    rig.policy.change(seed=32)
    await rig.stage(pack(rig.policy.tensors()), version="9.9")
    monkeypatch.setattr(rig.engine._calls, "stall_timeout_s", 1.0)
    monkeypatch.setattr(rig.engine, "_options", dataclasses.replace(rig.engine._options, pause_ttl_s=1.0))
    pause = rig.engine._pause

    async def pause_and_stop() -> None:
        await pause()
        os.kill(engine_process(), signal.SIGSTOP)

    monkeypatch.setattr(rig.engine, "_pause", pause_and_stop)
    try:
        with pytest.raises(WeightSyncError) as failure:
            await rig.engine.commit(version="9.9")
    finally:
        os.kill(engine_process(), signal.SIGCONT)
    assert failure.value.unloaded
    assert rig.engine.version == version
    monkeypatch.undo()
    frozen = asyncio.create_task(sample(rig, n=2))
    rig.sender = None
    version = await rig.publish()
    for completion in await frozen:
        assert {span.version for span in completion.spans} == {version}
        assert largest_gap(rig, completion) < TOLERANCE


@contextmanager
def stopped_engine() -> Iterator[None]:
    """The engine's process is stopped within it."""
    os.kill(engine_process(), signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(engine_process(), signal.SIGCONT)


def engine_process() -> int:
    (child,) = [one for one in multiprocessing.active_children() if "EngineCore" in one.name]
    assert child.pid is not None
    return child.pid
