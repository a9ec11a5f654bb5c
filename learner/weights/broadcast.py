"""Rounds: one version to all generators that serve, by broadcast; or to those of this host by shared memory.

    meet (if the members are others than before) ─▶ prepare beside the broadcast ─▶ commit ─▶ in service
                                                    └ without staging: prepare and commit beside the broadcast
    this host: prepare from shared memory, beside that ─▶ commit ─▶ in service

A round ends in time whatever its members do, and is made of those who are there:

- Who does not answer is dropped from the fleet, until it announces itself again.
- Who fails by itself, be it the first of all, is suspended, and catches up by a download.
- Who fails because of another one (one death makes all survivors of a broadcast fail) is broadcast to once more, in a
  new process group of the living; after a second failure it is suspended.
- Who fails because a rank of the learner does not send its share is blameless: it serves on, and gets it later.
- Who lets the others wait for its commit is suspended until it answers; the others serve meanwhile.

After any failure the process group is thrown away, never used again.
"""

import asyncio
import logging
import operator
import time
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

from learner.weights.fleet import FleetMember, FleetMembers
from learner.weights.process_group import (
    BroadcastGroup,
    Meeting,
    MeetingPlace,
    ProcessGroupError,
    collective_beside,
    in_thread,
    joined,
)
from learner.weights.proofs import Commits, Proof
from learner.weights.provenance import InstanceMemory
from learner.weights.published import PackedWeights, PublisherOptions
from learner.weights.same_host import SameHost
from learner.weights.senders import (
    MeetingTerms,
    SenderLink,
    SenderLost,
    SendingGroups,
    silent_sender,
    sliced_weights,
    together,
)
from learner.weights.slices import SlicedWeights, Slicer, SlicesUnfit
from protocol.fleet import PULLED_EPOCH, JoinedGroup, JoinGroup, Prepare, PrepareResult, SliceLayout
from services.http.client import ServiceError, ServiceTimeout, ServiceUnreachable
from services.network import LOOPBACK, address_towards
from services.process import DaemonThreads

logger = logging.getLogger(__name__)

_GRACE_S = 3.0
_PATIENCE_S = 1.0
_FAILURES_TO_LEAVE = 3


@dataclass(frozen=True)
class RoundResult:
    """Proofs of the members that serve the version after a round, and the round's seconds by phase."""

    proofs: Sequence[Proof]
    prepare_s: float
    commit_s: float


@dataclass(frozen=True)
class _CollectiveResult:
    """Members of a collective by their end: through it, to try again, failed alone and why, and silent.

    Those without staging have committed when they are through, and have given their proof. Victims are `blameless` if a
    rank of the learner is lost; those that are `unharmed` by it serve what they served, since they have staging.
    """

    through: Mapping[FleetMember, Proof | None]
    victims: Sequence[FleetMember]
    failed: Mapping[FleetMember, str]
    silent: Mapping[FleetMember, str]
    blameless: bool
    unharmed: Collection[FleetMember]


