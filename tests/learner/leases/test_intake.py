"""The intake against scripted env_services on real sockets."""

import asyncio
import json
import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from env_service.leases.outbox import Outbox
from learner.algorithms.presets.grpo import GrpoConfig
from learner.evaluation.config import EvaluationConfig
from learner.journal.checkpoints import VersionScore
from learner.journal.journal import LoggedBatch, LoggedFilter, LoggedGroup
from learner.leases.admission import GroupRules, admissible
from learner.leases.dead_letters import RunAborted
from learner.leases.filters import GroupFilter
from learner.leases.intake import EndedEarly
from learner.ledger import Books, Ledger
from learner.ledger.records import OnLag
from learner.online import _credit
from learner.training.batch import sequences_of
from protocol.messages import (
    EnvironmentInfo,
    FailedLease,
    FinishedLease,
    Fleet,
    Goodbye,
    Heartbeat,
    Lease,
    LeaseCancellation,
    LeaseGrant,
    Message,
    OutcomeReceipt,
    PeerRefusal,
    RunningLease,
    StatusNote,
    TaskPart,
    Welcome,
)
from protocol.model import PolicyVersion
from protocol.trajectories import GreedyBaseline, RewardRecord, TrajectoryGroup, VersionSpan
from services.zmq.sockets import ReceivedMessage
from tests.env_service.peers import eventually
from tests.learner.envs import ADDITION, EVERY_GROUP, RunningIntake, ScriptedEnv, learner
from tests.learner.generators import announcement
from tests.learner.samples import INCARNATION, INSTANCE, LEDGER, group, trajectory
from tests.services.diagnosis.statuses import status


def running(lease_id: int, attempt: int = 0) -> Heartbeat:
    return Heartbeat(
        running=(RunningLease(incarnation=INCARNATION, lease_id=lease_id, attempt=attempt, purpose="train"),)
    )


def failed(lease_id: int, attempt: int = 0, *, data_fault: bool = True, reason: str = "bad task") -> FailedLease:
    return FailedLease(
        incarnation=INCARNATION,
        lease_id=lease_id,
        attempt=attempt,
        purpose="train",
        data_fault=data_fault,
        reason=reason,
    )


def letters(ours: RunningIntake) -> list[dict[str, object]]:
    path = ours.folder / "dead_letters.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# Hello


async def test_an_env_service_is_welcomed_and_told_who_serves(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        welcome = await env.enter()
        assert (welcome.incarnation, welcome.heartbeat_every_s) == (3, 1.0)
        (serving,) = (await env.next(Fleet)).generators
        assert (serving.generator_id, serving.policy_version) == ("g", "1.0")


@pytest.mark.parametrize("asks", [True, False])
async def test_leases_ask_for_routed_experts_where_the_learner_replays_them(tmp_path: Path, asks: bool) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        if asks:
            ours.intake.ask_for_routed_experts()
        await env.enter()
        assert {each.routed_experts for each in (await env.next(LeaseGrant)).leases} == {asks}


async def test_where_greedy_answers_are_compared_with_leases_ask_for_them_and_groups_without_are_granted_again(
    tmp_path: Path,
) -> None:
    """The journal holds two groups of a life with another algorithm and one of this."""
    record = RewardRecord(verifier="test", reward=0.5)
    spans = (VersionSpan(version=f"{INCARNATION}.0", start=2, end=3, instance=INSTANCE),)
    baseline = GreedyBaseline(reward=record, version_spans=spans, sampled_tokens=1)
    compared = group(1).model_copy(update={"greedy_baseline": baseline})
    async with learner(tmp_path, greedy_baseline=True) as ours, ours.env("e") as env:
        ours.intake.readmit([group(0), compared, group(2)])
        await env.enter()
        leases = await env.leases(3)
        assert [(lease.lease_id, lease.greedy_baseline) for lease in leases] == [(0, True), (2, True), (3, True)]
        await env.finish(group(0, attempt=leases[0].attempt))
        assert ours.left_out == {"failed_infrastructure": 1}
        assert ours.intake.books().buffered == 1


async def test_where_no_greedy_answers_can_be_sampled_the_hello_is_refused_by_name(tmp_path: Path) -> None:
    """Before a lease is granted, not once for each. An evaluation by itself compares nothing."""
    game = ADDITION.model_copy(update={"no_greedy_answer": "environment addition is a game"})
    async with learner(tmp_path, greedy_baseline=True) as ours, ours.env("e") as env, ours.env("right") as right:
        await env.send(env.hello(environments=(game,)))
        refused = await env.next(PeerRefusal)
        assert refused.reason == "hello"
        assert "compares with the reward of a greedy answer, and environment addition is a game:" in refused.message
        await right.enter()
        await right.leases(4)
    for folder, compares, total in (("other", False, 4), ("evaluates", True, 0)):
        made = learner(tmp_path / folder, greedy_baseline=compares, total_groups=total)
        async with made as ours, ours.env("e") as env:
            await env.send(env.hello(environments=(game,)))
            await env.next(Welcome)


async def test_a_note_is_kept_also_before_a_hello_until_its_sender_leaves_or_falls_silent(
    tmp_path: Path,
) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env, ours.env("starts") as starts:
        await env.enter()
        for one in (env, starts):
            said = status("env-service", name=one.name)
            await one.dealer.send(StatusNote(url="http://127.0.0.1:7330", status=said), deadline_s=5.0)
        await eventually(lambda: {note.status.id for note in ours.intake.notes()} == {"e", "starts"})
        await env.dealer.send(Goodbye(reason="stop"), deadline_s=5.0)
        await eventually(lambda: [note.status.id for note in ours.intake.notes()] == ["starts"])
        ours.clock.now += 60.0
        assert ours.intake.notes() == []


async def test_one_to_whom_the_last_fleet_was_lost_is_told_again_who_serves(tmp_path: Path) -> None:
    """As what was sent over a link that broke is. Without it, an env_service would wait for a generator until the
    fleet changes, which it does not while there are no groups.
    """
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter()
        told = await env.next(Fleet)
        ours.clock.now += 3.0
        await env.send(Heartbeat(running=(), fleet=told.number))
        await env.send(Heartbeat(running=(), fleet=0))
        assert await env.next(Fleet) == told
        assert told.number > 0
        await env.send(Heartbeat(running=(), fleet=told.number))
        ours.fleet.announce(announcement("another", "http://127.0.0.1:1"), now=0.0)
        ours.fleet.committed("another", version=PolicyVersion(1, 0), fingerprint="f")
        await ours.intake.fleet_changed()
        assert (await env.next(Fleet)).number == told.number + 1, "it was told again once"


@pytest.mark.parametrize(("field", "named"), [("tokenizer", "tokenizer"), ("chat_template", "chat template")])
async def test_another_fingerprint_is_refused_and_both_are_named(tmp_path: Path, field: str, named: str) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.send(env.hello().model_copy(update={field: "theirs"}))
        refused = await env.next(PeerRefusal)
        assert refused.reason == "hello"
        assert f"its {named} has fingerprint theirs, the learner's {field[0]}" in refused.message


async def test_an_env_service_without_the_environment_is_told_what_is_wanted(tmp_path: Path) -> None:
    other = EnvironmentInfo(name="chess", train_tasks=1, evaluation_tasks=0)
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.send(env.hello(environments=(other,)))
        assert "the learner wants addition, env_service e offers chess" in (await env.next(PeerRefusal)).message


async def test_an_env_service_with_other_data_than_the_first_is_refused(tmp_path: Path) -> None:
    other = EnvironmentInfo(name="addition", train_tasks=99, evaluation_tasks=0)
    async with learner(tmp_path) as ours, ours.env("a") as first, ours.env("b") as second:
        await first.enter()
        await second.send(second.hello(environments=(other,)))
        assert (
            "has 99 training tasks, that of the first env_service of this run 100"
            in (await second.next(PeerRefusal)).message
        )


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"evaluation_tasks": 7}, "has 7 evaluation tasks, that of the first env_service of this run 5000"),
        ({"levels": 2}, "has 2 levels, that of the first env_service of this run 1"),
        ({"parts": (TaskPart(places=100, tasks=50),)}, "is mixed of other parts than that of the first env_service"),
    ],
)
async def test_an_env_service_whose_tasks_are_others_though_as_many_is_refused(
    tmp_path: Path, other: dict[str, object], said: str
) -> None:
    async with learner(tmp_path) as ours, ours.env("a") as first, ours.env("b") as second:
        await first.enter()
        await second.send(second.hello(environments=(ADDITION.model_copy(update=other),)))
        assert said in (await second.next(PeerRefusal)).message
        await second.enter()


