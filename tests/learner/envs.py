"""An intake on real sockets, with scripted env_services."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from learner.evaluation.config import EvaluationConfig
from learner.journal.journal import Journal, LoggedProof, Record, read_journal
from learner.leases.admission import GroupRules
from learner.leases.dead_letters import DeadLetters
from learner.leases.evaluation_leases import Evaluator
from learner.leases.filters import GroupFilter
from learner.leases.granting import LeaseTerms
from learner.leases.intake import Intake
from learner.leases.options import IntakeEvents, IntakeOptions
from learner.ledger import Ledger, LedgerConfig, LedgerSnapshot
from learner.teachers.limits import TeachingLimits
from learner.weights.fleet import FleetMembers
from learner.weights.provenance import LoadedWeights
from protocol.generation import Sampling
from protocol.messages import (
    EnvironmentInfo,
    FinishedLease,
    Hello,
    Lease,
    LeaseGrant,
    Message,
    OutcomeReceipt,
    RunningLease,
    Welcome,
)
from protocol.model import PolicyVersion
from protocol.trajectories import TrajectoryGroup
from services.http.waiting import Waiting
from services.zmq.sockets import DealerSocket, RouterSocket
from tests.learner.generators import FINGERPRINTS, announcement
from tests.learner.samples import INCARNATION, INSTANCE, LEDGER

M = TypeVar("M", bound=Message)
RUN = "run-a"
EVERY_GROUP = GroupFilter()
_VERSIONS = 300
"""So many of each incarnation are proven by the generator of the samples."""
ADDITION = EnvironmentInfo(name="addition", train_tasks=100, evaluation_tasks=5000)


@dataclass
class SetClock:
    """Seconds, as set by the test."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class ScriptedEnv:
    """The env_service's end of the conversation. `seen` are messages that were passed over."""

    dealer: DealerSocket
    name: str
    instance: str = "i0"
    seen: list[Message] = field(default_factory=list)

    def hello(
        self,
        *,
        capacity: int = 100,
        tokenizer: str = FINGERPRINTS.tokenizer,
        chat_template: str = FINGERPRINTS.chat_template,
        environments: Sequence[EnvironmentInfo] = (ADDITION,),
        running: Sequence[RunningLease] = (),
        run: str = RUN,
        address: str = "",
    ) -> Hello:
        return Hello(
            env_id=self.name,
            instance=self.instance,
            capacity=capacity,
            environments=tuple(environments),
            tokenizer=tokenizer,
            chat_template=chat_template,
            run=run,
            running=tuple(running),
            address=address,
        )

    async def send(self, message: Message) -> None:
        await self.dealer.send(message)

    async def next(self, kind: type[M]) -> M:
        """The next message of this kind."""
        async with asyncio.timeout(60):
            while True:
                message = await self.dealer.receive()
                if isinstance(message, kind):
                    return message
                self.seen.append(message)

    async def enter(self, *, capacity: int = 100, running: Sequence[RunningLease] = ()) -> Welcome:
        await self.send(self.hello(capacity=capacity, running=running))
        return await self.next(Welcome)

    async def leases(self, count: int) -> list[Lease]:
        """Exactly so many leases, in however many grants."""
        leases: list[Lease] = []
        while len(leases) < count:
            leases += (await self.next(LeaseGrant)).leases
        assert len(leases) == count, leases
        return leases

    async def finish(self, *groups: TrajectoryGroup) -> None:
        """Sends groups and waits until they are acknowledged."""
        for group in groups:
            await self.send(FinishedLease(group=group))
            acknowledged = await self.next(OutcomeReceipt)
            assert (acknowledged.lease_id, acknowledged.attempt) == (group.lease_id, group.attempt)
            assert (acknowledged.purpose, acknowledged.incarnation) == (group.purpose, group.incarnation)


@dataclass
class RunningIntake:
    """An intake whose loops run, and what it is made of."""

    intake: Intake
    ledger: Ledger
    fleet: FleetMembers
    router: RouterSocket
    clock: SetClock
    folder: Path
    left_out: Counter[str]
    not_written: Counter[str]
    waits: Waiting
    forgotten: list[tuple[int, str]]
    masked: list[tuple[int, int]]

    async def serve(self, number: int) -> None:
        """A generator serves this version."""
        self.fleet.announce(announcement("g", "http://127.0.0.1:1"), now=0.0)
        self.fleet.committed("g", version=PolicyVersion(1, number), fingerprint="f")
        await self.intake.fleet_changed()

    async def train(self) -> None:
        """A whole step: takes a batch, trains and serves it."""
        async with asyncio.timeout(60):
            batch = await self.intake.take()
        await self.intake.trained(batch.version + 1)
        await self.serve(batch.version + 1)

    def journal(self) -> list[Record]:
        """The journal's records of leases."""
        records = read_journal(self.folder / "journal")
        return [record for record in records if not isinstance(record, LoggedProof)]

    @asynccontextmanager
    async def env(self, name: str, *, instance: str = "i0") -> AsyncIterator[ScriptedEnv]:
        async with DealerSocket.connect(self.router.address, identity=f"{name}/{instance}") as dealer:
            yield ScriptedEnv(dealer=dealer, name=name, instance=instance)