class _MemberRequests:
    """A request to each member of a collective."""

    def __init__(self, requests: Mapping[FleetMember, Coroutine[object, object, object]]) -> None:
        self.answers: dict[FleetMember, asyncio.Future[object]] = {}
        self._first_to_fail: FleetMember | None = None
        for member, request in requests.items():
            self.answers[member] = asyncio.ensure_future(request)
            self.answers[member].add_done_callback(partial(self._note, member))

    def _note(self, member: FleetMember, answer: "asyncio.Future[object]") -> None:
        if self._first_to_fail is None and not answer.cancelled() and answer.exception() is not None:
            self._first_to_fail = member

    async def each_for_itself(self) -> _CollectiveResult:
        """Sorts the members, when each has answered or missed its deadline: nobody fails for want of another one."""
        try:
            await asyncio.wait(self.answers.values())
        finally:
            for answer in self.answers.values():
                answer.cancel()
        return self.sorted_out(whole=True, apart=True)

    def sorted_out(self, *, whole: bool, blameless: bool = False, apart: bool = False) -> _CollectiveResult:
        """Sorts the members by blame. `whole` tells that a member that answered well has all that it needs.

        If nobody is silent and all fail, the first has failed by itself, and the others for want of it, unless they are
        `apart`. They may be `blameless`, since a rank of the learner is lost: who waits for it is not silent.
        """
        well: list[FleetMember] = []
        waiting: list[FleetMember] = []
        refused: dict[FleetMember, str] = {}
        silent: dict[FleetMember, str] = {}
        for member, answer in self.answers.items():
            if blameless and (not answer.done() or answer.cancelled()):
                waiting.append(member)
            elif not answer.done() or answer.cancelled():
                silent[member] = f"{member.url} did not answer in time"
            elif (error := answer.exception()) is None:
                well.append(member)
            elif isinstance(error, ServiceUnreachable | ServiceTimeout):
                silent[member] = str(error)
            elif isinstance(error, ServiceError):
                refused[member] = str(error)
            else:
                raise error
        guilty = set() if silent or blameless else set(refused) if well else {self._first_to_fail}
        guilty = set(refused) if apart else guilty
        victims = [*([] if whole else well), *waiting, *(member for member in refused if member not in guilty)]
        return _CollectiveResult(
            through={member: _proof_in(self.answers[member].result()) for member in well} if whole else {},
            victims=victims,
            failed={member: why for member, why in refused.items() if member in guilty},
            silent=silent,
            blameless=blameless,
            unharmed=[one for one in victims if blameless and one.announcement.staging],
        )


