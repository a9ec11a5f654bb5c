"""Weight sync, the learner's side: the newest weights to every generator, two-phase, while training goes on.

    trainer thread ──offer()──▶ hash ──▶ shelf ──┬─ rounds ─▶ those that serve: broadcast, one version at a time
                                                 ├─ joins ──▶ those that do not: a few downloads, beside the rounds
                                                 └─ tree ──▶ joins ──▶ those that pull: what has changed

| loop   | waits for                            | and then                                                           |
|--------|--------------------------------------|--------------------------------------------------------------------|
| hash   | an offer                             | hashes the newest, bucket by bucket; offers made meanwhile coalesce |
| rounds | a packed version                     | broadcasts the newest to all that serve, or wait for a download    |
| tree   | a packed version, one that pulls     | writes what has changed in it, for those that pull                  |
| joins  | a change of the fleet, a round's end | begins downloads for those that have to catch up, and waits for none |
| doubts | a change of the fleet                | ends the run if all generators are doubted, and stay so            |

Every wait but those in the table has a deadline; none of them is the trainer's.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from learner.weights.broadcast import RoundResult, WeightBroadcast
from learner.weights.catch_up import CatchUps, CaughtUpMember
from learner.weights.fleet import FleetMember, FleetMembers
from learner.weights.proofs import Commits, Proof, Proofs
from learner.weights.published import (
    JoinReport,
    PackedWeights,
    Packer,
    PublishedWeights,
    PublisherOptions,
    PublishReport,
    Snapshot,
)
from learner.weights.senders import SenderLost
from learner.weights.tree import DeltaReport, WeightTree
from services.http.client import HttpClient, ServiceError
from services.http.waiting import QUIET_S, Waiting
from services.process import DaemonThreads

logger = logging.getLogger(__name__)

_TREE_RETRY_S = 5.0
_ROUNDS_REST_S = 1.0
_SENDER_REST_S = 1.0
_NONE_SERVES = (
    "one loads its model first, which takes minutes if that is large; its own log says how far it is, and `headway "
    "doctor RUN.toml` whether none runs"
)
"""With no new version for so long, a member that has missed the last round by its download downloads again."""


class NoGeneratorIsRight(RuntimeError):
    """All generators serve something else than the learner's weights, as far as their logprobs tell."""

    def __init__(self, members: Sequence[FleetMember]) -> None:
        each = "; ".join(f"{member.generator_id}: {member.doubted}" for member in members)
        super().__init__(
            f"of {len(members)} generators none serves the learner's weights by its logprobs of the probe, so that the "
            f"fault may be in what the learner publishes, or in numbers of too little precision ({each}). Compare the "
            "model folders, engine.dtype and quantization with the learner's; weights.probe_tolerance allows more"
        )


