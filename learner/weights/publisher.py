"""Weight sync, the learner's side: the newest weights to every generator, two-phase, while training goes on.

    trainer thread ──offer()──▶ newest snapshot ──run()──▶ meet ─▶ prepare + broadcast ─▶ commit ─▶ fleet.committed()

One publish is in flight at a time; an offer made meanwhile replaces the one that waits. A change of members raises the
epoch: a new process group is built of those who are there, and the newest version is sent to all. A failure before the
commit leaves the old weights serving; the group is thrown away, and the next round is made of the living: one death
makes all survivors fail, so a member that answers, be it with an error, stays if another one is gone.

`run` waits for an offer or a change of members; every wait inside a round has a deadline.
"""

import asyncio
import logging
import operator
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from pydantic import BaseModel

from learner.weights.fleet import Fleet, Member
from learner.weights.plane import BroadcastGroup, Meeting, WeightPlaneError, pack_buckets
from protocol.fleet import Backend, Commit, Committed, JoinedGroup, JoinGroup, Prepare, Prepared
from protocol.versions import PolicyVersion
from services.http_client import HttpClient, ServiceError, ServiceTimeout, ServiceUnreachable
from services.waiting import Waiting

log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R", bound=BaseModel)


@dataclass(frozen=True)
class Snapshot:
    """Weights to be published: named CPU tensors, deduplicated by tie, and the learner's own logprobs of the probe."""

    version: int
    tensors: Sequence[tuple[str, torch.Tensor]]
    probe_token_ids: tuple[int, ...]
    probe_logprobs: tuple[float, ...]


@dataclass(frozen=True)
class PublisherOptions:
    """`probe_tolerance` bounds the gap in nats between the learner's and a generator's logprobs of the probe; where it
    is larger, three times the gap at the generator's first commit does.
    """

    incarnation: int
    backend: Backend
    host: str
    bucket_bytes: int
    bucket_timeout_s: float
    meet_timeout_s: float
    commit_timeout_s: float
    probe_tolerance: float


@dataclass(frozen=True)
class PublishReport:
    """What one publish took, in seconds, and the largest probe gap in nats over the generators."""

    version: int
    members: int
    total_s: float
    prepare_s: float
    commit_s: float
    pause_s: float
    probe_gap: float


