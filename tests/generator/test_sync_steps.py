"""Steps of a weight sync in an order that is not the learner's own, and what a generator serves after each."""

import asyncio
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from generator.engine.records import CommitReport, ScoredSequence
from generator.weights.plan import WeightSyncError
from protocol.fleet import (
    PULLED_EPOCH,
    BucketSpec,
    Commit,
    FormerLoad,
    JoinGroup,
    Prepare,
    Pull,
    Reprobe,
    SharedMemory,
    TensorSpec,
)
from services.http.metrics import Metrics
from services.http.refusals import RequestRefused

with warnings.catch_warnings():  # those of vLLM
    warnings.simplefilter("ignore")
    from generator.serving import GeneratorMetrics, Serving
    from generator.weight_sync import WeightSync


@dataclass
class ScriptedEngine:
    """Does as it is told, and notes it. A commit fails with `fails`, if that is given. If `busy`, it scores nothing."""

    version: str = "1.4"
    fails: WeightSyncError | None = None
    busy: bool = False
    checksum: str = ""
    """Of what is loaded; if there is none, one of the version."""
    beside: asyncio.Barrier | None = None
    """Where the hash of the weights and the scores wait for each other."""
    slow: asyncio.Event | None = None
    """Set by the first files that are staged, which takes for ever."""
    meeting: asyncio.Event | None = None
    """Set when the others are there whom a connection is to meet."""
    receiving: asyncio.Event | None = None
    """Set when a broadcast has come."""
    stage_fails: WeightSyncError | None = None
    done: list[str] = field(default_factory=list)
    is_alive: bool = True

    async def join_group(self, group: JoinGroup) -> None:
        if self.meeting is not None:
            await self.meeting.wait()
        self.done.append(f"join {group.epoch}")

    async def stage(self, plan: Prepare) -> None:
        if self.receiving is not None:
            await self.receiving.wait()
        if self.stage_fails is not None:
            raise self.stage_fails
        self.done.append(f"stage {plan.version}")

    async def stage_files(self, plan: Prepare, *, paths: Sequence[str]) -> None:
        if self.slow is not None and not self.slow.is_set():
            self.slow.set()
            await asyncio.Event().wait()
        self.done.append(f"stage {plan.version}{''.join(paths)}")

    async def commit(self, *, version: str) -> CommitReport:
        self.done.append(f"commit {version}")
        if self.fails is not None:
            raise self.fails
        self.version = version
        return CommitReport(version=version, load_s=0.0, pause_s=0.0)

    async def fingerprint(self, *, version: str) -> str:
        if self.beside is not None:
            await self.beside.wait()
        return self.checksum or f"f{version}"

    async def score(self, *, request_id: str, token_ids: Sequence[int], before_others: bool) -> ScoredSequence:
        if self.busy:
            await asyncio.Event().wait()
        if self.beside is not None:
            await self.beside.wait()
        return ScoredSequence(logprobs=(-1.0,) * (len(token_ids) - 1), top_token_ids=(), top_logprobs=(), version="")


BUCKETS = (
    BucketSpec(tensors=(TensorSpec(name="w", dtype="float32", shape=(4,), offset=0),), nbytes=16, xxh3="0" * 16),
)


class ScriptedSource:
    """Has every version."""

    learner = "http://learner"

    async def download(self, version: str, folder: Path, *, form: str) -> tuple[Prepare, Sequence[str]]:
        return Prepare(version=version, epoch=PULLED_EPOCH, buckets=BUCKETS), ()


@dataclass
class ServingParts:
    """It serves version 1.4 at first."""

    engine: ScriptedEngine
    serving: Serving
    sync: WeightSync

    async def refused(self, step: Any) -> str:
        """The kind of the refusal."""
        with pytest.raises(RequestRefused) as refusal:
            await step
        return refusal.value.problem.kind