class WeightBroadcast:
    """Owns the process group. One round at a time; `tasks` holds the commits that outlast theirs."""

    def __init__(
        self,
        *,
        fleet: FleetMembers,
        commits: Commits,
        options: PublisherOptions,
        tasks: asyncio.TaskGroup,
        threads: DaemonThreads,
    ) -> None:
        self._fleet = fleet
        self._commits = commits
        self._options = options
        self._tasks = tasks
        self._threads = threads
        self._epoch = 0
        self._place: MeetingPlace | None = None
        self._group: SendingGroups | None = None
        self._group_members: tuple[FleetMember, ...] = ()
        self._sliced = 0
        """Number of workers that are sent slices in the group; 0: all are sent whole tensors."""
        self._slicer = Slicer()
        self._unfit: SliceLayout | None = None
        """The slices of some generator that could not be cut from the weights."""
        self._failures: InstanceMemory[int] = InstanceMemory()
        self._late: set[FleetMember] = set()
        self._same_host = SameHost(commits=commits)
        self.busy: set[FleetMember] = set()
        """Members that are within a round, or still commit what one brought them."""

    def takes(self, member: FleetMember) -> bool:
        """True if a member is broadcast to. Not while it catches up, nor after failures in a row, nor if it pulls."""
        failures = self._failures.get(_process(member)) or 0
        return member.able and not member.pulls and member.serving is not None and failures < _FAILURES_TO_LEAVE

    def takes_joiner(self, member: FleetMember) -> bool:
        """True if one that waits for its download may be broadcast to instead. A failure would cost the others time."""
        is_free = member.able and not member.pulls and member not in self.busy
        return is_free and not self._failures.get(_process(member))

    async def run(self, members: Sequence[FleetMember], packed: PackedWeights) -> RoundResult:
        """Brings `packed` to as many of `members` as take it."""
        self.busy.update(members)
        try:
            here = await self._same_host.among(members, packed)
            if not here:
                return await self._round(members, packed, first=asyncio.Future())
            self.part_with(here)
            others = [member for member in members if member not in here]
            first: asyncio.Future[float] = asyncio.Future()
            rounds = [self._round(others, packed, first=first)] if others else []
            results = await asyncio.gather(self._share(here, packed, first=first), *rounds)
            return RoundResult(
                proofs=[proof for result in results for proof in result.proofs],
                prepare_s=max(result.prepare_s for result in results),
                commit_s=max(result.commit_s for result in results),
            )
        finally:
            self.busy.difference_update(member for member in members if member not in self._late)

    def part_with(self, members: Sequence[FleetMember]) -> None:
        """These are about to download, and leave the process group by that."""
        if not set(members).isdisjoint(self._group_members):
            self.close()

    def close(self) -> None:
        """Lets go of the process group, in a thread: it may block until a failed broadcast has timed out."""
        if self._group is not None:
            self._threads.start(self._group.close)
        self._group, self._group_members = None, ()

    async def _round(
        self,
        members: Sequence[FleetMember],
        packed: PackedWeights,
        *,
        first: "asyncio.Future[float]",
        last: bool = False,
    ) -> RoundResult:
        start = time.monotonic()
        reached = await self._broadcast(members, packed)
        prepared, epoch = time.monotonic(), self._epoch
        if len(reached.through) < len(members):
            self.close()
        self._settle(reached, packed, last=last)
        victims = [] if last else reached.victims
        committed, retried = await asyncio.gather(
            self._commit(reached, packed, epoch=epoch, first=first), self._once_more(victims, packed)
        )
        commit_s = time.monotonic() - prepared
        return RoundResult(proofs=[*committed, *retried], prepare_s=prepared - start, commit_s=commit_s)

    async def _share(
        self, members: Sequence[FleetMember], packed: PackedWeights, *, first: "asyncio.Future[float]"
    ) -> RoundResult:
        """Brings a version to members of this host. Who fails is suspended, and is broadcast to from then on."""
        start, grace_s = time.monotonic(), self._options.bucket_timeout_s + _GRACE_S
        asked = _MemberRequests(
            {member: self._same_host.prepare(member, packed, grace_s=grace_s) for member in members}
        )
        reached = await asked.each_for_itself()
        prepared = time.monotonic()
        self._settle(reached, packed, last=False)
        committed = await self._commit(reached, packed, epoch=PULLED_EPOCH, first=first)
        return RoundResult(committed, prepare_s=prepared - start, commit_s=time.monotonic() - prepared)

    async def _once_more(self, victims: Sequence[FleetMember], packed: PackedWeights) -> Sequence[Proof]:
        if not victims:
            return []
        return (await self._round(victims, packed, first=asyncio.Future(), last=True)).proofs

    async def _broadcast(self, members: Sequence[FleetMember], packed: PackedWeights) -> _CollectiveResult:
        slices = await self._slices(members, packed)
        sliced = 0 if slices is None else len(slices.buckets)
        if self._group is None or not self._is_group_of(members, sliced):
            met = await self._meet(members, packed.links, sliced)
            if self._group is None:
                return met
        return await self._prepare(self._group, members, packed, slices)

    async def _slices(self, members: Sequence[FleetMember], packed: PackedWeights) -> SlicedWeights | None:
        """The slices that all members take; None if they are to be sent whole tensors."""
        layout = members[0].slices
        if (
            layout is None
            or layout == self._unfit
            or not self._options.slices
            or packed.adapter is not None
            or self._options.backend == "nccl"  # several groups of it on one GPU were never tried
            or any(_world(member) != len(layout.workers) or member.slices != layout for member in members)
        ):
            return None
        try:
            return await sliced_weights(packed, layout, slicer=self._slicer, threads=self._threads)
        except SlicesUnfit as error:
            logger.warning("version %s and later ones go out whole, and not in slices: %s", packed.version, error)
            self._unfit = layout
        except SenderLost as error:
            logger.warning("version %s goes out whole, and not in slices: %s", packed.version, error)
        return None

    def _is_group_of(self, members: Sequence[FleetMember], sliced: int) -> bool:
        """By identity: a generator that was started afresh is another member under the same name."""
        same = len(members) == len(self._group_members) and all(map(operator.is_, members, self._group_members))
        return same and sliced == self._sliced

    async def _meet(
        self, members: Sequence[FleetMember], links: Sequence[SenderLink], sliced: int
    ) -> _CollectiveResult:
        """Builds the process groups of exactly these members, one for each rank that sends, or as many as workers are
        sent slices; or tells who was in the way.
        """
        self.close()
        self._epoch += 1
        self._sliced = sliced
        options = self._options
        sizes = [1 if sliced else _world(member) for member in members]
        world_size = 1 + sum(sizes)
        host = options.host if options.host != "auto" else await self._address_towards(members, links)
        meeting = Meeting(
            host=host, epoch=self._epoch, world_size=world_size, timeout_s=options.meet_timeout_s,
            place=self._kept_place(host) if options.port else None,
        )  # fmt: skip
        how = f", in slices for {sliced} workers" if sliced else ""
        logger.info("opening the weight broadcast group with %s (group %d%s)", _names(members), self._epoch, how)
        asked = _MemberRequests(
            {
                member: self._invite(member, meeting, rank_offset, senders=1 + len(links), sliced=sliced)
                for member, rank_offset in zip(members, accumulate(sizes[:-1], initial=1), strict=True)
            }
        )
        group = await collective_beside(
            self._join(meeting, links, sliced),
            asked.answers.values(),
            answer_s=options.meet_timeout_s,
            grace_s=_GRACE_S,
        )
        if not isinstance(group, SendingGroups):
            group = await self._explained(group, links)
        reached = asked.sorted_out(whole=False, blameless=isinstance(group, SenderLost))
        if not isinstance(group, SendingGroups):
            _raise_unless_expected(group)
            if isinstance(group, SenderLost):
                logger.warning("the broadcast group %d is not made: %s", self._epoch, group)
        elif reached.failed or reached.silent:
            self._threads.start(group.close)
        else:
            self._group, self._group_members = group, tuple(members)
        return reached

    async def _join(self, meeting: Meeting, links: Sequence[SenderLink], sliced: int) -> SendingGroups:
        options = self._options
        asked = MeetingTerms(
            host=meeting.host, port=meeting.port, epoch=meeting.epoch, world_size=meeting.world_size,
            backend=options.backend, timeout_s=options.meet_timeout_s, sliced=sliced,
        )  # fmt: skip
        own = asyncio.ensure_future(joined(meeting, backend=options.backend, sliced=sliced, threads=self._threads))
        try:
            groups, *_ = await together([asyncio.shield(own), *(link.meet(asked) for link in links)])
        except BaseException:
            own.add_done_callback(self._let_go)
            raise
        return SendingGroups(own=groups, epoch=meeting.epoch)

    def _let_go(self, own: "asyncio.Future[Sequence[BroadcastGroup]]") -> None:
        """Of a meeting to which others did not come. In threads: this one is the event loop's."""
        if not own.cancelled() and own.exception() is None:
            for group in own.result():
                self._threads.start(group.close)

    async def _explained(self, error: Exception, links: Sequence[SenderLink]) -> Exception:
        """The loss of another rank that sends, if one does not answer: then all generators fail for want of it."""
        if isinstance(error, SenderLost):
            return error
        return await silent_sender(links, deadline_s=self._options.bucket_timeout_s) or error

    def _kept_place(self, host: str) -> MeetingPlace:
        """At a port that is configured all epochs meet: the group before may not have let go of it yet."""
        if self._place is None or self._place.host != host:
            options = self._options
            self._place = MeetingPlace(host=host, port=options.port, timeout_s=options.meet_timeout_s)
        return self._place

    async def _address_towards(self, members: Sequence[FleetMember], links: Sequence[SenderLink]) -> str:
        """In a thread, and not for longer than the meeting: it may look names up."""
        urls = [*(member.url for member in members), *(link.url for link in links)]
        hosts = [urlsplit(url).hostname or LOOPBACK for url in urls]
        try:
            async with asyncio.timeout(self._options.meet_timeout_s):
                return await in_thread(lambda: address_towards(hosts), threads=self._threads)
        except OSError as error:
            logger.warning("found no address of this machine that generators at %s reach: %s", ", ".join(hosts), error)
            return LOOPBACK

    async def _invite(
        self, member: FleetMember, meeting: Meeting, rank_offset: int, *, senders: int, sliced: int
    ) -> object:
        options = self._options
        body = JoinGroup(
            epoch=meeting.epoch,
            backend=options.backend,
            host=meeting.host,
            port=meeting.port,
            rank_offset=rank_offset,
            world_size=meeting.world_size,
            meet_timeout_s=options.meet_timeout_s,
            bucket_timeout_s=options.bucket_timeout_s,
            senders=senders,
            sliced=sliced,
        )
        deadline_s = 2 * options.meet_timeout_s + _GRACE_S
        return await self._commits.ask(member, "group", body, JoinedGroup, deadline_s=deadline_s)

    async def _prepare(
        self,
        group: SendingGroups,
        members: Sequence[FleetMember],
        packed: PackedWeights,
        slices: SlicedWeights | None,
    ) -> _CollectiveResult:
        timeout_s = self._options.bucket_timeout_s
        form = packed.form_for(member.base for member in members)
        buckets = packed.in_form(form)
        specs = tuple(bucket.spec for bucket in buckets)
        body = Prepare(
            version=str(packed.version), epoch=self._epoch, buckets=specs, adapter=packed.adapter,
            slices=() if slices is None else slices.specs,
        )  # fmt: skip
        for member in members:
            member.form, member.sent_bytes = form, None if slices is None else slices.nbytes
        longest = max(map(len, body.slices), default=len(specs))
        deadline_s = timeout_s * (longest + 1) + _GRACE_S + packed.merge_s
        asked = _MemberRequests(
            {
                member: self._ask_to_prepare(member, body, deadline_s=deadline_s)
                if member.announcement.staging
                else self._ask_to_load(member, body, packed, deadline_s=deadline_s)
                for member in members
            }
        )
        staging = all(member.announcement.staging for member in members)
        in_one_thread = not staging or self._options.backend == "nccl"
        turn_s = timeout_s * (1 + len(packed.links)) if in_one_thread else timeout_s
        sending = (
            group.send(buckets, timeout_s=turn_s, threads=self._threads)
            if slices is None
            else group.send_slices(slices.buckets, timeout_s=turn_s, threads=self._threads)
        )
        sent = await collective_beside(
            sending, asked.answers.values(),
            answer_s=packed.merge_s + (timeout_s if staging else self._options.commit_timeout_s), grace_s=_GRACE_S,
        )  # fmt: skip
        _raise_unless_expected(sent)
        if sent is not None:
            sent = await self._explained(sent, packed.links)
            level = logging.WARNING if isinstance(sent, SenderLost) else logging.DEBUG
            logger.log(
                level, "broadcast group %d: version %s was not sent to all: %s", self._epoch, packed.version, sent
            )
            self.close()
        return asked.sorted_out(whole=True, blameless=isinstance(sent, SenderLost))

    async def _ask_to_prepare(self, member: FleetMember, body: Prepare, *, deadline_s: float) -> object:
        return await self._commits.ask(member, "prepare", body, PrepareResult, deadline_s=deadline_s)

    async def _ask_to_load(
        self, member: FleetMember, body: Prepare, packed: PackedWeights, *, deadline_s: float
    ) -> object:
        """For a member without staging: its commit receives what is sent meanwhile."""
        await self._ask_to_prepare(member, body, deadline_s=deadline_s)
        return await self._commits.commit(member, packed, epoch=body.epoch, receive_s=deadline_s)

    def _settle(self, reached: _CollectiveResult, packed: PackedWeights, *, last: bool) -> None:
        """Takes members that are out of this round from the fleet, or has them catch up; counts failures in a row."""
        for member in reached.through:
            self._failures.forget(_process(member))
        for member, why in reached.silent.items():
            logger.warning("generator %s is dropped, version %s: %s", member.generator_id, packed.version, why)
            self._count(member)
            self._lost(member)
        failed = dict(reached.failed) | (dict.fromkeys(reached.victims, "its second broadcast failed") if last else {})
        if last and reached.unharmed:
            logger.warning(
                "version %s comes later to %s, which serve on: a rank of the learner did not send its share of it",
                packed.version, _names(reached.unharmed),
            )  # fmt: skip
        for member, why in failed.items():
            if member in reached.unharmed:
                continue
            logger.warning(
                "generator %s missed version %s and catches up: %s", member.generator_id, packed.version, why
            )
            if not reached.blameless:
                self._count(member)
            self._fleet.suspend(member)
            if member in reached.failed:
                member.base = ""  # one that lost its base weights, say: its download brings them

    def _count(self, member: FleetMember) -> None:
        failures = (self._failures.get(_process(member)) or 0) + 1
        self._failures[_process(member)] = failures
        if failures == _FAILURES_TO_LEAVE:
            logger.warning(
                "generator %s failed %d broadcasts in a row: it gets its weights by download from now on",
                member.generator_id, failures,
            )  # fmt: skip

    async def _commit(
        self, reached: _CollectiveResult, packed: PackedWeights, *, epoch: int, first: "asyncio.Future[float]"
    ) -> Sequence[Proof]:
        """Commits on all that have not; returns who serves the version. A straggler's proof is judged when it comes.

        `first` is told the seconds of the first commit, of whichever members: who takes much longer is a straggler.
        """
        start = time.monotonic()
        members = [member for member, proof in reached.through.items() if proof is None]
        asked = {self._tasks.create_task(self._proof(member, packed, epoch=epoch)): member for member in members}
        late = set(asked)
        while late and not first.done():
            either: set[asyncio.Future[Any]] = {*late, first}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            late = {task for task in late if not task.done()}
            if not first.done() and any(task.result() for task in set(asked) - late):
                first.set_result(time.monotonic() - start)
        if late:
            patience_s = _PATIENCE_S + 3 * first.result() - (time.monotonic() - start)
            _, late = await asyncio.wait(late, timeout=max(patience_s, 0))
        done = set(asked) - late
        for task in late:
            self._tasks.create_task(self._await_straggler(asked[task], task, packed))
        proofs = (*reached.through.values(), *(task.result() for task in done))
        return self._commits.accept([proof for proof in proofs if proof is not None], packed)

    async def _proof(self, member: FleetMember, packed: PackedWeights, *, epoch: int) -> Proof | None:
        proof = await self._commits.proof(member, packed, epoch=epoch)
        if proof is not None and epoch == PULLED_EPOCH:
            self._same_host.loaded(packed)
        return proof

    async def _await_straggler(
        self, member: FleetMember, task: "asyncio.Task[Proof | None]", packed: PackedWeights
    ) -> None:
        logger.warning("generator %s is late with its commit of version %s", member.generator_id, packed.version)
        self._late.add(member)
        self._fleet.suspend(member)
        try:
            proof = await task
        finally:
            self._late.discard(member)
            self.busy.discard(member)
        if proof is None:
            self._lost(member)
        else:
            self._commits.accept([proof], packed)

    def _lost(self, member: FleetMember) -> None:
        """It does not answer; another process may have its name by now."""
        if self._fleet.holds(member):
            self._fleet.lost(member.generator_id)


def _proof_in(answer: object) -> Proof | None:
    return answer if isinstance(answer, Proof) else None


def _raise_unless_expected(result: object) -> None:
    if isinstance(result, Exception) and not isinstance(result, ProcessGroupError | TimeoutError):
        raise result


def _names(members: Iterable[FleetMember]) -> str:
    return ", ".join(member.generator_id for member in members)


def _process(member: FleetMember) -> tuple[str, str]:
    return member.generator_id, member.announcement.instance


def _world(member: FleetMember) -> int:
    return member.announcement.world_size
