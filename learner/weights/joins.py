"""Joins: a generator that has to catch up downloads the newest version, one task for each, beside the rounds.

    pull (the generator downloads, in checksummed chunks) ─▶ commit ─▶ in service

A failure is tried again after a rest; failures in a row expel the generator, by name.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from learner.weights.commits import Commits
from learner.weights.fleet import Fleet, Member
from learner.weights.options import PublisherOptions
from learner.weights.proofs import Proof
from learner.weights.shelf import Packed, Shelf
from protocol.fleet import PULLED_EPOCH, Prepared, Pull
from services.http_client import ServiceError, ServiceFailed, ServiceUnreachable

log = logging.getLogger(__name__)

_GRACE_S = 5.0
_LONGEST_REST_S = 8.0
_UNAVAILABLE = 503


@dataclass(frozen=True)
class Joined:
    """A member that serves what it downloaded, and where the seconds went."""

    proof: Proof
    packed: Packed
    pull_s: float
    commit_s: float


class Joins:
    """At most one download of a member at a time; `tasks` holds them all."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        shelf: Shelf,
        commits: Commits,
        options: PublisherOptions,
        tasks: asyncio.TaskGroup,
        joined: Callable[[Joined], None],
        ended: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._shelf = shelf
        self._commits = commits
        self._options = options
        self._tasks = tasks
        self._joined = joined
        self._ended = ended
        self._failures: dict[tuple[str, str], int] = {}
        self.busy: set[Member] = set()
        """Members that download, or rest after a failure."""

    def begin(self, members: Sequence[Member]) -> None:
        """Has these members catch up with the newest version."""
        for member in members:
            if member not in self.busy and self._shelf.newest is not None:
                self.busy.add(member)
                self._tasks.create_task(self._join(member, self._shelf.newest), name=f"join {member.generator_id}")

    async def _join(self, member: Member, packed: Packed) -> None:
        try:
            with self._shelf.lent(packed):
                await self._attempt(member, packed)
            self._failures.pop(_process(member), None)
        except ServiceUnreachable as error:
            log.warning("generator %s is gone while it catches up: %s", member.generator_id, error)
            if self._fleet.holds(member):
                self._fleet.lost(member.generator_id)
        except ServiceError as error:
            await self._failed(member, packed, error)
        finally:
            self.busy.discard(member)
            self._ended()

    async def _attempt(self, member: Member, packed: Packed) -> None:
        start = time.monotonic()
        deadline_s = self._options.pull_timeout_s
        body = Pull(version=str(packed.version), deadline_s=deadline_s)
        await self._commits.ask(member, "pull", body, Prepared, deadline_s=deadline_s + _GRACE_S)
        pulled = time.monotonic()
        proof = await self._commits.commit(member, packed, epoch=PULLED_EPOCH)
        ended = time.monotonic()
        if self._commits.accept([proof], packed):
            self._joined(Joined(proof=proof, packed=packed, pull_s=pulled - start, commit_s=ended - pulled))

    async def _failed(self, member: Member, packed: Packed, error: ServiceError) -> None:
        """Out of service, and after a rest once more; expelled if that goes on."""
        name = member.generator_id
        self._fleet.suspend(member)
        failures = self._failures.get(_process(member), 0)
        if not (isinstance(error, ServiceFailed) and error.status == _UNAVAILABLE):
            failures += 1
            self._failures[_process(member)] = failures
        log.warning("generator %s failed to catch up with version %s: %s", name, packed.version, error)
        if failures >= self._options.pull_attempts and self._fleet.holds(member):
            reason = f"it failed {failures} times in a row to catch up, last with version {packed.version}: {error}"
            log.error("generator %s is expelled: %s", name, reason)
            self._fleet.expel(name, reason=reason)
            return
        await asyncio.sleep(min(self._options.pull_backoff_s * 2.0**failures, _LONGEST_REST_S))


def _process(member: Member) -> tuple[str, str]:
    return member.generator_id, member.announcement.instance