@pytest.fixture
def generator() -> ServingParts:
    engine = ScriptedEngine()
    given = cast("Any", engine)
    metrics = GeneratorMetrics(Metrics("generator"), engine=given)
    serving = Serving(
        engine=given, generator_id="g", vocabulary_size=8, max_model_len=8, max_waiting_requests=2, metrics=metrics
    )
    serving.holds("1.4")
    source = cast("Any", ScriptedSource())
    sync = WeightSync(engine=given, serving=serving, metrics=metrics, puller=source, folder=None, probe_s=0.01)
    return ServingParts(engine, serving, sync)


def group(epoch: int) -> JoinGroup:
    return JoinGroup(
        epoch=epoch, backend="gloo", host="h", port=1, rank_offset=1, world_size=2,
        meet_timeout_s=1.0, bucket_timeout_s=1.0,
    )  # fmt: skip


def plan(version: str, *, epoch: int) -> Prepare:
    return Prepare(version=version, epoch=epoch, buckets=BUCKETS)


async def test_a_version_that_is_not_the_staged_one_is_never_loaded(generator: ServingParts) -> None:
    await generator.sync.join(group(1))
    await generator.sync.prepare(plan("1.5", epoch=1))

    assert await generator.refused(generator.sync.commit(Commit(version="1.6", epoch=1))) == "not_staged"

    assert generator.engine.done == ["join 1", "stage 1.5"]
    assert generator.serving.version == "1.4"
    await generator.sync.commit(Commit(version="1.5", epoch=1))
    assert generator.serving.version == "1.5"


async def test_what_was_committed_has_to_be_staged_again(generator: ServingParts) -> None:
    await generator.sync.pull(Pull(version="1.5", deadline_s=10.0))
    await generator.sync.commit(Commit(version="1.5", epoch=PULLED_EPOCH))

    again = generator.sync.commit(Commit(version="1.5", epoch=PULLED_EPOCH))

    assert await generator.refused(again) == "not_staged"
    assert generator.engine.done == ["stage 1.5", "commit 1.5"]


async def test_a_commit_tells_what_the_one_before_it_had_loaded(generator: ServingParts) -> None:
    formers = []
    for version, digest in (("1.5", "d5"), ("2.5", "d5"), ("2.6", "")):
        await generator.sync.pull(Pull(version=version, deadline_s=10.0))
        committed = await generator.sync.commit(Commit(version=version, epoch=PULLED_EPOCH, digest=digest))
        formers.append(committed.former)
    assert formers == [
        None,
        FormerLoad(version="1.5", digest="d5", fingerprint="f1.5"),
        FormerLoad(version="2.5", digest="d5", fingerprint="f2.5"),
    ]


async def test_a_load_that_did_not_take_place_is_not_taken_for_one_by_the_next_commit(generator: ServingParts) -> None:
    formers = []
    for version, checksum in (("1.5", "f5"), ("1.6", "f5"), ("2.6", "f5"), ("2.7", "f7"), ("2.8", "f8")):
        generator.engine.checksum = checksum
        await generator.sync.pull(Pull(version=version, deadline_s=10.0))
        commit = Commit(version=version, epoch=PULLED_EPOCH, digest=f"d{version[-1]}")
        formers.append((await generator.sync.commit(commit)).former)
    stayed = FormerLoad(version="1.5", digest="d5", fingerprint="f5")
    assert formers == [None, stayed, stayed, stayed, FormerLoad(version="2.7", digest="d7", fingerprint="f7")]


@pytest.mark.parametrize("unloaded", [True, False])
async def test_what_a_failed_load_left_is_what_the_next_commit_tells(generator: ServingParts, unloaded: bool) -> None:
    told = []
    for number, failure in (("5", None), ("6", WeightSyncError("no room", unloaded=unloaded)), ("7", None)):
        generator.engine.fails = failure
        await generator.sync.pull(Pull(version=f"1.{number}", deadline_s=10.0))
        commit = generator.sync.commit(Commit(version=f"1.{number}", epoch=PULLED_EPOCH, digest=f"d{number}"))
        if failure is None:
            told.append((await commit).former)
        else:
            await generator.refused(commit)
    left = FormerLoad(version="1.5", digest="d5", fingerprint="f1.5")
    assert told == [None, None if unloaded else left]


