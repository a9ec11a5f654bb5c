"""The conversation with the learner, over real sockets, with rollouts that the test finishes by hand."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from env_service.checkpoints.records import LeaseRecords
from env_service.connection import LearnerLink
from env_service.leases.outbox import Outbox
from env_service.leases.running import RunningLeases
from env_service.rollouts.completions import RolloutProgress
from env_service.rollouts.fleet import GeneratorFleet
from env_service.rollouts.outcomes import Outcome, RolloutMetrics
from protocol.codec import DamagedMessage
from protocol.lease_keys import LeaseKey, key_of
from protocol.messages import (
    EnvironmentInfo,
    FailedLease,
    FinishedLease,
    Fleet,
    Goodbye,
    Heartbeat,
    Hello,
    Lease,
    LeaseCancellation,
    Message,
    OutcomeReceipt,
    PeerRefusal,
    RunningLease,
    StatusNote,
    Welcome,
)
from protocol.trajectories import Purpose, RewardRecord, Trajectory, TrajectoryGroup, Turn, VersionSpan
from services.http.metrics import Metrics
from services.zmq.sockets import DealerSocket, RouterSocket
from tests.env_service.peers import ScriptedLearner, lease, serving
from tests.services.diagnosis.statuses import status

_MOST_HELLOS = 50
HELLO = Hello(
    env_id="env-0",
    instance="i0",
    capacity=2,
    environments=(EnvironmentInfo(name="addition", train_tasks=8, evaluation_tasks=2),),
    tokenizer="t",
    chat_template="c",
)


@dataclass
class ManualRollouts:
    """Each lease waits until the test says what became of it."""

    outcomes: dict[LeaseKey, asyncio.Future[Outcome]] = field(default_factory=dict)
    started: asyncio.Queue[LeaseKey] = field(default_factory=asyncio.Queue)
    cancelled: asyncio.Queue[LeaseKey] = field(default_factory=asyncio.Queue)

    async def run(self, granted: Lease, progress: RolloutProgress) -> Outcome:
        key = key_of(granted)
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.outcomes[key] = future
        self.started.put_nowait(key)
        try:
            return await future
        except asyncio.CancelledError:
            self.cancelled.put_nowait(key)
            raise

    async def next_started(self) -> LeaseKey:
        async with asyncio.timeout(60):
            return await self.started.get()

    async def finish(self, outcome: Outcome) -> None:
        self.outcomes[key_of(outcome)].set_result(outcome)


@dataclass
class LearnerConversation:
    learner: ScriptedLearner
    link: LearnerLink
    rollouts: ManualRollouts
    running: RunningLeases
    fleet: GeneratorFleet
    outbox: Outbox


@asynccontextmanager
async def conversing(
    *, resend_s: float = 0.2, hello_every_s: float = 60, capacity: int = 2, records: LeaseRecords | None = None
) -> AsyncIterator[LearnerConversation]:
    """A conversation with a learner that has not answered yet. Of hellos that are repeated, some can still be on their
    way when a slow test looks for what comes after them: only those tests that are about them repeat them.
    """
    metrics = RolloutMetrics(Metrics("env-service"))
    fleet, outbox, rollouts = GeneratorFleet(), Outbox(resend_s=resend_s), ManualRollouts()
    router = RouterSocket.bind("tcp://127.0.0.1:*")
    learner = ScriptedLearner(router)
    async with DealerSocket.connect(router.address, identity="env-0") as dealer:
        link = LearnerLink(
            connection=dealer,
            hello=HELLO,
            fleet=fleet,
            outbox=outbox,
            metrics=metrics,
            hello_every_s=hello_every_s,
            records=records,
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                running = RunningLeases(
                    run=rollouts.run, report=link.report, capacity=capacity, tasks=tasks, metrics=metrics
                )
                loops = [tasks.create_task(link.receive(running)), tasks.create_task(link.tick(running))]
                yield LearnerConversation(learner, link, rollouts, running, fleet, outbox)
                running.cancel_all()
                for loop in loops:
                    loop.cancel()
        finally:
            learner.router.close()


async def forgotten(talk: LearnerConversation) -> Hello:
    """The first hello to a learner that does not know the peer any more, whose lease runs. One from before the first
    welcome can still be on its way, and names no lease.
    """
    await talk.learner.say(PeerRefusal(reason="unknown_peer", message="say hello first"))
    for _ in range(_MOST_HELLOS):
        if (hello := await talk.learner.expect(Hello)).running:
            return hello
    raise AssertionError(f"{_MOST_HELLOS} hellos name no lease")


@asynccontextmanager
async def working(*, purpose: Purpose = "train") -> AsyncIterator[LearnerConversation]:
    """A conversation in which lease 5 has been granted and is being rolled out."""
    async with conversing() as talk:
        await talk.learner.welcome()
        await talk.learner.grant(lease(5, purpose=purpose))
        await talk.rollouts.next_started()
        yield talk


def finished(granted: Lease) -> FinishedLease:
    trajectory = Trajectory(
        token_ids=np.array([1, 2], dtype=np.int32),
        loss_mask=np.array([0, 1], dtype=np.uint8),
        behavior_logprobs=np.array([0, -1], dtype=np.float32),
        version_spans=(VersionSpan(version="1.3", start=1, end=2),),
        turns=(Turn(start=0, completion_start=1, end=2, finish_reason="stop", generator_ids=("g",)),),
        reward=RewardRecord(reward=1.0, verifier="v"),
    )
    group = TrajectoryGroup(
        incarnation=granted.incarnation,
        lease_id=granted.lease_id,
        attempt=granted.attempt,
        purpose=granted.purpose,
        environment=granted.environment,
        task_index=granted.task_index,
        trajectories=(trajectory,),
    )
    return FinishedLease(group=group)


def acknowledged(granted: Lease) -> OutcomeReceipt:
    return OutcomeReceipt(
        incarnation=granted.incarnation, lease_id=granted.lease_id, attempt=granted.attempt, purpose=granted.purpose
    )


async def test_it_says_hello_until_it_is_welcomed_and_learns_who_serves() -> None:
    async with conversing(hello_every_s=0.1) as talk:
        assert await talk.learner.expect(Hello) == HELLO
        await talk.learner.expect(Hello)
        await talk.learner.welcome(serving("g0", "http://127.0.0.1:1"))
        await talk.link.wait_for(lambda: talk.link.welcomed and bool(talk.fleet.serving))
        assert (await talk.fleet.choose()).generator_id == "g0"


async def test_a_note_goes_out_before_the_learner_has_welcomed_this_process() -> None:
    async with conversing() as talk:
        note = StatusNote(url="http://127.0.0.1:7330", status=status("env-service"))
        await talk.link.note(note)
        assert await talk.learner.expect(StatusNote) == note
        assert not talk.link.welcomed


async def test_heartbeats_name_the_running_leases() -> None:
    async with conversing() as talk:
        await talk.learner.welcome()
        await talk.learner.grant(lease(5, attempt=1))
        await talk.rollouts.next_started()
        await talk.learner.expect(Heartbeat)
        beat = await talk.learner.expect(Heartbeat)
        assert beat.running == (
            RunningLease(incarnation=1, lease_id=5, attempt=1, purpose="train", waits_for="environment"),
        )


async def test_heartbeats_name_the_last_fleet_of_this_learner() -> None:
    async with working() as talk:
        await talk.learner.say(Fleet(generators=(), number=7))
        async with asyncio.timeout(60):
            while (await talk.learner.expect(Heartbeat)).fleet != 7:
                continue
        await talk.learner.say(Welcome(run="r", incarnation=2, heartbeat_every_s=0.1))
        async with asyncio.timeout(60):
            while (await talk.learner.expect(Heartbeat)).fleet != 0:
                continue


async def test_a_finished_group_is_sent_until_it_is_acknowledged() -> None:
    async with working() as talk:
        await talk.rollouts.finish(finished(lease(5)))
        for _ in range(3):
            assert (await talk.learner.expect(FinishedLease)).group.lease_id == 5
        await talk.learner.say(acknowledged(lease(5)))
        await talk.link.wait_for(lambda: len(talk.outbox) == 0)
        await talk.learner.expect(Heartbeat)
        talk.learner.seen.clear()
        for _ in range(4):
            await talk.learner.expect(Heartbeat)
        assert not [message for message in talk.learner.seen if isinstance(message, FinishedLease)]


async def test_a_failed_lease_is_sent_until_it_is_acknowledged() -> None:
    async with working() as talk:
        failed = FailedLease(incarnation=1, lease_id=5, attempt=0, purpose="train", data_fault=True, reason="odd")
        await talk.rollouts.finish(failed)
        assert [await talk.learner.expect(FailedLease) for _ in range(2)] == [failed, failed]


async def test_a_cancelled_lease_stops_and_leaves_the_heartbeat() -> None:
    async with conversing() as talk:
        await talk.learner.welcome()
        await talk.learner.grant(lease(5), lease(6))
        await talk.rollouts.next_started()
        await talk.rollouts.next_started()
        await talk.learner.say(
            LeaseCancellation(leases=(RunningLease(incarnation=1, lease_id=5, attempt=0, purpose="train"),))
        )
        async with asyncio.timeout(60):
            assert await talk.rollouts.cancelled.get() == (1, "train", 5, 0)
        await talk.learner.expect(Heartbeat)
        assert [beat.lease_id for beat in (await talk.learner.expect(Heartbeat)).running] == [6]


async def test_a_lease_that_is_granted_twice_runs_once() -> None:
    async with conversing() as talk:
        await talk.learner.welcome()
        await talk.learner.grant(lease(5))
        await talk.learner.grant(lease(5), lease(6))
        assert [await talk.rollouts.next_started(), await talk.rollouts.next_started()] == [
            (1, "train", 5, 0),
            (1, "train", 6, 0),
        ]


async def test_leases_beyond_the_capacity_wait_and_those_far_beyond_are_given_back() -> None:
    async with conversing(capacity=1) as talk:
        await talk.learner.welcome()
        await talk.learner.grant(*[lease(number) for number in range(5)])
        assert await talk.rollouts.next_started() == (1, "train", 0, 0)
        failed = await talk.learner.expect(FailedLease)
        assert (failed.lease_id, failed.data_fault) == (4, False)
        assert talk.rollouts.started.empty()
        await talk.rollouts.finish(finished(lease(0)))
        assert await talk.rollouts.next_started() == (1, "train", 1, 0)


async def test_a_restarted_learner_is_greeted_and_gets_what_was_not_acknowledged() -> None:
    async with conversing(resend_s=60) as talk:
        await talk.learner.welcome()
        await talk.learner.grant(lease(5), lease(6))
        await talk.rollouts.next_started()
        await talk.rollouts.next_started()
        await talk.rollouts.finish(finished(lease(5)))
        await talk.learner.expect(FinishedLease)
        address = talk.learner.router.address
        talk.learner.router.close()
        talk.learner.router = RouterSocket.bind(address)
        await talk.learner.expect(Heartbeat)
        await talk.learner.say(PeerRefusal(reason="unknown_peer", message="say hello first"))
        await talk.learner.welcome(incarnation=2)
        assert (await talk.learner.expect(FinishedLease)).group.lease_id == 5
        beat = await talk.learner.expect(Heartbeat)
        assert [running.lease_id for running in beat.running] == [5, 6], "alive until its group is acknowledged"


async def test_a_silent_learner_is_greeted_anew_and_rollouts_go_on() -> None:
    async with conversing(resend_s=60) as talk:
        await talk.learner.welcome(heartbeat_every_s=0.02)
        await talk.learner.grant(lease(5))
        await talk.rollouts.next_started()
        await talk.learner.expect(Hello)
        await talk.link.wait_for(lambda: not talk.link.welcomed)
        await talk.rollouts.finish(finished(lease(5)))
        await talk.learner.welcome(incarnation=2)
        assert (await talk.learner.expect(FinishedLease)).group.lease_id == 5
        assert talk.rollouts.cancelled.empty()


async def test_leaving_waits_for_the_acknowledgement_and_says_goodbye() -> None:
    async with working() as talk:
        await talk.rollouts.finish(finished(lease(5)))
        await talk.learner.expect(FinishedLease)
        leaving = asyncio.create_task(talk.link.leave("SIGTERM", within_s=10))
        await talk.learner.expect(Heartbeat)
        assert not leaving.done()
        await talk.learner.say(acknowledged(lease(5)))
        assert await talk.learner.expect(Goodbye) == Goodbye(reason="SIGTERM")
        await leaving


@pytest.mark.parametrize("within_s", [0.0, 0.1])
async def test_leaving_does_not_wait_longer_than_it_may(within_s: float) -> None:
    async with working() as talk:
        await talk.rollouts.finish(finished(lease(5)))
        await talk.learner.expect(FinishedLease)
        async with asyncio.timeout(60):
            await talk.link.leave("SIGTERM", within_s=within_s)
        await talk.learner.expect(Goodbye)


async def test_a_refusal_of_one_message_does_not_end_the_conversation() -> None:
    async with conversing() as talk:
        await talk.learner.welcome()
        await talk.link.wait_for(lambda: talk.link.welcomed)
        await talk.learner.say(PeerRefusal(reason="malformed", message="a field is wrong"))
        talk.learner.seen.clear()
        for _ in range(4):
            await talk.learner.expect(Heartbeat)
        assert not [message for message in talk.learner.seen if isinstance(message, Hello)]


async def test_a_group_that_was_damaged_on_the_way_is_sent_again() -> None:
    async with working() as talk:
        await talk.rollouts.finish(finished(lease(5)))
        await talk.learner.expect(FinishedLease)
        await talk.learner.say(PeerRefusal(reason=DamagedMessage.reason, message="damaged on the way; send it again"))
        assert (await talk.learner.expect(FinishedLease)).group.lease_id == 5
        assert talk.link.welcomed
        assert len(talk.outbox) == 1


def too_large(granted: Lease) -> FinishedLease:
    group = finished(granted).group
    long = group.trajectories[0].model_copy(update={"completion_text": "x" * (1 << 20)})
    return FinishedLease(group=group.model_copy(update={"trajectories": (long,) * 5}))


async def test_a_group_that_is_too_large_is_trained_without_its_texts() -> None:
    async with working() as talk:
        sent = too_large(lease(5)).group
        await talk.rollouts.finish(FinishedLease(group=sent))

        group = (await talk.learner.expect(FinishedLease)).group

        assert (group.lease_id, len(group.trajectories)) == (5, 5)
        assert {one.completion_text for one in group.trajectories} == {""}
        kept, held = group.trajectories[0], sent.trajectories[0]
        assert (kept.token_ids.tolist(), kept.reward.reward) == (held.token_ids.tolist(), held.reward.reward)


async def test_a_group_that_no_learner_reads_becomes_a_failed_lease() -> None:
    # Of an evaluation, which reads answers in the texts.
    async with working(purpose="evaluate") as talk:
        await talk.rollouts.finish(too_large(lease(5, purpose="evaluate")))

        failed = await talk.learner.expect(FailedLease)

        assert (failed.lease_id, failed.data_fault) == (5, True)
        assert "its group cannot be sent (too_large): a header of 52" in failed.reason
        await talk.learner.say(acknowledged(lease(5, purpose="evaluate")))
        await talk.link.wait_for(lambda: len(talk.outbox) == 0)


async def test_a_refused_hello_is_repeated_and_nothing_else_is_said() -> None:
    async with conversing(hello_every_s=0.1) as talk:
        for _ in range(3):
            await talk.learner.expect(Hello)
            await talk.learner.say(PeerRefusal(reason="hello", message="another tokenizer"))
        assert {type(message) for message in talk.learner.seen} == {Hello}
        assert not talk.link.welcomed


async def test_the_hello_to_a_restarted_learner_names_what_runs_and_what_has_finished() -> None:
    async with conversing(resend_s=60) as talk:
        assert (await talk.learner.welcome()).running == ()
        await talk.learner.grant(lease(5), lease(6))
        await talk.rollouts.next_started()
        await talk.rollouts.next_started()
        await talk.rollouts.finish(finished(lease(5)))
        await talk.learner.expect(FinishedLease)
        hello = await forgotten(talk)
        assert (hello.instance, hello.run) == ("i0", "r")
        assert hello.running == (
            RunningLease(
                incarnation=1, lease_id=5, attempt=0, purpose="train", oldest_version="1.3", waits_for="learner"
            ),
            RunningLease(incarnation=1, lease_id=6, attempt=0, purpose="train", waits_for="environment"),
        )


async def test_a_failure_that_is_not_acknowledged_is_named_at_a_hello_and_afterwards_no_more() -> None:
    """Else the learner takes the lease for one whose grant was lost, and the failure comes too late to be charged."""
    async with conversing(resend_s=60, hello_every_s=0.1) as talk:
        await talk.learner.welcome()
        await talk.learner.grant(lease(5))
        await talk.rollouts.next_started()
        failed = FailedLease(incarnation=1, lease_id=5, attempt=0, purpose="train", data_fault=True, reason="odd")
        await talk.rollouts.finish(failed)
        await talk.learner.expect(FailedLease)
        hello = await forgotten(talk)
        assert hello.running == (
            RunningLease(incarnation=1, lease_id=5, attempt=0, purpose="train", waits_for="learner"),
        )
        await talk.learner.welcome()
        assert await talk.learner.expect(FailedLease) == failed
        await talk.learner.say(acknowledged(lease(5)))
        await talk.link.wait_for(lambda: len(talk.outbox) == 0)
        await talk.learner.expect(Heartbeat)
        assert (await talk.learner.expect(Heartbeat)).running == ()


async def test_a_learner_that_refuses_whatever_a_stranger_says_hears_a_hello() -> None:
    """It is not silent, so that silence does not tell that it has been started anew."""
    async with conversing() as talk:
        await talk.learner.welcome()
        await talk.learner.expect(Heartbeat)
        said: list[Message] = []
        while len(said) < 20 and not any(isinstance(message, Hello) for message in said):
            await talk.learner.say(PeerRefusal(reason="unknown_peer", message="say hello first"))
            said.append(await talk.learner.expect(Message))
        assert isinstance(said[-1], Hello), "it went on as before"


async def test_nothing_but_hellos_is_said_to_a_learner_that_may_be_another() -> None:
    async with conversing(resend_s=0.05, hello_every_s=0.1) as talk:
        await talk.learner.welcome()
        await talk.learner.grant(lease(5))
        await talk.rollouts.next_started()
        await forgotten(talk)
        talk.learner.answer = None
        talk.learner.seen.clear()
        await talk.rollouts.finish(finished(lease(5)))
        for _ in range(3):
            await talk.learner.expect(Hello)
        assert {type(message) for message in talk.learner.seen} == {Hello}


async def test_the_leases_of_another_run_are_given_up_and_their_groups_forgotten() -> None:
    async with conversing(resend_s=60) as talk:
        await talk.learner.welcome()
        await talk.learner.grant(lease(5), lease(6))
        await talk.rollouts.next_started()
        await talk.rollouts.next_started()
        await talk.rollouts.finish(finished(lease(5)))
        await talk.learner.expect(FinishedLease)
        await talk.learner.say(PeerRefusal(reason="unknown_peer", message="say hello first"))
        await talk.learner.welcome(run="another")
        async with asyncio.timeout(60):
            assert await talk.rollouts.cancelled.get() == (1, "train", 6, 0)
        await talk.link.wait_for(lambda: len(talk.outbox) == 0)
        talk.learner.seen.clear()
        assert (await talk.learner.expect(Heartbeat)).running == ()
        await talk.learner.grant(lease(6))
        assert await talk.rollouts.next_started() == (1, "train", 6, 0)


async def test_attempts_of_two_lives_of_the_learner_are_told_apart() -> None:
    async with conversing(resend_s=60) as talk:
        await talk.learner.welcome()
        await talk.learner.grant(lease(5))
        await talk.rollouts.next_started()
        await talk.learner.grant(lease(5, incarnation=2))
        assert await talk.rollouts.next_started() == (2, "train", 5, 0)
        await talk.rollouts.finish(finished(lease(5)))
        await talk.learner.expect(FinishedLease)
        await talk.learner.say(acknowledged(lease(5, incarnation=2)))
        await talk.learner.expect(Heartbeat)
        assert len(talk.outbox) == 1
        await talk.learner.say(acknowledged(lease(5)))
        await talk.link.wait_for(lambda: len(talk.outbox) == 0)


async def test_what_has_finished_outlives_its_cancellation_until_it_is_acknowledged() -> None:
    async with working() as talk:
        await talk.rollouts.finish(finished(lease(5)))
        await talk.learner.expect(FinishedLease)
        named = RunningLease(incarnation=1, lease_id=5, attempt=0, purpose="train")
        await talk.learner.say(LeaseCancellation(leases=(named,)))
        await talk.learner.expect(FinishedLease)
        await talk.learner.say(acknowledged(lease(5)), acknowledged(lease(5)))
        await talk.link.wait_for(lambda: len(talk.outbox) == 0)


async def test_more_leases_than_one_message_may_name_are_reported_in_several() -> None:
    async with conversing(capacity=5000) as talk:
        await talk.learner.welcome()
        for first in range(0, 17_000, 1000):
            leases = tuple(lease(lease_id=first + number) for number in range(1000))
            await talk.learner.grant(*leases)
        named: set[int] = set()
        async with asyncio.timeout(60):
            while len(named) < 17_000:
                beat = await talk.learner.expect(Heartbeat)
                assert len(beat.running) <= 1 << 14
                named.update(running.lease_id for running in beat.running)
