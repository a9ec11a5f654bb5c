"""Joins: a generator that has to catch up downloads the newest version, a few at a time, beside the rounds.

    waiting ─▶ pull (the generator downloads, in checksummed chunks) ─▶ commit ─▶ in service
       └────── taken by the next broadcast, which brings one version to all of them at once

So many download at once as do it in time: one fewer half of them after a download that took too long, one more after
each that did not. Those that pull from relays are not counted. A deadline grows with the bytes, and doubles for who has
missed it. Being slow together is no fault: only what fails by itself is counted, and failures in a row expel a
generator, by name, where another one serves.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from learner.weights.fleet import FleetMember, FleetMembers
from learner.weights.proofs import Commits, Proof
from learner.weights.provenance import InstanceMemory
from learner.weights.published import PackedWeights, PublishedWeights, PublisherOptions
from learner.weights.tree import WeightTree
from protocol.fleet import PULL_TOOK_TOO_LONG, PULLED_EPOCH, PrepareResult, Pull
from services.http.client import ServiceError, ServiceFailed, ServiceRefused, ServiceTimeout, ServiceUnreachable

logger = logging.getLogger(__name__)

_GRACE_S = 5.0
_MAX_REST_S = 8.0
_UNAVAILABLE = 503
_MAX_DOUBLINGS = 3


@dataclass(frozen=True)
class CaughtUpMember:
    """A member that serves what it downloaded, where the seconds went, and how many bytes came. One that pulls may have
    served the version before until then.
    """

    proof: Proof
    packed: PackedWeights
    pull_s: float
    commit_s: float
    received_bytes: int
    served_before: bool


@dataclass
class _Past:
    """Of one process: failures in a row that are its own, and downloads that took too long."""

    failures: int = 0
    slow: int = 0


class CatchUps:
    """At most one download of a member at a time; `tasks` holds them all."""

    def __init__(
        self,
        *,
        fleet: FleetMembers,
        shelf: PublishedWeights,
        commits: Commits,
        options: PublisherOptions,
        tasks: asyncio.TaskGroup,
        joined: Callable[[CaughtUpMember], None],
        ended: Callable[[], None],
        tree: WeightTree | None = None,
    ) -> None:
        self._fleet = fleet
        self._shelf = shelf
        self._tree = tree
        self._commits = commits
        self._options = options
        self._tasks = tasks
        self._joined = joined
        self._ended = ended
        self._past: InstanceMemory[_Past] = InstanceMemory()
        self._at_once = options.parallel_pulls
        self._downloading: dict[FleetMember, asyncio.Task[None]] = {}
        self._resting: set[FleetMember] = set()
        self._waiting: dict[FleetMember, None] = {}

    @property
    def busy(self) -> set[FleetMember]:
        """Members that download, or rest after a failure."""
        return self._resting.union(self._downloading)

    @property
    def waiting(self) -> Sequence[FleetMember]:
        """The members whose turn to download has not come, and who have not failed by themselves."""
        return [member for member in self._waiting if self._fleet.holds(member) and not self._past_of(member).failures]

    def begin(self, members: Sequence[FleetMember]) -> None:
        """Has exactly these members catch up with the newest version, beside those that do so already.

        A download by one that has left the fleet is given up: its place is another's.
        """
        for member, task in self._downloading.items():
            if not self._fleet.holds(member):
                task.cancel()
        busy = self.busy
        wanted = {member for member in members if member not in busy}
        self._waiting = {member: None for member in self._waiting if member in wanted}
        self._waiting |= dict.fromkeys(member for member in members if member in wanted)
        self._start_next()

    def hand_over(self, members: Sequence[FleetMember]) -> None:
        """A broadcast takes these, who wait."""
        for member in members:
            self._waiting.pop(member, None)

    def newest_for(self, member: FleetMember) -> PackedWeights | None:
        """The version that a member is to have: for those that pull it is the newest that the tree has, or none yet
        where that is too old, as after a time in which nobody pulled.

        Adapters are small as they are, and not in the tree.
        """
        newest = self._shelf.newest
        if not member.pulls or self._tree is None or self._tree.is_broken or newest is None or newest.adapter:
            return newest
        grown = self._tree.newest
        return None if grown is None or self._is_too_old(grown) else grown

    def _is_too_old(self, packed: PackedWeights) -> bool:
        """Leases are granted by the oldest version that is served, so that one who serves it would stop the run."""
        newest = self._shelf.newest
        return newest is not None and packed.version.number < newest.version.number - self._options.most_behind

    def _start_next(self) -> None:
        for member in tuple(self._waiting):
            packed = self.newest_for(member)
            if packed is None or not self._has_room_for(member):
                continue
            del self._waiting[member]
            if self._fleet.holds(member):
                work = self._join(member, packed)
                self._downloading[member] = self._tasks.create_task(work, name=f"join {member.generator_id}")

    def _has_room_for(self, member: FleetMember) -> bool:
        counted = sum(not other.announcement.relayed for other in self._downloading)
        return member.announcement.relayed or counted < self._at_once

    async def _join(self, member: FleetMember, packed: PackedWeights) -> None:
        alone = self._at_once == 1
        rest_s = 0.0
        try:
            with self._shelf.lent(packed):
                await self._attempt(member, packed)
            self._past.forget(_process(member))
            self._at_once = min(self._at_once + 1, self._options.parallel_pulls)
        except ServiceUnreachable as error:
            logger.warning("generator %s is gone while it catches up: %s", member.generator_id, error)
            if self._fleet.holds(member):
                self._fleet.lost(member.generator_id)
        except ServiceError as error:
            rest_s = self._failed(member, packed, error, alone=alone)
        finally:
            self._downloading.pop(member, None)
            self._ended()
        if rest_s:
            self._resting.add(member)
            try:
                await asyncio.sleep(rest_s)
            finally:
                self._resting.discard(member)
                self._ended()

    async def _attempt(self, member: FleetMember, packed: PackedWeights) -> None:
        start = time.monotonic()
        deadline_s = self._deadline_s(member, packed)
        member.form, member.sent_bytes = packed.form_for([member.base]), None
        manifest = None if self._tree is None or not member.pulls else self._tree.manifest(packed)
        body = Pull(version=str(packed.version), deadline_s=deadline_s, form=member.form, manifest=manifest)
        came = await self._commits.ask(member, "pull", body, PrepareResult, deadline_s=deadline_s + _GRACE_S)
        pulled = time.monotonic()
        if member.pulls and self._is_too_old(packed) and self._others_serve(member, since=packed.version.number + 1):
            logger.warning(
                "generator %s has pulled version %s, which is too old by now: it pulls again before it gets requests",
                member.generator_id, packed.version,
            )  # fmt: skip
            self._fleet.suspend(member)
            return
        proof = await self._commits.commit(member, packed, epoch=PULLED_EPOCH)
        ended = time.monotonic()
        served_before = member.pulls and member.serving is not None
        if self._commits.accept([proof], packed):
            received = packed.nbytes(member.form) if came.received_bytes is None else came.received_bytes
            took = CaughtUpMember(
                proof=proof, packed=packed, pull_s=pulled - start, commit_s=ended - pulled, received_bytes=received,
                served_before=served_before,
            )  # fmt: skip
            self._joined(took)

    def _deadline_s(self, member: FleetMember, packed: PackedWeights) -> float:
        """Enough for a slow link that is shared by all that may download at once."""
        options = self._options
        size = packed.nbytes(packed.form_for([member.base]))
        seconds = (
            options.pull_timeout_s + options.parallel_pulls * size / options.slowest_pull_bytes_per_s + packed.merge_s
        )
        return seconds * 2.0 ** min(self._past_of(member).slow, _MAX_DOUBLINGS)

    def _past_of(self, member: FleetMember) -> _Past:
        return self._past.get(_process(member)) or _Past()

    def _failed(self, member: FleetMember, packed: PackedWeights, error: ServiceError, *, alone: bool) -> float:
        """Out of service; the seconds until it may try again. Expelled if that goes on, by its own fault."""
        name = member.generator_id
        self._fleet.suspend(member)
        member.base = ""  # whatever it holds, the next download brings all
        past = self._past[_process(member)] = self._past_of(member)
        slow = _took_too_long(error)
        past.slow += slow
        past.failures += not _is_unavailable(error) and (alone or not slow)
        if slow:
            self._at_once = max(1, self._at_once // 2)
        logger.warning("generator %s failed to catch up with version %s: %s", name, packed.version, error)
        if past.failures >= self._options.pull_attempts and self._fleet.holds(member) and self._others_serve(member):
            reason = (
                f"it failed {past.failures} times in a row to catch up, last with version {packed.version}: {error}"
            )
            logger.error("generator %s is expelled: %s", name, reason)
            self._past.forget(_process(member))
            self._fleet.expel(name, reason=reason)
            return 0.0
        return min(self._options.pull_backoff_s * 2.0 ** min(past.failures, 10), _MAX_REST_S)

    def _others_serve(self, member: FleetMember, *, since: int = 0) -> bool:
        """Others serve version `since` or a newer one. Otherwise the fault may be one that all share, and the run has
        nobody to go on with.
        """
        others = [other.serving for other in self._fleet.members() if other is not member]
        return any(serving is not None and serving.number >= since for serving in others)


def _took_too_long(error: ServiceError) -> bool:
    return isinstance(error, ServiceTimeout) or (isinstance(error, ServiceRefused) and error.kind == PULL_TOOK_TOO_LONG)


def _is_unavailable(error: ServiceError) -> bool:
    return isinstance(error, ServiceFailed) and error.status == _UNAVAILABLE


def _process(member: FleetMember) -> tuple[str, str]:
    return member.generator_id, member.announcement.instance