async def test_weights_are_hashed_beside_the_probe(generator: ServingParts) -> None:
    generator.engine.beside = asyncio.Barrier(2)
    await generator.sync.pull(Pull(version="1.5", deadline_s=10.0))
    commit = Commit(version="1.5", epoch=PULLED_EPOCH, probe=((1, 2, 3),))
    committed = await asyncio.wait_for(generator.sync.commit(commit), 5)
    assert (committed.fingerprint, committed.probe_logprobs) == ("f1.5", (-1.0, -1.0))


async def test_a_probe_that_the_commit_did_not_come_to_can_be_asked_for_again(generator: ServingParts) -> None:
    texts = ((1, 2, 3), (4, 5))
    generator.engine.busy = True
    await generator.sync.pull(Pull(version="1.5", deadline_s=10.0))
    committed = await generator.sync.commit(Commit(version="1.5", epoch=PULLED_EPOCH, probe=texts))
    assert committed.probe_logprobs == ()
    assert (await generator.sync.probe(Reprobe(version="1.5", probe=texts))).probe_logprobs == ()

    generator.engine.busy = False
    assert (await generator.sync.probe(Reprobe(version="1.5", probe=texts))).probe_logprobs == (-1.0,) * 3
    assert await generator.refused(generator.sync.probe(Reprobe(version="1.4", probe=texts))) == "not_served"


async def test_a_step_of_an_earlier_connection_is_refused(generator: ServingParts) -> None:
    await generator.sync.join(group(1))
    await generator.sync.prepare(plan("1.5", epoch=1))
    await generator.sync.join(group(2))

    assert await generator.refused(generator.sync.prepare(plan("1.5", epoch=1))) == "wrong_epoch"
    assert await generator.refused(generator.sync.commit(Commit(version="1.5", epoch=1))) == "wrong_epoch"

    assert generator.engine.done == ["join 1", "stage 1.5", "join 2"]


async def test_a_connection_during_which_a_download_begins_is_given_up(generator: ServingParts) -> None:
    """As after a cut of the link, when a request to the process that had the name before comes late."""
    generator.engine.meeting = asyncio.Event()
    joining = asyncio.ensure_future(generator.sync.join(group(2)))
    await asyncio.sleep(0)
    pulling = asyncio.ensure_future(generator.sync.pull(Pull(version="1.12", deadline_s=10.0)))
    await asyncio.sleep(0)
    generator.engine.meeting.set()

    assert await generator.refused(joining) == "superseded"
    assert await generator.refused(generator.sync.prepare(plan("1.10", epoch=2))) == "wrong_epoch"
    await pulling
    await generator.sync.commit(Commit(version="1.12", epoch=PULLED_EPOCH))
    assert generator.serving.version == "1.12"


async def test_a_connection_ends_a_download(generator: ServingParts) -> None:
    generator.engine.slow = asyncio.Event()
    download = asyncio.ensure_future(generator.sync.pull(Pull(version="1.4", deadline_s=10.0)))
    await generator.engine.slow.wait()

    await generator.sync.join(group(1))

    assert await generator.refused(download) == "superseded"
    await generator.sync.prepare(plan("1.5", epoch=1))
    await generator.sync.commit(Commit(version="1.5", epoch=1))


async def test_what_is_received_while_another_sync_begins_is_not_staged_and_ends_nothing_of_it(
    generator: ServingParts,
) -> None:
    for fails in (None, WeightSyncError("the sender is silent")):
        await generator.sync.join(group(1))
        generator.engine.receiving, generator.engine.stage_fails = asyncio.Event(), fails
        preparing = asyncio.ensure_future(generator.sync.prepare(plan("1.5", epoch=1)))
        await asyncio.sleep(0)
        await generator.sync.join(group(2))
        generator.engine.receiving.set()

        assert await generator.refused(preparing) == ("prepare_failed" if fails else "superseded")
        assert await generator.refused(generator.sync.commit(Commit(version="1.5", epoch=2))) == "not_staged"
        generator.engine.receiving = generator.engine.stage_fails = None
        await generator.sync.prepare(plan("1.6", epoch=2))