class Publisher:
    """Owns the weight plane. `offer` may be called from any thread; everything else belongs to the event loop."""

    def __init__(
        self,
        *,
        fleet: FleetMembers,
        client: HttpClient,
        options: PublisherOptions,
        shelf: PublishedWeights,
        waits: Waiting,
        published: Callable[[PublishReport], None],
        joined: Callable[[JoinReport], None],
        tree_folder: Path | None = None,
        grown: Callable[[DeltaReport], None] = lambda report: None,
        may_write: Callable[[], None] = lambda: None,
    ) -> None:
        self._fleet = fleet
        self._options = options
        self._shelf = shelf
        self._waits = waits
        self._published = published
        self._joined = joined
        proofs = Proofs(
            probe_tolerance=options.probe_tolerance,
            dtype=options.dtype,
            as_computed=options.as_computed,
            provenance=fleet.provenance,
        )
        self._commits = Commits(fleet=fleet, client=client, proofs=proofs, timeout_s=options.commit_timeout_s)
        self._threads = DaemonThreads(name="weight-plane")
        self._grown = grown
        self._tree = (
            None
            if tree_folder is None
            else WeightTree(tree_folder, anchor_every=options.anchor_every, threads=self._threads, may_write=may_write)
        )
        self._packer = Packer(
            incarnation=options.incarnation, threads=self._threads, client=client, for_devices=options.backend == "nccl"
        )
        self._offered: Snapshot | None = None
        self._held_at: int | None = None
        self._later: list[tuple[Snapshot, bool]] = []
        """Offered since a version is held: those that are to be held in their turn, and the newest."""
        self._broadcast: PackedWeights | None = None
        self._rounds_rest = False
        self._reported = -1
        self._unreported: PublishReport | None = None
        self._offer_came = asyncio.Event()
        self._round_due = asyncio.Event()
        self._joins_due = asyncio.Event()
        self._tree_due = asyncio.Event()
        self._progress = asyncio.Event()
        self._doubts_due = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._rest: asyncio.TimerHandle | None = None
        """Holds no version: it would keep all that are published within its second."""

    def offer(self, snapshot: Snapshot, *, hold: bool = False) -> None:
        """Publish these weights next; returns at once. With `hold` no newer ones are published until `let_go`."""
        self._loop.call_soon_threadsafe(self._take_offer, snapshot, hold)

    def _take_offer(self, snapshot: Snapshot, hold: bool = False) -> None:
        if self._held_at is not None and snapshot.version > self._held_at:
            if self._later and not self._later[-1][1]:
                self._later.pop()
            self._later.append((snapshot, hold))
            return
        self._offered = snapshot
        self._offer_came.set()
        if hold:
            self._held_at = snapshot.version

    def let_go(self, version: int) -> None:
        """Newer versions are published again, if it is this one that was held; before its turn it is not held."""
        if self._held_at == version:
            later, self._later, self._held_at = self._later, [], None
            for snapshot, hold in later:
                self._take_offer(snapshot, hold)
        else:
            self._later = [(one, hold and one.version != version) for one, hold in self._later]

    @property
    def newest(self) -> PackedWeights | None:
        """The newest version that is ready to be sent."""
        return self._shelf.newest

    def fleet_changed(self) -> None:
        """Somebody came, went, or serves another version."""
        self._wake()
        self._progress.set()
        self._doubts_due.set()

    async def wait_until_served(self, version: int) -> None:
        """Returns when every serving generator, and at least one, holds `version` or a newer one."""
        with self._waits.wait(f"a generator that serves version {version}", quiet_s=QUIET_S, remedy=_NONE_SERVES):
            while self._fleet.served is None or self._fleet.served < version:
                self._progress.clear()
                await self._progress.wait()

    async def served_in_time(self, version: int, *, wait_s: float) -> bool:
        """Waits for `wait_s` until `version` is served, then does without those that pull and do not serve it yet.

        False if it is not served even so: while it is held nothing newer is, and a generator that hangs would stop the
        run.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self.wait_until_served(version)
        self._suspend_late(version)
        return self._fleet.served is not None and self._fleet.served >= version

    async def run(self) -> None:
        """Publishes until cancelled. Raises NoGeneratorIsRight."""
        async with asyncio.TaskGroup() as tasks:
            rounds = WeightBroadcast(
                fleet=self._fleet, commits=self._commits, options=self._options, tasks=tasks, threads=self._threads
            )
            joins = CatchUps(
                fleet=self._fleet, shelf=self._shelf, commits=self._commits, options=self._options, tasks=tasks,
                joined=self._caught_up, ended=self._wake, tree=self._tree,
            )  # fmt: skip
            tasks.create_task(self._pack(), name="pack")
            tasks.create_task(self._run_rounds(rounds, joins), name="rounds")
            tasks.create_task(self._run_joins(rounds, joins), name="joins")
            tasks.create_task(self._watch_doubts(), name="doubts")
            if self._tree is not None:
                tasks.create_task(self._grow(self._tree), name="tree")

    def _wake(self) -> None:
        self._round_due.set()
        self._joins_due.set()
        self._tree_due.set()

    async def _pack(self) -> None:
        while True:
            await self._offer_came.wait()
            self._offer_came.clear()
            assert self._offered is not None, "an offer was announced"
            snapshot, self._offered = self._offered, None
            try:
                packed = await self._packer.pack(snapshot)
            except SenderLost as error:  # whoever watches the ranks ends the learner, or it was only late
                logger.warning("version %d is not published yet: %s", snapshot.version, error)
                await asyncio.sleep(_SENDER_REST_S)
                if self._offered is None:
                    self._offered = snapshot
                    self._offer_came.set()
                continue
            del snapshot
            self._shelf.put(packed)
            self._wake()

    async def _grow(self, tree: WeightTree) -> None:
        """Only while somebody pulls: it reads all weights of two versions."""
        while True:
            await self._tree_due.wait()
            self._tree_due.clear()
            newest = self._shelf.newest
            if not any(member.pulls for member in self._fleet.members()):
                tree.let_go()
                continue
            written = newest is not None and tree.newest is not None and tree.newest.version == newest.version
            if newest is None or written:
                continue
            self._suspend_late(newest.version.number - self._options.most_behind)
            if newest.adapter is not None:
                continue
            try:
                self._grown(await tree.add(await newest.brought_here()))
            except (OSError, ServiceError) as error:
                logger.error(
                    "version %s was not written for generators that pull, which download it whole: %s; they pull what "
                    "changes again once there is room in %s", newest.version, error, tree.folder,
                )  # fmt: skip
                tree.is_broken = True
                self._joins_due.set()
                await asyncio.sleep(_TREE_RETRY_S)
            self._wake()

    def _suspend_late(self, oldest: int) -> None:
        """Takes members that pull, and serve a version before that, out of service until they have caught up, if others
        serve: leases are granted by the oldest version that is served.
        """
        serving = [member for member in self._fleet.members() if member.serving is not None]
        late = [member for member in serving if member.pulls and member.serving and member.serving.number < oldest]
        if len(late) < len(serving):
            for member in late:
                logger.warning(
                    "generator %s pulls too slowly: it serves version %s, and gets no requests until it has caught up "
                    "with version %d at least", member.generator_id, member.serving, oldest,
                )  # fmt: skip
                self._fleet.suspend(member)

    async def _run_rounds(self, rounds: WeightBroadcast, joins: CatchUps) -> None:
        try:
            while True:
                await self._round_due.wait()
                self._round_due.clear()
                packed = self._shelf.newest
                waiting = [member for member in joins.waiting if rounds.takes_joiner(member)]
                if packed is None or (packed is self._broadcast and not self._may_begin_with(waiting)):
                    continue
                # One that serves, and is behind, may wait for its download: it is one member.
                members = list(dict.fromkeys([*self._to_be_told(packed, rounds, joins), *waiting]))
                self._broadcast, self._rounds_rest = packed, False
                if self._rest is not None:
                    self._rest.cancel()
                if members:
                    joins.hand_over(waiting)
                    self._report(packed, await rounds.run(members, packed), joiners=waiting)
                else:
                    self._report_download(packed)
                self._wake()
                self._rest = self._loop.call_later(_ROUNDS_REST_S, self._begin_rest)
        finally:
            rounds.close()

    def _may_begin_with(self, waiting: Sequence[FleetMember]) -> bool:
        """While nobody serves, a broadcast to those that wait for their download delays nobody."""
        return bool(waiting) and self._fleet.served is None

    def _to_be_told(self, packed: PackedWeights, rounds: WeightBroadcast, joins: CatchUps) -> list[FleetMember]:
        """The generators that serve an older version, if it has not been broadcast yet."""
        if packed is self._broadcast:
            return []
        elsewhere = joins.busy | rounds.busy
        behind = [member for member in self._fleet.members() if member.serving != packed.version]
        return [member for member in behind if rounds.takes(member) and member not in elsewhere]

    async def _run_joins(self, rounds: WeightBroadcast, joins: CatchUps) -> None:
        while True:
            await self._joins_due.wait()
            self._joins_due.clear()
            behind = [
                member
                for member in self._fleet.members()
                if member not in rounds.busy and self._has_to_catch_up(member, rounds, joins)
            ]
            rounds.part_with(behind)
            joins.begin(behind)
            if self._may_begin_with(joins.waiting):
                self._round_due.set()

    async def _watch_doubts(self) -> None:
        """Nobody serves while all are doubted, so the run would wait for ever."""
        while True:
            await self._doubts_due.wait()
            self._doubts_due.clear()
            try:
                async with asyncio.timeout(self._fleet.silence_s):
                    while self._fleet.all_doubted:
                        await self._doubts_due.wait()
                        self._doubts_due.clear()
            except TimeoutError:
                raise NoGeneratorIsRight(self._fleet.members()) from None

    def _begin_rest(self) -> None:
        self._rounds_rest = True
        self._wake()

    def _has_to_catch_up(self, member: FleetMember, rounds: WeightBroadcast, joins: CatchUps) -> bool:
        """It serves nothing; or it is behind, and no round will bring it the newest version."""
        newest = joins.newest_for(member)
        if newest is None or not member.able or member.serving == newest.version:
            return False
        return member.serving is None or self._rounds_rest or not rounds.takes(member)

    def _report(self, packed: PackedWeights, result: RoundResult, *, joiners: Sequence[FleetMember]) -> None:
        seconds = result.prepare_s + result.commit_s
        for proof in result.proofs:
            if proof.member in joiners:
                self._joined(_join_of(proof, packed, seconds=seconds))
        if result.proofs:
            answers = [proof.answer for proof in result.proofs]
            self._say_published(
                PublishReport(
                    version=packed.version.number,
                    members=len(answers),
                    total_s=seconds,
                    prepare_s=result.prepare_s,
                    commit_s=result.commit_s,
                    pause_s=max(answer.pause_s for answer in answers),
                    probe_gap=max(proof.gap.mean for proof in result.proofs),
                    sent_bytes=max(proof.received_bytes(packed) for proof in result.proofs),
                )
            )
        else:
            self._report_download(packed)

    def _report_download(self, packed: PackedWeights) -> None:
        """No round has brought the version to anybody: one that has downloaded it has published it."""
        if self._unreported is not None and self._unreported.version == packed.version.number:
            self._say_published(self._unreported)

    def _caught_up(self, joined: CaughtUpMember) -> None:
        """A version that no round brings to anybody is published by the first download."""
        proof = joined.proof
        if not joined.served_before:
            self._joined(_join_of(proof, joined.packed, seconds=joined.pull_s + joined.commit_s))
        report = _publish_of(joined)
        others = [member for member in self._fleet.members() if member is not proof.member]
        if all(member.serving is None or member.pulls for member in others):
            self._say_published(report)
        else:
            self._unreported = report

    def _say_published(self, report: PublishReport) -> None:
        if report.version > self._reported:
            self._reported = report.version
            self._published(report)


def _join_of(proof: Proof, packed: PackedWeights, *, seconds: float) -> JoinReport:
    return JoinReport(generator_id=proof.name, version=packed.version.number, seconds=seconds, probe_gap=proof.gap.mean)


def _publish_of(joined: CaughtUpMember) -> PublishReport:
    return PublishReport(
        version=joined.packed.version.number,
        members=1,
        total_s=joined.pull_s + joined.commit_s,
        prepare_s=joined.pull_s,
        commit_s=joined.commit_s,
        pause_s=joined.proof.answer.pause_s,
        probe_gap=joined.proof.gap.mean,
        sent_bytes=joined.received_bytes,
    )
