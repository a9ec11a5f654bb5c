"""A channel of versions beside the newest ones: its generators hold what was put into it, and nothing else.

    put ─▶ shelf ─▶ each member that serves something else: pull (checksummed chunks) ─▶ commit ─▶ proof ─▶ serving

It is the way by which a generator catches up in the fleet of rollouts, and the same proofs: the hashes of what arrives,
the checksum of what is loaded, the logprobs of the probe. Its checksum of a version must also be the one that it was
proven by the first time, so that a way back is known to lead to the same weights. There are no broadcasts: these
generators are few, and versions seldom. Env_services never hear of them.

The loop waits for a change of the members or of what is put, and for the clock, by which silent members leave.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from learner.weights.catch_up import CatchUps, CaughtUpMember
from learner.weights.fleet import FleetMember, FleetMembers
from learner.weights.proofs import Commits, Proofs
from learner.weights.published import PackedWeights, PublishedWeights, PublisherOptions
from protocol.fleet import Channel
from services.http.client import HttpClient

logger = logging.getLogger(__name__)

_TICK_S = 1.0


class ReleaseChannel:
    """The generators of one channel. `first_proofs` are the checksums by version and kind of generator that are known,
    from before or from another channel; `proven` is told each proof, and adds it there: version, generator, kind,
    checksum.
    """

    def __init__(
        self,
        name: Channel,
        *,
        make_fleet: Callable[[Callable[[], None]], FleetMembers],
        client: HttpClient,
        options: PublisherOptions,
        first_proofs: Mapping[tuple[str, str], str],
        proven: Callable[[str, str, str, str], None],
    ) -> None:
        self.name = name
        self.shelf = PublishedWeights()
        self._stirred = asyncio.Event()
        self.fleet = make_fleet(self._stirred.set)
        self._options = options
        self._first = first_proofs
        self._proven = proven
        proofs = Proofs(
            probe_tolerance=options.probe_tolerance,
            dtype=options.dtype,
            as_computed=options.as_computed,
            provenance=self.fleet.provenance,
        )
        self._commits = Commits(fleet=self.fleet, client=client, proofs=proofs, timeout_s=options.commit_timeout_s)
        self._changes = asyncio.Condition()
        self._joins: CatchUps | None = None

    def put(self, packed: PackedWeights) -> None:
        """Members hold this from now on, as soon as they have it."""
        self.shelf.put(packed)
        self._stirred.set()

    @property
    def version(self) -> str | None:
        """The version that members are to hold."""
        return None if self.shelf.newest is None else str(self.shelf.newest.version)

    def serving(self) -> list[FleetMember]:
        """The members that are proven to serve it, but for those that are on the way to another version, which may be
        in them already: their proof of it comes later.
        """
        newest, busy = self.shelf.newest, set() if self._joins is None else self._joins.busy
        return [one for one in self.fleet.members() if newest and one.serving == newest.version and one not in busy]

    async def wait_until_served(self, version: str) -> None:
        """Returns when all members serve that version, at once if there are none, or when another one is put."""
        async with self._changes:
            await self._changes.wait_for(
                lambda: self.version != version or len(self.serving()) == len(self.fleet.members())
            )

    async def run(self) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            joins = self._joins = CatchUps(
                fleet=self.fleet, shelf=self.shelf, commits=self._commits, options=self._options, tasks=tasks,
                joined=self._joined, ended=self._stirred.set,
            )  # fmt: skip
            tasks.create_task(self._drop_silent(), name=f"silence in {self.name}")
            while True:
                await self._stirred.wait()
                self._stirred.clear()
                self._expel_doubted()
                joins.begin([member for member in self.fleet.members() if self._is_behind(member)])
                for _ in self.fleet.provenance.untold():
                    continue  # nothing that these sample is trained, so no journal is told
                async with self._changes:
                    self._changes.notify_all()

    def _expel_doubted(self) -> None:
        """Users get an answer from whoever holds any weights, so that a doubt is not waited out here: the refusal of
        its announcement makes a generator drop what it holds.
        """
        for name, fault in self.fleet.expel_doubted().items():
            logger.error("generator %s of channel %s is expelled: %s", name, self.name, fault)

    def _is_behind(self, member: FleetMember) -> bool:
        newest = self.shelf.newest
        return newest is not None and member.able and member.serving != newest.version

    def _joined(self, joined: CaughtUpMember) -> None:
        version, member, found = str(joined.packed.version), joined.proof.member, joined.proof.answer.fingerprint
        kind = "/".join(map(str, joined.proof.likeness))
        before = self._first.get((version, kind), found)
        if before != found:
            fault = (
                f"the checksum of its loaded weights is {found} at version {version}, and was {before} when that "
                "version was proven first"
            )
            logger.error("generator %s of channel %s is expelled: %s", member.generator_id, self.name, fault)
            self.fleet.expel(member.generator_id, reason=fault)
            return
        logger.info(
            "generator %s of channel %s serves version %s, checksum %s, probe gap %.2g nats",
            member.generator_id, self.name, version, found, joined.proof.gap.mean,
        )  # fmt: skip
        self._proven(version, member.generator_id, kind, found)

    async def _drop_silent(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(_TICK_S)
            away_s = time.monotonic() - began - _TICK_S
            if away_s > _TICK_S:
                self.fleet.stood_still(away_s)
            for name in self.fleet.expire(now=time.monotonic()):
                logger.warning("no heartbeat from generator %s of channel %s: removed", name, self.name)