async def test_weights_in_the_learners_memory_need_no_connection_and_end_a_download(generator: ServingParts) -> None:
    files = ("/proc/1/fd/7",)
    generator.engine.slow = asyncio.Event()
    download = asyncio.ensure_future(generator.sync.pull(Pull(version="1.4", deadline_s=10.0)))
    await generator.engine.slow.wait()

    await generator.sync.prepare(plan("1.5", epoch=PULLED_EPOCH).model_copy(update={"files": files}))

    assert await generator.refused(download) == "superseded"
    await generator.sync.commit(Commit(version="1.5", epoch=PULLED_EPOCH))
    assert generator.engine.done == ["stage 1.5/proc/1/fd/7", "commit 1.5"]


def test_only_the_learners_own_file_is_read(generator: ServingParts, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (
        open(os.memfd_create(f"headway-{'0' * 16}"), "r+b", buffering=0) as secret,
        open(os.open(tmp_path / "pipe", os.O_RDWR), "rb") as pipe,
    ):
        secret.write(b"s")
        asked = {name: f"/proc/{os.getpid()}/fd/{file.fileno()}" for name, file in (("s", secret), ("p", pipe))}
        link = os.readlink(asked["s"])
        answers = [generator.sync.host(SharedMemory(path=path, link=link)).secret for path in asked.values()]
        with pytest.raises(ValueError, match="pattern"):
            SharedMemory(path=asked["p"], link=os.readlink(asked["p"]))
    gone = generator.sync.host(SharedMemory(path=asked["s"], link=link)).secret
    assert (*answers, gone) == ("s", "", "")


async def test_after_a_load_that_failed_midway_nothing_is_served_until_a_whole_one(generator: ServingParts) -> None:
    generator.engine.fails = WeightSyncError("a tensor does not fit", unloaded=True)
    await generator.sync.pull(Pull(version="1.5", deadline_s=10.0))

    assert await generator.refused(generator.sync.commit(Commit(version="1.5", epoch=PULLED_EPOCH))) == "commit_failed"

    assert generator.serving.version is None
    assert not generator.serving.ready
    generator.engine.fails = None
    await generator.sync.pull(Pull(version="1.6", deadline_s=10.0))
    await generator.sync.commit(Commit(version="1.6", epoch=PULLED_EPOCH))
    assert generator.serving.ready


async def test_a_load_that_never_began_leaves_the_old_version_serving(generator: ServingParts) -> None:
    generator.engine.fails = WeightSyncError("nothing to load")
    await generator.sync.pull(Pull(version="1.5", deadline_s=10.0))

    assert await generator.refused(generator.sync.commit(Commit(version="1.5", epoch=PULLED_EPOCH))) == "commit_failed"

    assert (generator.serving.version, generator.serving.ready) == ("1.4", True)


async def test_while_the_engine_does_not_answer_no_weights_are_taken_but_a_commit_is(generator: ServingParts) -> None:
    await generator.sync.join(group(1))
    await generator.sync.prepare(plan("1.5", epoch=1))
    generator.serving.stall()

    for step in (
        generator.sync.join(group(2)),
        generator.sync.prepare(plan("1.6", epoch=1)),
        generator.sync.pull(Pull(version="1.6", deadline_s=10.0)),
    ):
        assert await generator.refused(step) == "stalled"

    assert generator.engine.done == ["join 1", "stage 1.5"]
    await generator.sync.commit(Commit(version="1.5", epoch=1))
    generator.serving.answers()
    assert (generator.serving.version, generator.serving.ready) == ("1.5", True)


async def test_a_generator_with_all_the_requests_that_it_may_have_refuses_the_next(generator: ServingParts) -> None:
    serving = generator.serving
    with serving.occupied(), serving.occupied():
        with pytest.raises(RequestRefused, match="2 requests are here already: try another generator") as refusal:
            serving.check_ready()
        assert (refusal.value.status_code, refusal.value.problem.kind) == (429, "busy")
    serving.check_ready()