def options(*, filters: GroupFilter, greedy_baseline: bool, teaching: TeachingLimits) -> IntakeOptions:
    return IntakeOptions(
        run=RUN,
        incarnation=INCARNATION,
        environment="addition",
        heartbeat_every_s=1.0,
        lease_timeout_s=LEDGER.lease_timeout_s,
        tokenizer=FINGERPRINTS.tokenizer,
        chat_template=FINGERPRINTS.chat_template,
        rules=GroupRules(
            vocabulary_size=10,
            min_group_size=2,
            filters=filters,
            greedy_baseline=greedy_baseline,
            teaching=teaching,
        ),
    )


@asynccontextmanager
async def learner(
    folder: Path,
    *,
    ledger_config: LedgerConfig = LEDGER,
    former: LedgerSnapshot | None = None,
    total_groups: int = 1000,
    filters: GroupFilter = EVERY_GROUP,
    serves: bool = True,
    evaluation: EvaluationConfig | None = None,
    greedy_baseline: bool = False,
    teaching: TeachingLimits | None = None,
) -> AsyncIterator[RunningIntake]:
    clock = SetClock()
    left_out: Counter[str] = Counter()
    not_written: Counter[str] = Counter()
    forgotten: list[tuple[int, str]] = []
    masked: list[tuple[int, int]] = []

    def count(reason: str) -> None:
        left_out[reason] += 1

    ledger = Ledger(ledger_config) if former is None else Ledger.restore(ledger_config, former)
    fleet = FleetMembers(
        fingerprints=FINGERPRINTS, incarnation=INCARNATION, announce_every_s=1.0, silence_s=60.0, changed=lambda: None
    )
    waits = Waiting()
    waits.started()
    async with RouterSocket.bind("tcp://127.0.0.1:*") as router:
        with Journal.open(folder / "journal") as journal:
            intake = Intake(
                socket=router,
                ledger=ledger,
                journal=journal,
                fleet=fleet,
                evaluator=Evaluator(
                    config=evaluation or EvaluationConfig(),
                    max_tokens=8,
                    timeout_s=LEDGER.lease_timeout_s,
                    incarnation=INCARNATION,
                ),
                terms=LeaseTerms(
                    group_size=2,
                    sampling=Sampling(max_tokens=8),
                    seed=0,
                    timeout_s=LEDGER.lease_timeout_s,
                    total_groups=total_groups,
                    greedy_baseline=greedy_baseline,
                ),
                dead_letters=DeadLetters(folder / "dead_letters.jsonl", largest_share=0.25),
                waits=waits,
                options=options(
                    filters=filters, greedy_baseline=greedy_baseline, teaching=teaching or TeachingLimits()
                ),
                events=IntakeEvents(
                    left_out=count,
                    forgotten=lambda group, why: forgotten.append((group.lease_id, why)),
                    masked=lambda tokens, trajectories: masked.append((tokens, trajectories)),
                    failed_write=lambda what: not_written.update([what]),
                ),
                clock=clock,
            )
            made = RunningIntake(
                left_out=left_out,
                not_written=not_written,
                intake=intake,
                ledger=ledger,
                fleet=fleet,
                router=router,
                clock=clock,
                folder=folder,
                waits=waits,
                forgotten=forgotten,
                masked=masked,
            )
            for version in range(_VERSIONS * INCARNATION):
                proven = PolicyVersion(1 + version // _VERSIONS, version % _VERSIONS)
                fleet.provenance.prove(INSTANCE, LoadedWeights(proven, digest="", fingerprint=""))
            for _ in fleet.provenance.untold():
                pass  # the journal is to hold what a test brings about
            if serves:
                await made.serve(0)
            loops = [asyncio.create_task(intake.receive()), asyncio.create_task(intake.tick())]
            try:
                yield made
                for loop in loops:
                    assert not loop.done(), "a loop of the intake ended"
            finally:
                for loop in loops:
                    loop.cancel()
                await asyncio.wait(loops, timeout=5)
            ledger.books().check()