async def test_an_env_service_that_tells_the_template_something_else_than_the_first_is_refused(tmp_path: Path) -> None:
    other = EnvironmentInfo(name="addition", train_tasks=100, evaluation_tasks=5000, chat_template="told")
    async with learner(tmp_path) as ours, ours.env("a") as first, ours.env("b") as second:
        await first.enter()
        await second.send(second.hello(environments=(other,)))
        assert "give all of them the same chat_template_kwargs" in (await second.next(PeerRefusal)).message


async def test_an_env_service_with_more_levels_than_tasks_is_refused_and_others_go_on(tmp_path: Path) -> None:
    steep = EnvironmentInfo(name="addition", train_tasks=2, evaluation_tasks=0, levels=3)
    async with learner(tmp_path) as ours, ours.env("a") as wrong, ours.env("b") as right:
        await wrong.send(wrong.hello(environments=(steep,)))
        refused = await wrong.next(PeerRefusal)
        assert refused.reason == "hello"
        assert "has 3 levels and 2 training tasks, expected at least one task for each level" in refused.message
        await right.enter()


async def test_the_level_of_new_leases_is_told_where_there_are_levels(tmp_path: Path) -> None:
    steep = EnvironmentInfo(name="addition", train_tasks=90, evaluation_tasks=0, levels=3)
    async with learner(tmp_path) as ours, ours.env("e") as env:
        assert ours.intake.level is None
        await env.send(env.hello(environments=(steep,)))
        await env.next(Welcome)
        await env.next(LeaseGrant)
        assert ours.intake.level == 0