class Publisher:
    """Owns the weight plane. `offer` may be called from any thread; everything else belongs to the event loop."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        client: HttpClient,
        options: PublisherOptions,
        waits: Waiting,
        published: Callable[[PublishReport], None],
    ) -> None:
        self._fleet = fleet
        self._client = client
        self._options = options
        self._waits = waits
        self._published = published
        self._newest: Snapshot | None = None
        self._epoch = 0
        self._group: BroadcastGroup | None = None
        self._group_members: tuple[Member, ...] = ()
        self._first_gaps: dict[str, float] = {}
        self._wake = asyncio.Event()
        self._progress = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def offer(self, snapshot: Snapshot) -> None:
        """Publish these weights next; returns at once."""
        self._loop.call_soon_threadsafe(self._take_offer, snapshot)

    def _take_offer(self, snapshot: Snapshot) -> None:
        self._newest = snapshot
        self._wake.set()

    def fleet_changed(self) -> None:
        """Somebody came, went, or serves another version."""
        self._wake.set()
        self._progress.set()

    async def wait_until_served(self, version: int) -> None:
        """Returns when every serving generator, and at least one, holds `version` or a newer one."""
        with self._waits.wait(f"a generator that serves version {version}", quiet_s=5.0):
            while self._fleet.served is None or self._fleet.served < version:
                self._progress.clear()
                await self._progress.wait()

    async def run(self) -> None:
        """Publishes until cancelled."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._newest is not None and self._behind(self._newest):
                    if not await self._round(self._newest):
                        await asyncio.sleep(0.5)  # the living announce themselves again within this order of time
        finally:
            self._discard_group()

    def _behind(self, snapshot: Snapshot) -> bool:
        version = PolicyVersion(self._options.incarnation, snapshot.version)
        return any(member.serving != version for member in self._fleet.members())

    async def _round(self, snapshot: Snapshot) -> bool:
        """One attempt to bring every member to the snapshot; whether it went through."""
        members = self._fleet.members()
        version = PolicyVersion(self._options.incarnation, snapshot.version)
        start = time.monotonic()
        try:
            group = await self._group_of(members)
            await self._prepare(group, members, snapshot, version)
        except WeightPlaneError as error:
            log.warning("version %s did not reach all of %d generators: %s", version, len(members), error)
            self._discard_group()
            return False
        prepared = time.monotonic()
        commits = await self._commit(members, snapshot, version)
        now = time.monotonic()
        report = PublishReport(
            version=snapshot.version,
            members=len(commits),
            total_s=now - start,
            prepare_s=prepared - start,
            commit_s=now - prepared,
            pause_s=max((commit.answer.pause_s for commit in commits), default=0.0),
            probe_gap=max((commit.gap for commit in commits), default=0.0),
        )
        if commits:
            self._published(report)
        return len(commits) == len(members)

    async def _group_of(self, members: Sequence[Member]) -> BroadcastGroup:
        """The process group of exactly these members, built anew when they are others than before."""
        if self._group is not None and self._is_group_of(members):
            return self._group
        self._discard_group()
        self._epoch += 1
        options = self._options
        world_size = 1 + sum(member.announcement.world_size for member in members)
        meeting = Meeting(host=options.host, epoch=self._epoch, world_size=world_size, timeout_s=options.meet_timeout_s)
        names = ", ".join(member.generator_id for member in members)
        log.info("epoch %d: meeting %s for weight broadcasts", self._epoch, names)
        invitations = [
            self._invite(member, meeting, rank_offset)
            for member, rank_offset in zip(members, _rank_offsets(members), strict=True)
        ]
        self._group = await self._both(lambda: meeting.join(backend=options.backend), invitations, members=members)
        self._group_members = tuple(members)
        return self._group

    def _is_group_of(self, members: Sequence[Member]) -> bool:
        """By identity: a generator that was started afresh is another member under the same name."""
        return len(members) == len(self._group_members) and all(map(operator.is_, members, self._group_members))

    async def _invite(self, member: Member, meeting: Meeting, rank_offset: int) -> JoinedGroup:
        body = JoinGroup(
            epoch=meeting.epoch,
            backend=self._options.backend,
            host=meeting.host,
            port=meeting.port,
            rank_offset=rank_offset,
            world_size=meeting.world_size,
            bucket_timeout_s=self._options.bucket_timeout_s,
        )
        return await self._ask(member, "group", body, JoinedGroup, deadline_s=2 * self._options.meet_timeout_s)

    async def _prepare(
        self, group: BroadcastGroup, members: Sequence[Member], snapshot: Snapshot, version: PolicyVersion
    ) -> None:
        options = self._options
        buckets = await asyncio.to_thread(pack_buckets, snapshot.tensors, bucket_bytes=options.bucket_bytes)
        body = Prepare(version=str(version), epoch=self._epoch, buckets=tuple(bucket.spec for bucket in buckets))
        deadline_s = options.bucket_timeout_s * (len(buckets) + 1)
        requests = [self._ask(member, "prepare", body, Prepared, deadline_s=deadline_s) for member in members]
        await self._both(lambda: group.send(buckets, timeout_s=options.bucket_timeout_s), requests, members=members)

    async def _both(
        self, collective: Callable[[], T], requests: Sequence[Awaitable[object]], *, members: Sequence[Member]
    ) -> T:
        """The learner's part of a collective, in a thread, beside the members' requests; waits for all of those.

        Drops the members that are to blame for a failure, so that the next round is made of the living. Raises
        WeightPlaneError.
        """
        ours = asyncio.ensure_future(_in_thread(collective))
        try:
            answers = await asyncio.gather(*requests, return_exceptions=True)
            failures = _failures(members, answers)
            if failures:
                self._drop_the_guilty(failures, members=members)
                raise WeightPlaneError("; ".join(f"generator {name}: {error}" for name, error in failures.items()))
            return await ours
        finally:
            ours.cancel()  # without all members it can only time out, and need not be waited for
            ours.add_done_callback(_heard)

    def _drop_the_guilty(self, failures: Mapping[str, ServiceError], *, members: Sequence[Member]) -> None:
        """Members that do not answer are gone. If all answer, those few that fail by themselves have to join again."""
        gone = [name for name, error in failures.items() if isinstance(error, ServiceUnreachable | ServiceTimeout)]
        guilty = gone or (list(failures) if len(failures) < len(members) else [])
        for name in guilty:
            self._fleet.lost(name)

    async def _commit(self, members: Sequence[Member], snapshot: Snapshot, version: PolicyVersion) -> list["_Commit"]:
        """Commits on every member; those whose proofs agree serve the version from now on, and are returned."""
        body = Commit(version=str(version), epoch=self._epoch, probe_token_ids=snapshot.probe_token_ids)
        deadline_s = self._options.commit_timeout_s
        answers = await asyncio.gather(
            *(self._ask(member, "commit", body, Committed, deadline_s=deadline_s) for member in members),
            return_exceptions=True,
        )
        commits: list[_Commit] = []
        for member, answer in zip(members, answers, strict=True):
            if isinstance(answer, Committed):
                commits.append(_Commit(member=member, answer=answer, gap=_gap(answer, snapshot)))
            elif isinstance(answer, ServiceError):
                log.warning("generator %s did not commit version %s: %s", member.generator_id, version, answer)
                self._fleet.lost(member.generator_id)
            else:
                raise answer
        good = self._without_faulty(commits)
        for commit in good:
            self._fleet.committed(commit.name, version=version, fingerprint=commit.answer.fingerprint)
        return good

    def _without_faulty(self, commits: Sequence["_Commit"]) -> list["_Commit"]:
        """Expels who does not serve what was sent. One with a wrong probe has no say in which checksum is right."""
        faults = {commit.name: fault for commit in commits if (fault := self._probe_fault(commit)) is not None}
        odd = _odd_ones_out([commit for commit in commits if commit.name not in faults])
        faults |= dict.fromkeys(odd, "the checksum of its loaded weights differs from the other generators'")
        for name, fault in faults.items():
            log.error("generator %s is expelled: %s", name, fault)
            self._fleet.expel(name, reason=fault)
        return [commit for commit in commits if commit.name not in faults]

    async def _ask(self, member: Member, what: str, body: BaseModel, answer: type[R], *, deadline_s: float) -> R:
        url = f"{member.url}/v1/weights/{what}"
        return await self._client.post(url, body, answer, deadline_s=deadline_s, retries=0)

    def _probe_fault(self, commit: "_Commit") -> str | None:
        """Why this generator does not serve what it was sent, by the probe; None if it does."""
        options = self._options
        first = self._first_gaps.setdefault(commit.name, commit.gap)
        allowed = options.probe_tolerance if first == commit.gap else max(3 * first, options.probe_tolerance)
        if not commit.gap <= allowed:
            return (
                f"its logprobs of the probe differ by {commit.gap:.3g} nats from the learner's at version "
                f"{commit.answer.version}; at most {allowed:.3g} is allowed"
            )
        return None

    def _discard_group(self) -> None:
        if self._group is not None:
            threading.Thread(target=self._group.close, name="weight-plane-close", daemon=True).start()
        self._group, self._group_members = None, ()


