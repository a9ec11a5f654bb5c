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
from protocol.fleet import PULLED_EPOCH, BucketSpec, Commit, JoinGroup, Prepare, Pull, Reprobe, SharedMemory, TensorSpec
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
    beside: asyncio.Barrier | None = None
    """Where the hash of the weights and the scores wait for each other."""
    slow: asyncio.Event | None = None
    """Set by the first files that are staged, which takes for ever."""
    done: list[str] = field(default_factory=list)
    is_alive: bool = True

    async def join_group(self, group: JoinGroup) -> None:
        self.done.append(f"join {group.epoch}")

    async def stage(self, plan: Prepare) -> None:
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
        return f"f{version}"

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