async def test_who_speaks_before_saying_hello_is_asked_to(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.send(running(0))
        refused = await env.next(PeerRefusal)
        assert (refused.reason, refused.message) == ("unknown_peer", "a heartbeat before a hello: say hello first")


async def test_garbage_disturbs_nobody(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env, ours.env("noisy") as noisy:
        await env.enter(capacity=1)
        (lease,) = await env.leases(1)
        for _ in range(5):
            await noisy.dealer._socket.send_multipart([os.urandom(40)])
            assert (await noisy.next(PeerRefusal)).reason in ("malformed", "protocol_version")
        await noisy.send(Welcome(run="", incarnation=1, heartbeat_every_s=1.0))
        assert (await noisy.next(PeerRefusal)).reason == "unknown_peer"
        await env.finish(group(lease.lease_id))
        assert ours.intake.books().buffered == 1


async def test_a_second_env_service_under_a_name_is_refused_and_both_are_told_of_the_other(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as first, ours.env("e", instance="i1") as second:
        await first.send(first.hello(capacity=2, address="host-a:7330, process 12"))
        leases = await first.leases(2)
        for _ in range(2):
            await second.send(second.hello(address="host-b:7330, process 34"))
            refused = await second.next(PeerRefusal)
            assert refused.reason == "name_taken"
            assert "the name e is taken: an env_service at host-a:7330, process 12 uses it" in refused.message
            told = await first.next(PeerRefusal)
            assert told.reason == "namesake"
            assert told.message == "another env_service, at host-b:7330, process 34, uses this one's name e"
        await first.finish(*(group(lease.lease_id) for lease in leases))
        assert ours.intake.books().expired == 0


async def test_an_env_service_that_was_killed_and_started_anew_is_taken_in_at_once(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours:
        async with ours.env("e") as first:
            await first.enter(capacity=1)
            await first.leases(1)
        async with ours.env("e", instance="i1") as second:
            await second.enter(capacity=1)
            assert [(lease.lease_id, lease.attempt) for lease in await second.leases(1)] == [(0, 1)]


async def test_a_namesake_takes_over_from_one_that_is_connected_and_silent(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as first, ours.env("e", instance="i1") as second:
        await first.enter(capacity=1)
        await first.leases(1)
        ours.clock.now = 5.5
        await second.enter(capacity=1)
        assert [(lease.lease_id, lease.attempt) for lease in await second.leases(1)] == [(0, 1)]


# Grants


async def test_leases_are_granted_up_to_the_capacity(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter(capacity=3)
        leases = await env.leases(3)
        assert [(lease.lease_id, lease.attempt, lease.purpose) for lease in leases] == [
            (0, 0, "train"),
            (1, 0, "train"),
            (2, 0, "train"),
        ]
        assert {(lease.environment, lease.group_size, lease.sampling.max_tokens) for lease in leases} == {
            ("addition", 2, 8)
        }
        assert len({lease.task_index for lease in leases}) == len({lease.seed for lease in leases}) == 3
        await env.finish(group(1))
        assert [lease.lease_id for lease in await env.leases(1)] == [3]


async def test_leases_are_granted_up_to_the_pace_of_the_lag(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter(capacity=100)
        await env.leases((LEDGER.max_lag + 1) * LEDGER.groups_per_step)
        await env.finish(group(0), group(1))
        batch = await ours.intake.take()
        await ours.intake.trained(batch.version + 1)
        assert ours.intake.books().running == 2, "the generators still serve the old version"
        await ours.serve(1)
        assert [lease.lease_id for lease in await env.leases(2)] == [4, 5]


async def test_nothing_is_granted_until_a_generator_serves(tmp_path: Path) -> None:
    async with learner(tmp_path, serves=False) as ours, ours.env("e") as env:
        await env.enter()
        assert (await env.next(Fleet)).generators == ()
        assert ours.intake.books().leases == 0
        await ours.serve(0)
        await env.leases(4)


async def test_no_more_is_granted_than_the_run_still_needs(tmp_path: Path) -> None:
    async with learner(tmp_path, total_groups=3) as ours, ours.env("e") as env:
        await env.enter()
        await env.leases(3)
        await env.send(failed(0))
        await env.next(OutcomeReceipt)
        assert [lease.lease_id for lease in await env.leases(1)] == [3], "a lease that was given up is replaced"
        assert ours.intake.books().running == 3


@pytest.mark.parametrize(("before", "now"), [(4, 2), (2, 4)])
async def test_a_run_that_is_resumed_with_another_number_of_groups_a_step_is_granted_its_steps(
    tmp_path: Path, before: int, now: int
) -> None:
    former = Ledger(replace(LEDGER, groups_per_step=before))
    for version in range(3):
        former.replay(tuple(range(version * before, (version + 1) * before)))
        former.trained(version + 1)
    config, steps = replace(LEDGER, groups_per_step=now), 4
    async with (
        learner(
            tmp_path, ledger_config=config, former=former.snapshot(), total_groups=steps * now, serves=False
        ) as ours,
        ours.env("e") as env,
    ):
        await env.enter()
        await ours.serve(3)
        first = 3 * before
        assert [lease.lease_id for lease in await env.leases(now)] == list(range(first, first + now))
        assert ours.intake.books().running == now, "the fourth step is the last"


async def test_two_env_services_share_the_work(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("a") as first, ours.env("b") as second:
        await first.enter(capacity=1)
        await second.enter(capacity=100)
        assert [lease.lease_id for lease in await first.leases(1)] == [0]
        assert [lease.lease_id for lease in await second.leases(3)] == [1, 2, 3]


async def test_who_leaves_gives_its_leases_to_others(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("a") as first, ours.env("b") as second:
        await first.enter(capacity=2)
        await first.leases(2)
        await second.enter(capacity=4)
        await second.leases(2)
        await first.send(Goodbye(reason="done"))
        assert [(lease.lease_id, lease.attempt) for lease in await second.leases(2)] == [(0, 1), (1, 1)]
        assert ours.left_out["holder_gone"] == 2


async def test_a_silent_env_service_loses_its_leases_and_has_to_say_hello_again(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("a") as first, ours.env("b") as second:
        await first.enter(capacity=4)
        await first.leases(4)
        await second.enter()
        ours.clock.now = LEDGER.lease_timeout_s + 1
        await second.send(Heartbeat(running=()))
        assert [lease.attempt for lease in await second.leases(4)] == [1, 1, 1, 1]
        await first.send(running(0))
        assert (await first.next(PeerRefusal)).reason == "unknown_peer"


async def test_leases_whose_grant_a_cut_has_lost_are_granted_again_at_the_next_hello(tmp_path: Path) -> None:
    """Not after `leases.timeout_s`, within which no heartbeat names them either."""
    async with learner(tmp_path) as ours, ours.env("a") as env:
        await env.enter(capacity=3)
        await env.leases(3)
        ours.clock.now = 3.0
        assert LEDGER.lease_timeout_s > 10
        await env.enter(capacity=3, running=running(1).running)
        assert {(lease.lease_id, lease.attempt) for lease in await env.leases(2)} == {(0, 1), (2, 1)}
        assert ours.left_out["expired"] == 2
        await env.finish(group(1))


async def test_leases_that_were_granted_just_now_may_be_on_their_way_when_a_hello_arrives(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("a") as env:
        await env.enter(capacity=2)
        await env.leases(2)
        ours.clock.now = 1.0
        await env.enter(capacity=2)
        await env.finish(group(0), group(1))
        assert ours.left_out["expired"] == 0


async def test_a_failure_that_waits_to_be_sent_at_a_hello_is_charged_as_what_it_is(tmp_path: Path) -> None:
    """Of two leases that an env_service does not run any more, one has failed, and the grant of the other was lost."""
    async with learner(tmp_path) as ours, ours.env("a") as env:
        await env.enter(capacity=2)
        await env.leases(2)
        outbox = Outbox(resend_s=1.0)
        outbox.add(failed(0, reason="bad task"))
        ours.clock.now = 3.0
        await env.enter(capacity=2, running=outbox.held())
        assert [(lease.lease_id, lease.attempt) for lease in await env.leases(1)] == [(1, 1)]
        assert LEDGER.data_retries == 0
        await env.send(failed(0, reason="bad task"))
        await env.next(OutcomeReceipt)
        assert [(letter["lease_id"], letter["data_fault"]) for letter in letters(ours)] == [(0, True)]
        assert ours.left_out["expired"] == 1
        assert [lease.lease_id for lease in await env.leases(1)] == [2], "its place is free"


async def greet(env: ScriptedEnv, *, capacity: int = 2) -> None:
    """Says hello as one that no learner has welcomed yet, and waits for the whole welcome."""
    await env.send(env.hello(capacity=capacity, run=""))
    await env.next(Welcome)
    await env.next(Fleet)


async def test_a_grant_that_was_lost_together_with_the_first_welcome_is_granted_again(tmp_path: Path) -> None:
    """The env_service says hello again within the time in which a grant may be on its way, and knows no run yet."""
    async with learner(tmp_path) as ours, ours.env("a") as env:
        await greet(env)
        await env.leases(2)
        ours.clock.now = 1.0
        await greet(env)
        ours.clock.now = 3.5
        await env.send(Heartbeat(running=()))
        assert {(lease.lease_id, lease.attempt) for lease in await env.leases(2)} == {(0, 1), (1, 1)}
        assert ours.left_out["expired"] == 2
        ours.clock.now = 7.0
        await env.send(Heartbeat(running=(), fleet=0))
        await env.next(Fleet)
        assert ours.left_out["expired"] == 2, "it has been compared: what is not listed now has its time-out"


async def test_hellos_that_queued_up_before_the_first_welcome_take_no_leases_away(tmp_path: Path) -> None:
    """The learner comes to the second one late; the first heartbeat was sent before the grant arrived."""
    async with learner(tmp_path) as ours, ours.env("a") as env:
        await greet(env)
        await env.leases(2)
        ours.clock.now = 10.0
        await greet(env)
        await env.send(Heartbeat(running=(), fleet=0))
        await env.next(Fleet)
        ours.clock.now = 13.0
        await env.send(Heartbeat(running=(*running(0).running, *running(1).running), fleet=0))
        await env.next(Fleet)
        await env.finish(group(0), group(1))
        assert ours.left_out["expired"] == 0


async def test_a_list_that_may_be_a_part_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.leases.conversation.MAX_LEASES", 2)
    async with learner(tmp_path) as ours, ours.env("a") as env:
        await greet(env, capacity=3)
        await env.leases(3)
        ours.clock.now = 1.0
        await greet(env, capacity=3)
        ours.clock.now = 4.0
        await env.send(Heartbeat(running=running(2).running, fleet=0))
        await env.next(Fleet)
        await env.finish(group(0), group(1))
        assert ours.left_out["expired"] == 0


async def test_an_expired_lease_is_cancelled_and_granted_again(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("a") as env:
        await env.enter(capacity=2)
        await env.leases(2)
        for now in (40.0, 80.0):
            ours.clock.now = now
            await env.send(running(1))
            await env.send(failed(99))
            await env.next(OutcomeReceipt)
        (cancelled,) = (await env.next(LeaseCancellation)).leases
        assert (cancelled.lease_id, cancelled.attempt) == (0, 0)
        (again,) = await env.leases(1)
        assert (again.lease_id, again.attempt) == (0, 1)


# Groups


async def test_groups_are_acknowledged_and_become_a_batch_that_is_journaled_before_it_is_returned(
    tmp_path: Path,
) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter()
        await env.leases(4)
        taking = asyncio.create_task(ours.intake.take())
        await env.finish(group(2))
        assert [type(record) for record in ours.journal()] == [LoggedGroup], "journaled before it was acknowledged"
        await env.finish(group(0))
        async with asyncio.timeout(60):
            batch = await taking
        assert ours.journal()[-1] == LoggedBatch(version=0, lease_ids=(0, 2))
        assert (batch.version, [one.lease_id for one in batch.groups], batch.lags) == (0, [0, 2], (0, 0))
        assert np.array_equal(batch.groups[0].trajectories[0].token_ids, trajectory(0).token_ids)


async def test_an_end_cuts_off_the_wait_for_groups_and_decides_no_batch_more(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter()
        await env.leases(4)
        taking = asyncio.create_task(ours.intake.take())
        await asyncio.sleep(0)
        ours.intake.end()
        with pytest.raises(EndedEarly):
            async with asyncio.timeout(60):
                await taking
        await env.finish(group(0), group(1))
        with pytest.raises(EndedEarly):
            await ours.intake.take()
        assert not any(isinstance(record, LoggedBatch) for record in ours.journal())


async def together(ours: RunningIntake, env: ScriptedEnv, monkeypatch: pytest.MonkeyPatch, *messages: Message) -> None:
    """Sends messages that the learner finds beside each other at its socket, however long they take to get there."""
    missing = len(messages) - 1

    async def the_next_one() -> ReceivedMessage | None:
        nonlocal missing
        missing -= 1
        return await ours.router.receive_whole() if missing >= 0 else None

    monkeypatch.setattr(ours.router, "receive_now", the_next_one)
    for message in messages:
        await env.send(message)


async def test_groups_that_arrive_together_are_each_acknowledged_and_one_grant_takes_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter(capacity=2)
        await env.leases(2)
        await together(ours, env, monkeypatch, FinishedLease(group=group(1)), FinishedLease(group=group(0)))
        assert [(await env.next(OutcomeReceipt)).lease_id for _ in range(2)] == [1, 0]
        assert [lease.lease_id for lease in (await env.next(LeaseGrant)).leases] == [2, 3]
        assert not [message for message in env.seen if isinstance(message, LeaseGrant)], "one grant for both places"
        assert [record.group.lease_id for record in ours.journal() if isinstance(record, LoggedGroup)] == [1, 0]


async def test_who_says_something_else_after_a_group_hears_first_that_the_group_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter(capacity=2)
        await env.leases(2)
        env.seen.clear()
        await together(ours, env, monkeypatch, FinishedLease(group=group(0)), running(7))
        assert [lease.lease_id for lease in (await env.next(LeaseCancellation)).leases] == [7]
        assert isinstance(env.seen[0], OutcomeReceipt)


async def test_a_duplicate_is_acknowledged_and_ignored(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter()
        await env.leases(4)
        await env.finish(group(0), group(0), group(1))
        await ours.train()
        await env.finish(group(0))
        assert ours.left_out == {"duplicate": 2}
        assert [record.group.lease_id for record in ours.journal() if isinstance(record, LoggedGroup)] == [0, 1]


async def test_a_group_that_was_never_granted_is_acknowledged_and_ignored(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter()
        await env.leases(4)
        await env.finish(group(50), group(0, attempt=7))
        assert ours.left_out == {"unknown": 2}
        assert ours.intake.books().buffered == 0


async def test_a_trajectory_without_a_reward_leaves_its_group_and_is_never_a_zero(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter()
        await env.leases(4)
        mixed = group(0, trajectory(0, reward=1.0), trajectory(0, reward=None), trajectory(0, reward=0.5))
        await env.finish(mixed, group(1))
        batch = await ours.intake.take()
        assert [one.reward.reward for one in batch.groups[0].trajectories] == [1.0, 0.5]


async def test_a_group_with_too_few_rewards_is_a_failure_and_in_the_end_a_dead_letter(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter()
        leases = await env.leases(4)
        await env.finish(group(0, trajectory(0, reward=None), trajectory(0, reward=1.0)))
        (letter,) = letters(ours)
        assert (letter["lease_id"], letter["task_index"]) == (0, leases[0].task_index)
        assert letter["reason"] == "1 of 2 rewards failed: test: the judge is ill"
        assert ours.intake.books().dead_lettered == 1
        assert [lease.lease_id for lease in await env.leases(1)] == [4]


def test_a_reward_beyond_the_bound_is_none_and_names_its_verifier() -> None:
    rules = GroupRules(vocabulary_size=10, min_group_size=2, filters=EVERY_GROUP, max_reward=10.0)
    given = group(0, trajectory(0, reward=10.0), trajectory(0, reward=-10.5), trajectory(0, reward=-10.0))
    kept = admissible(given, rules=rules, belongs=lambda _: True)
    assert isinstance(kept, TrajectoryGroup)
    assert [one.reward.reward for one in kept.trajectories] == [10.0, -10.0]
    refused = admissible(
        group(1, trajectory(0, reward=1e5), trajectory(0, reward=1.0)), rules=rules, belongs=lambda _: True
    )
    assert isinstance(refused, FailedLease)
    assert refused.data_fault
    bound = "test: a reward of 100000 is beyond rollouts.max_reward, which is 10"
    assert refused.reason == f"1 of 2 rewards failed: {bound}"


async def test_a_reward_that_may_work_at_another_time_is_retried(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter()
        await env.leases(4)
        ill = trajectory(0, reward=None, error_kind="infrastructure")
        await env.finish(group(0, trajectory(0, reward=None), ill))
        assert letters(ours) == []
        assert [lease.lease_id for lease in await env.leases(1)] == [4], "the failed lease waits for its backoff"
        ours.clock.now = 2.0
        await env.finish(group(1))
        await env.finish(group(2))
        await ours.train()
        assert (0, 1) in [(lease.lease_id, lease.attempt) for lease in await env.leases(2)]


@pytest.mark.parametrize(
    ("spoiled", "reason"),
    [
        (group(0, trajectory(0, token_id=10), trajectory(0)), "token id 10 is outside the model's vocabulary of 10"),
        (group(0, trajectory(0), trajectory()), "a trajectory holds no sampled token"),
    ],
)
async def test_a_spoiled_group_is_a_failure_of_its_data(tmp_path: Path, spoiled: TrajectoryGroup, reason: str) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter()
        await env.leases(4)
        await env.finish(spoiled)
        assert [letter["reason"] for letter in letters(ours)] == [reason]
        assert ours.journal() == []


async def test_a_group_of_too_few_trajectories_is_not_trained(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter()
        await env.leases(4)
        await env.finish(group(0, trajectory(0)))
        assert ours.left_out == {"failed_infrastructure": 1}
        assert ours.intake.books().buffered == 0


async def test_uniform_groups_are_filtered_when_asked_for_and_the_decision_is_journaled(tmp_path: Path) -> None:
    async with learner(tmp_path, filters=GroupFilter(drop_uniform=True)) as ours, ours.env("e") as env:
        await env.enter()
        await env.leases(4)
        await env.finish(group(0, trajectory(0, reward=1.0), trajectory(0, reward=1.0)))
        assert ours.journal()[-1] == LoggedFilter(lease_id=0)
        assert ours.intake.books().filtered == 1
        assert [lease.lease_id for lease in await env.leases(1)] == [4], "its place is given back"


async def test_a_group_that_came_too_late_is_dropped_and_its_lease_granted_again(tmp_path: Path) -> None:
    config = replace(LEDGER, max_lag=0, on_lag="drop")
    async with learner(tmp_path, ledger_config=config) as ours, ours.env("e") as env:
        await env.enter(capacity=3)
        await env.leases(2)
        await env.send(failed(1, data_fault=False))
        await env.next(OutcomeReceipt)
        assert [lease.lease_id for lease in await env.leases(1)] == [2]
        await env.finish(group(0), group(2))
        ours.clock.now = 5.0
        await ours.train()
        assert (1, 1) in [(lease.lease_id, lease.attempt) for lease in await env.leases(2)]
        await env.finish(group(1, attempt=1, version=0))
        assert ours.left_out["stale"] == 1


async def test_a_bound_that_falls_after_a_step_cancels_what_it_makes_too_old_and_grants_anew(tmp_path: Path) -> None:
    """Batches of 1 group, lag at most 2. At version 1, groups 1 and 2 of version 0 lag by 1."""
    config = replace(LEDGER, groups_per_step=1, max_lag=2)
    async with learner(tmp_path, ledger_config=config) as ours, ours.env("e") as env:
        await env.enter()
        await env.leases(2)
        await env.finish(group(0))
        await ours.intake.take()
        (running_on,) = await env.leases(1)
        await env.finish(group(1))
        await ours.intake.trained(1, max_lag=0)
        (cancelled,) = (await env.next(LeaseCancellation)).leases
        assert cancelled.lease_id == running_on.lease_id == 2
        assert ours.left_out == {"too_old": 2}
        assert ours.forgotten == [(1, "too_old")], "the other one was running"
        await ours.serve(1)
        (again,) = await env.leases(1)
        assert (again.lease_id, again.attempt) == (1, 1)
        await env.finish(group(1, version=1, attempt=1))
        async with asyncio.timeout(60):
            taken = await ours.intake.take()
        assert ([one.lease_id for one in taken.groups], taken.lags) == ([1], (0,))


async def test_a_straggler_that_is_dropped_is_cancelled(tmp_path: Path) -> None:
    config = replace(LEDGER, on_lag="drop", groups_per_step=1)
    async with learner(tmp_path, ledger_config=config) as ours, ours.env("e") as env:
        await env.enter()
        await env.leases(2)
        await env.finish(group(1))
        await ours.train()
        (lease,) = await env.leases(1)
        await env.finish(group(lease.lease_id, version=1))
        await ours.train()
        (cancelled,) = (await env.next(LeaseCancellation)).leases
        assert (cancelled.lease_id, cancelled.attempt) == (0, 0)
        assert ours.left_out["too_old"] == 1


async def test_an_attempt_that_nobody_waits_for_is_cancelled_at_its_heartbeat(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter()
        await env.leases(4)
        stale = RunningLease(incarnation=INCARNATION, lease_id=77, attempt=2, purpose="train")
        ours_too = RunningLease(incarnation=INCARNATION, lease_id=5, attempt=0, purpose="evaluate")
        mine = RunningLease(incarnation=INCARNATION, lease_id=1, attempt=0, purpose="train")
        await env.send(Heartbeat(running=(stale, mine, ours_too)))
        assert [(lease.lease_id, lease.purpose) for lease in (await env.next(LeaseCancellation)).leases] == [
            (77, "train"),
            (5, "evaluate"),
        ]


async def test_a_run_in_which_too_many_leases_fail_stops_and_names_the_commonest_reason(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter(capacity=1)
        taking = asyncio.create_task(ours.intake.take())
        for lease_id in range(20):
            await env.leases(1)
            await env.send(failed(lease_id, reason="no such book" if lease_id % 4 else "no pencil"))
            await env.next(OutcomeReceipt)
        with pytest.raises(
            RunAborted, match=r"20 of 20 leases were given up.*\(15 times\) is: data: no such book.*See "
        ):
            async with asyncio.timeout(60):
                await taking
        assert len(letters(ours)) == 20


# Evaluation


def graded(lease_id: int, reward: float | None, *, version: int = 0, finish: str = "stop") -> TrajectoryGroup:
    one = trajectory(version, reward=reward, finish="length" if finish == "length" else "stop")
    return group(lease_id, one, purpose="evaluate")


async def test_evaluation_goes_first_and_counts_what_is_solved(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter(capacity=3)
        (first, *_) = await env.leases(3)
        future = await ours.intake.evaluate(tasks=3, version=0)
        assert future is not None
        assert ours.intake.books().running == 3
        await env.finish(group(first.lease_id))
        (lease,) = await env.leases(1)
        assert (lease.purpose, lease.task_index, lease.group_size) == ("evaluate", 0, 1)
        await env.finish(graded(lease.lease_id, 1.0))
        (lease,) = await env.leases(1)
        await env.finish(graded(lease.lease_id, 0.5, version=1, finish="length"))
        (lease,) = await env.leases(1)
        await env.finish(graded(lease.lease_id, 1.0), graded(lease.lease_id, 1.0))
        async with asyncio.timeout(60):
            result = (await future).result
        assert (result.tasks, result.failed, result.version) == (3, 0, 0)
        assert result.accuracy == pytest.approx(2 / 3)
        assert result.reward == pytest.approx(2.5 / 3)
        assert (result.oldest_version, result.newest_version) == (0, 1)
        assert result.truncated_share == pytest.approx(1 / 3)
        await env.finish(group(1), group(2))
        assert ours.intake.books().running == 1, "the room is for training again, up to the pace"


@pytest.mark.parametrize(("own", "credited"), [(0, None), (1, None), (2, 0.5), (4, 0.75)])
async def test_a_version_is_credited_with_its_own_samples_if_they_answer_half_of_the_tasks(
    tmp_path: Path, own: int, credited: float | None
) -> None:
    rewards = (1.0, 0.0, 1.0, 1.0)
    async with learner(tmp_path, serves=False) as ours, ours.env("e") as env:
        await env.enter(capacity=1)
        future = await ours.intake.evaluate(tasks=4, version=3)
        assert future is not None
        await ours.serve(0)
        for number in range(4):
            lease = await next_evaluation(env)
            versions = (3, 3) if number < own else (3, 4)
            one = trajectory(*versions, reward=rewards[number])
            done = group(lease.lease_id, one, purpose="evaluate").model_copy(update={"task_index": lease.task_index})
            await env.finish(done)
        async with asyncio.timeout(60):
            evaluation = await future
    assert (evaluation.result.tasks, evaluation.result.accuracy) == (4, 0.75)
    credit = _credit(evaluation)
    assert credit == (None if credited is None else VersionScore(version=3, accuracy=credited, reward=credited))


async def test_a_task_that_keeps_failing_is_left_out_of_the_accuracy(tmp_path: Path) -> None:
    async with learner(tmp_path, serves=False) as ours, ours.env("e") as env:
        await env.enter(capacity=2)
        future = await ours.intake.evaluate(tasks=2, version=0)
        assert future is not None
        await ours.serve(0)
        good, bad = await env.leases(2)
        await env.finish(graded(good.lease_id, 0.0))
        for attempt in range(3):
            if attempt == 1:
                await env.finish(graded(bad.lease_id, None))
            else:
                await env.send(failed(bad.lease_id).model_copy(update={"purpose": "evaluate"}))
                await env.next(OutcomeReceipt)
            if attempt < 2:
                bad = await next_evaluation(env)
        async with asyncio.timeout(60):
            result = (await future).result
        assert (result.tasks, result.failed, result.accuracy) == (1, 1, 0.0)


async def test_evaluations_are_sampled_as_their_settings_say_and_training_is_not(tmp_path: Path) -> None:
    settings = EvaluationConfig(top_p=0.9, top_k=20, min_p=0.05, temperature=0.7)
    async with learner(tmp_path, serves=False, evaluation=settings) as ours, ours.env("e") as env:
        await env.enter(capacity=2)
        await ours.intake.evaluate(tasks=1, version=0)
        await ours.serve(0)
        sampled = {lease.purpose: lease.sampling for lease in await env.leases(2)}
    found, usual = sampled["evaluate"], sampled["train"]
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.7, 0.9, 20, 0.05)
    assert (usual.temperature, usual.top_p, usual.min_p) == (1.0, 1.0, 0.0)


async def test_the_samples_of_a_task_come_in_one_lease_and_have_seeds_of_their_own(tmp_path: Path) -> None:
    settings = EvaluationConfig(samples=4)
    async with learner(tmp_path, serves=False, evaluation=settings) as ours, ours.env("e") as env:
        await env.enter(capacity=2)
        future = await ours.intake.evaluate(tasks=2, version=0)
        assert future is not None
        await ours.serve(0)
        first, second = await env.leases(2)
        assert [lease.group_size for lease in (first, second)] == [4, 4]
        drawn = [lease.seed + sample for lease in (first, second) for sample in range(4)]
        assert len(set(drawn)) == 8
        right, wrong = trajectory(0, 0, reward=1.0, text="5"), trajectory(0, 0, reward=0.0, text="6")
        await env.finish(
            group(second.lease_id, right, right, right, wrong, purpose="evaluate"),
            group(first.lease_id, wrong, wrong, right, wrong, purpose="evaluate").model_copy(update={"task_index": 0}),
        )
        async with asyncio.timeout(60):
            evaluation = await future
    assert [task.task_index for task in evaluation.tasks] == [0, second.lease_id]
    assert [one.completion for one in evaluation.tasks[1].samples] == ["5", "5", "5", "6"]
    assert evaluation.tasks[1].prompt == "2 + 2"
    result = evaluation.result
    assert (result.tasks, result.samples, result.length_mean) == (2, 8, 2.0)
    assert result.accuracy == pytest.approx(0.5)
    # Pairs without a right sample: C(3, 2) of the first's 6, none of the second's.
    assert result.pass_at_k == pytest.approx({1: 0.5, 2: 0.75, 4: 1.0})
    # The second's four vote for 5, which is right; the first's for 6, which is wrong.
    assert result.cons_at_k[4] == 0.5


async def test_a_task_with_an_unscored_sample_is_tried_again_and_at_last_the_others_count(tmp_path: Path) -> None:
    settings = EvaluationConfig(samples=2)
    async with learner(tmp_path, serves=False, evaluation=settings) as ours, ours.env("e") as env:
        await env.enter(capacity=1)
        future = await ours.intake.evaluate(tasks=1, version=0)
        assert future is not None
        await ours.serve(0)
        for _ in range(3):
            lease = await next_evaluation(env)
            both = (trajectory(0, reward=1.0), trajectory(0, reward=None))
            await env.finish(group(lease.lease_id, *both, purpose="evaluate"))
        async with asyncio.timeout(60):
            result = (await future).result
    assert (result.tasks, result.failed, result.samples, result.accuracy) == (1, 0, 1, 1.0)
    assert result.pass_at_k == {1: 1.0}


@pytest.mark.parametrize("capacity", [1, 3, 100])
async def test_the_books_and_the_journal_are_the_same_with_evaluations_as_without(
    tmp_path: Path, capacity: int
) -> None:
    plain = await three_steps(tmp_path / "plain", capacity=capacity, evaluated=False)
    evaluated = await three_steps(tmp_path / "evaluated", capacity=capacity, evaluated=True)
    assert evaluated == plain
    assert (plain[0].leases, plain[0].trained, plain[0].attempts, plain[0].accepted) == (6, 6, 6, 6)


async def three_steps(folder: Path, *, capacity: int, evaluated: bool) -> tuple[Books, list[int], list[LoggedBatch]]:
    """Three whole steps, beside an evaluation each if `evaluated`; the books, and the groups and batches logged."""
    async with learner(folder, total_groups=6) as ours, ours.env("e") as env:
        await env.enter(capacity=capacity)
        futures = []
        answering = asyncio.create_task(answer_all(env, ours))
        for version in range(3):
            if evaluated:
                future = await ours.intake.evaluate(tasks=5, version=version)
                assert future is not None
                futures.append(future)
            await ours.train()
        async with asyncio.timeout(60):
            ended = [(await future).result for future in futures]
        answering.cancel()
        await asyncio.wait([answering])
        assert all((result.tasks, result.failed, result.accuracy) == (4, 1, 1.0) for result in ended)
        records = ours.journal()
        groups = [record.group.lease_id for record in records if isinstance(record, LoggedGroup)]
        return ours.intake.books(), groups, [record for record in records if isinstance(record, LoggedBatch)]


async def answer_all(env: ScriptedEnv, ours: RunningIntake) -> None:
    """Finishes every lease in its order, by the newest version; the evaluations' task 3 fails."""
    while True:
        message = await env.dealer.receive()
        for lease in message.leases if isinstance(message, LeaseGrant) else ():
            if lease.purpose == "train":
                await env.send(FinishedLease(group=group(lease.lease_id, version=ours.ledger.version)))
            elif lease.task_index == 3:
                await env.send(failed(lease.lease_id).model_copy(update={"purpose": "evaluate"}))
            else:
                await env.send(FinishedLease(group=graded(lease.lease_id, 1.0)))


async def test_a_learner_that_leaves_says_goodbye_to_all(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("a") as first, ours.env("b") as second:
        for env in (first, second):
            await env.enter()
        await ours.intake.leave("it has ended")
        for env in (first, second):
            assert (await env.next(Goodbye)).reason == "it has ended"


async def next_evaluation(env: ScriptedEnv) -> Lease:
    """The next evaluation lease; training leases on the way are passed over."""
    while True:
        for lease in (await env.next(LeaseGrant)).leases:
            if lease.purpose == "evaluate":
                return lease


async def test_an_evaluation_lease_that_got_lost_is_granted_again_and_one_that_is_reported_is_not(
    tmp_path: Path,
) -> None:
    async with learner(tmp_path, serves=False) as ours, ours.env("e") as env:
        await env.enter(capacity=2)
        future = await ours.intake.evaluate(tasks=2, version=0)
        assert future is not None
        await ours.serve(0)
        lost, kept = await env.leases(2)
        alive = Heartbeat(
            running=(RunningLease(incarnation=INCARNATION, lease_id=kept.lease_id, attempt=0, purpose="evaluate"),)
        )
        for now in (40.0, 80.0):
            ours.clock.now = now
            await env.send(alive)
        again = await next_evaluation(env)
        assert again.lease_id not in (lost.lease_id, kept.lease_id)
        await env.finish(graded(again.lease_id, 1.0), graded(kept.lease_id, 1.0), graded(lost.lease_id, 0.0))
        async with asyncio.timeout(60):
            assert (await future).result.accuracy == 1.0


async def test_evaluation_leases_of_who_leaves_go_to_others(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("a") as first, ours.env("b") as second:
        await first.enter(capacity=4)
        await first.leases(4)
        await second.enter(capacity=1)
        future = await ours.intake.evaluate(tasks=1, version=0)
        assert future is not None
        await next_evaluation(second)
        await second.send(Goodbye(reason="done"))
        await first.finish(group(0))
        lease = await next_evaluation(first)
        await first.finish(graded(lease.lease_id, 1.0))
        async with asyncio.timeout(60):
            assert (await future).result.tasks == 1


async def test_a_large_env_service_gets_its_leases_in_several_grants(tmp_path: Path) -> None:
    async with learner(tmp_path, serves=False) as ours, ours.env("e") as env:
        await env.enter(capacity=5000)
        await ours.intake.evaluate(tasks=5000, version=0)
        await ours.serve(0)
        for _ in range(4):
            await ours.serve(0)
        leases = await env.leases(5000)
        assert {lease.purpose for lease in leases} == {"evaluate"}


async def test_an_evaluation_waits_for_an_env_service_and_needs_held_out_tasks(tmp_path: Path) -> None:
    none_held_out = ADDITION.model_copy(update={"evaluation_tasks": 0})
    async with learner(tmp_path) as ours, ours.env("e") as env:
        asking = asyncio.create_task(ours.intake.evaluate(tasks=5, version=0))
        await env.send(env.hello(environments=(none_held_out,)))
        async with asyncio.timeout(60):
            assert await asking is None


async def test_a_rollout_that_never_ends_is_dead_lettered_however_alive_its_env_service_is(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter(capacity=1)
        (lease,) = await env.leases(1)
        ours.clock.now = LEDGER.longest_attempt_s - 1.0
        await env.send(running(lease.lease_id))
        ours.ledger.heartbeat(now=ours.clock.now, holder="e", running={(lease.lease_id, 0): None})
        ours.clock.now = LEDGER.longest_attempt_s
        cancelled = await env.next(LeaseCancellation)
        assert [each.lease_id for each in cancelled.leases] == [lease.lease_id]
        (letter,) = letters(ours)
        assert letter["data_fault"] is True
        assert "not finished within 1500 s, though env_service e says" in str(letter["reason"])
        assert [again.lease_id for again in await env.leases(1)] == [1]


async def test_a_group_that_can_never_be_delivered_is_given_up(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter(capacity=1)
        (lease,) = await env.leases(1)
        for ours.clock.now in (LEDGER.longest_attempt_s - 1.0, LEDGER.longest_attempt_s):
            finished = RunningLease(
                incarnation=INCARNATION, lease_id=lease.lease_id, attempt=0, purpose="train", waits_for="learner"
            )
            ours.ledger.heartbeat(now=ours.clock.now, holder="e", running={(lease.lease_id, 0): None})
            await env.send(Heartbeat(running=(finished,)))
        await env.next(LeaseCancellation)
        assert len(letters(ours)) == 1


async def test_an_evaluation_ends_though_one_of_its_rollouts_never_does(tmp_path: Path) -> None:
    async with learner(tmp_path, serves=False) as ours, ours.env("e") as env:
        await env.enter(capacity=2)
        future = await ours.intake.evaluate(tasks=2, version=0)
        assert future is not None
        await ours.serve(0)
        leases = await env.leases(2)
        await env.finish(graded(leases[0].lease_id, 1.0))
        hanging = leases[1].lease_id
        for attempt in range(1, 4):
            ours.clock.now = 1500.0 * attempt
            alive = RunningLease(incarnation=INCARNATION, lease_id=hanging, attempt=0, purpose="evaluate")
            await env.send(Heartbeat(running=(alive,)))
            if attempt < 3:
                hanging = (await next_evaluation(env)).lease_id
        async with asyncio.timeout(60):
            assert (await future).result.failed == 1


async def test_a_held_out_task_that_takes_its_env_service_down_each_time_is_given_up(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter(capacity=1)
        (first,) = await env.leases(1)
        future = await ours.intake.evaluate(tasks=1, version=0)
        assert future is not None
        await env.finish(group(first.lease_id))
        for _ in range(9):
            await next_evaluation(env)
            await env.send(Goodbye(reason="it dies"))
            await env.enter(capacity=1)
        async with asyncio.timeout(60):
            assert (await future).result.failed == 1


async def test_an_evaluation_beside_training_takes_its_share_of_the_places_and_no_more(tmp_path: Path) -> None:
    async with learner(tmp_path, serves=False) as ours, ours.env("e") as env:
        await env.enter(capacity=4)
        await ours.intake.evaluate(tasks=50, version=0, beside=True)
        await ours.serve(0)
        leases = await env.leases(4)
        assert [lease.purpose for lease in leases] == ["evaluate", "evaluate", "train", "train"]
        await env.finish(graded(leases[0].lease_id, 1.0))
        assert [lease.purpose for lease in await env.leases(1)] == ["evaluate"]


async def test_its_share_is_of_the_places_that_the_environment_may_have(tmp_path: Path) -> None:
    limited = ADDITION.model_copy(update={"most_leases": 4})
    async with learner(tmp_path, serves=False) as ours, ours.env("e") as env:
        await env.send(env.hello(capacity=100, environments=(limited,)))
        await env.next(Welcome)
        await ours.intake.evaluate(tasks=50, version=0, beside=True)
        await ours.serve(0)
        assert [lease.purpose for lease in await env.leases(4)] == ["evaluate", "evaluate", "train", "train"]


async def test_at_a_single_place_evaluation_and_training_take_turns(tmp_path: Path) -> None:
    async with learner(tmp_path, serves=False) as ours, ours.env("e") as env:
        await env.enter(capacity=1)
        await ours.intake.evaluate(tasks=50, version=0, beside=True)
        await ours.serve(0)
        purposes = []
        for _ in range(6):
            (lease,) = await env.leases(1)
            purposes.append(lease.purpose)
            evaluated = lease.purpose == "evaluate"
            await env.finish(graded(lease.lease_id, 1.0) if evaluated else group(lease.lease_id))
        assert purposes == ["evaluate", "train", "evaluate", "train", "evaluate", "train"]


async def test_evaluations_beside_training_do_not_pile_up(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter(capacity=4)
        first = await ours.intake.evaluate(tasks=1, version=50, beside=True)
        assert first is not None
        assert await ours.intake.evaluate(tasks=1, version=100, beside=True) is None
        assert await ours.intake.evaluate(tasks=1, version=200) is not None, "the last one is waited for"


# Resuming


async def test_groups_of_a_former_life_that_the_settings_would_not_take_in_any_more_are_granted_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its filters, its bound on rewards and its size of groups were others."""
    former = [
        group(0),
        group(1, trajectory(0), trajectory(0)),
        group(2, trajectory(0, reward=1e5), trajectory(0, reward=0.0)),
        group(3, trajectory(0)),
    ]
    filters = GroupFilter(drop_uniform=True, max_mean_reward=100.0)
    async with learner(tmp_path, filters=filters) as ours, ours.env("e") as env:
        ours.intake.readmit(former)
        await env.enter()
        assert [lease.lease_id for lease in await env.leases(3)] == [1, 2, 3]
        assert ours.intake.books().buffered == 1
        assert "3 groups that waited for a batch are sampled again" in caplog.text


def test_a_reward_beyond_the_bound_of_now_keeps_a_group_of_a_former_life_out() -> None:
    rules = GroupRules(vocabulary_size=10, min_group_size=2, filters=GroupFilter(), max_reward=10.0)
    assert rules.may_go_on(group(0))
    assert not rules.may_go_on(group(1, trajectory(0, reward=11.0), trajectory(0, reward=0.0)))
    assert not replace(rules, min_group_size=3).may_go_on(group(2))


async def test_readmitted_groups_are_taken_before_anything_is_granted(tmp_path: Path) -> None:
    async with learner(tmp_path, serves=False) as ours:
        ours.intake.readmit([group(3), group(5)])
        async with asyncio.timeout(60):
            batch = await ours.intake.take()
        assert [one.lease_id for one in batch.groups] == [3, 5]


async def test_a_learner_that_stood_still_itself_takes_nobodys_leases_away(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter(capacity=2)
        await env.leases(2)
        ours.clock.now = LEDGER.lease_timeout_s + 1.5
        asyncio.get_running_loop().call_soon(time.sleep, 3.0)  # all stands still, as in a process that is stopped
        await asyncio.sleep(2.5)  # it looks at its leases before it hears from anybody
        await env.send(Heartbeat(running=tuple(lease for beat in map(running, (0, 1)) for lease in beat.running)))
        await env.finish(group(0), group(1))
        assert ours.left_out == {}


async def test_a_lease_that_ends_with_its_env_service_again_and_again_is_a_dead_letter(tmp_path: Path) -> None:
    config = replace(LEDGER, infrastructure_retries=1, groups_per_step=1, max_lag=0)
    async with learner(tmp_path, ledger_config=config) as ours, ours.env("e") as env:
        for start in range(3):
            env.instance = f"i{start}"
            await env.enter(capacity=1)
            (lease,) = await env.leases(1)
        assert lease.lease_id == 1
        (letter,) = letters(ours)
        assert (letter["lease_id"], letter["reason"]) == (
            0,
            "2 attempts ended with the silence or the end of their env_service",
        )


# Partial credit


async def test_of_an_episode_that_outlived_the_bound_what_is_young_enough_is_trained(tmp_path: Path) -> None:
    """Lease 0 runs while two steps pass: at version 2 with max_lag 1 its tokens of version 0 leave the loss."""
    config = replace(LEDGER, on_lag="mask", groups_per_step=1, max_lag=1)
    async with learner(tmp_path, ledger_config=config) as ours, ours.env("e") as env:
        await env.enter()
        await env.leases(2)
        await env.finish(group(1))
        await ours.train()
        (lease,) = await env.leases(1)
        await env.finish(group(lease.lease_id, version=1))
        await ours.train()
        assert not any(isinstance(message, LeaseCancellation) for message in env.seen)
        long = group(0, trajectory(0, 0, 1, 2, reward=1.0), trajectory(0, 0, reward=0.0))
        await env.finish(long)
        taken = await ours.intake.take()
        assert (taken.version, taken.lags, ours.left_out) == (2, (1,), Counter())
        (trained,) = taken.groups
        assert [one.loss_mask.tolist() for one in trained.trajectories] == [[0, 0, 0, 0, 1, 1], [0] * 4]
        assert [one.reward for one in trained.trajectories] == [one.reward for one in long.trajectories]
        assert ours.masked == [(4, 1)]
        (logged,) = [each for each in ours.journal() if isinstance(each, LoggedGroup) and each.group.lease_id == 0]
        assert [one.loss_mask.tolist() for one in logged.group.trajectories] == [[0, 0, 0, 0, 1, 1], [0] * 4]
        first, second = sequences_of(taken.groups, version=2, max_lag=1, preset=GrpoConfig().preset())
        assert (first.lags[first.loss_mask].tolist(), bool(second.loss_mask.any())) == ([1, 0], False)


async def test_an_episode_without_a_token_that_is_young_enough_is_rolled_out_again(tmp_path: Path) -> None:
    config = replace(LEDGER, on_lag="mask", groups_per_step=1, max_lag=0)
    async with learner(tmp_path, ledger_config=config) as ours, ours.env("e") as env:
        await env.enter(capacity=2)
        await env.leases(1)
        await env.send(failed(0, data_fault=False))
        await env.next(OutcomeReceipt)
        await env.leases(1)
        await env.finish(group(1))
        ours.clock.now = 5.0
        await ours.train()
        assert [(lease.lease_id, lease.attempt) for lease in await env.leases(1)] == [(0, 1)]
        await env.finish(group(0, attempt=1, version=0))
        assert (ours.left_out["stale"], ours.masked) == (1, [])


async def test_an_episode_whose_youngest_tokens_find_no_place_takes_that_of_a_younger_one(tmp_path: Path) -> None:
    config = replace(LEDGER, on_lag="mask", groups_per_step=1, max_lag=1)
    async with learner(tmp_path, ledger_config=config) as ours, ours.env("e") as env:
        await env.enter()
        await env.leases(2)
        for lease_id in (1, 2):
            await env.finish(group(lease_id, version=lease_id - 1))
            await ours.train()
            await env.leases(1)
        await env.finish(group(3, version=1))
        await env.finish(group(0, trajectory(0, 1, reward=1.0), trajectory(0, 0, reward=0.0)))
        taken = await ours.intake.take()
        assert [one.lease_id for one in taken.groups] == [0]
        assert (taken.lags, ours.left_out, ours.masked) == ((1,), {"too_old": 1}, [(3, 1)])


@pytest.mark.parametrize("on_lag", ["wait", "mask"])
async def test_long_episodes_do_not_keep_others_from_beginning_while_a_batch_is_waited_for(
    tmp_path: Path, on_lag: OnLag
) -> None:
    config = replace(LEDGER, on_lag=on_lag, groups_per_step=1, max_lag=3)
    async with learner(tmp_path, ledger_config=config) as ours, ours.env("e") as env:
        await env.enter()
        await env.leases(2)
        granting = ours.intake._flow.granting
        assert not granting.may_train()
        ours.clock.now = 100.0
        granting.batch_awaited(asked_at=0.0)
        assert granting.may_train() is (on_lag == "mask")