@dataclass(frozen=True)
class _Commit:
    member: Member
    answer: Committed
    gap: float

    @property
    def name(self) -> str:
        return self.member.generator_id


def _gap(answer: Committed, snapshot: Snapshot) -> float:
    """The largest difference in nats over the probe's tokens; infinite if the answer is not one of this probe."""
    ours, theirs = np.array(snapshot.probe_logprobs), np.array(answer.probe_logprobs)
    if ours.shape != theirs.shape:
        return float("inf")
    return float(np.abs(ours - theirs).max(initial=0.0))


def _odd_ones_out(commits: Sequence[_Commit]) -> frozenset[str]:
    """Of generators that loaded the same bytes, those whose checksum is not the commonest one.

    Among equally common ones that of the smallest probe gap is believed.
    """
    counts = Counter(commit.answer.fingerprint for commit in commits)
    believed = max(commits, key=lambda commit: (counts[commit.answer.fingerprint], -commit.gap), default=None)
    return frozenset(
        commit.name for commit in commits if believed and commit.answer.fingerprint != believed.answer.fingerprint
    )


def _failures(members: Sequence[Member], answers: Sequence[object]) -> dict[str, ServiceError]:
    """The members' failures by id. An answer that is another error is raised."""
    failures = {}
    for member, answer in zip(members, answers, strict=True):
        if isinstance(answer, ServiceError):
            failures[member.generator_id] = answer
        elif isinstance(answer, BaseException):
            raise answer
    return failures


async def _in_thread(work: Callable[[], T]) -> T:
    """Runs `work` in a daemon thread: a stop waits for no collective, which ends by its own timeout, unheard."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def call() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it crosses to the awaiting task, which raises it
            future.set_exception(error)

    threading.Thread(target=call, name="weight-plane", daemon=True).start()
    return await asyncio.wrap_future(future)


def _heard(task: "asyncio.Future[T]") -> None:
    """Its error is known or of no interest; asyncio complains of errors that nobody looks at."""
    if not task.cancelled():
        task.exception()


def _rank_offsets(members: Sequence[Member]) -> list[int]:
    """The first rank of each member's workers; the learner is rank 0."""
    sizes = [member.announcement.world_size for member in members]
    return [1 + sum(sizes[:index]) for index in range(len(sizes))]
