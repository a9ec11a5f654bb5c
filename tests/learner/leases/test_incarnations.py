"""A restarted learner, and env_services that come with what a former life of it had granted.

The learner is in its third life and starts at version 0: what former lives published under that number belongs to its
history, later numbers do not.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from learner.journal.journal import LoggedFilter, LoggedGroup
from learner.leases.filters import GroupFilter
from protocol.messages import (
    FailedLease,
    FinishedLease,
    Heartbeat,
    LeaseCancellation,
    OutcomeReceipt,
    PeerRefusal,
    RunningLease,
)
from protocol.trajectories import Purpose
from tests.learner.envs import learner
from tests.learner.samples import INCARNATION, LEDGER, group, trajectory


def running(
    lease_id: int,
    *,
    incarnation: int = 2,
    attempt: int = 0,
    version: str | None = "2.0",
    purpose: Purpose = "train",
) -> RunningLease:
    return RunningLease(
        incarnation=incarnation, lease_id=lease_id, attempt=attempt, purpose=purpose, oldest_version=version
    )


def failed(lease_id: int, *, incarnation: int = 2, data_fault: bool = True) -> FailedLease:
    return FailedLease(
        incarnation=incarnation, lease_id=lease_id, attempt=0, purpose="train", data_fault=data_fault, reason="r"
    )


async def test_what_still_runs_is_adopted_before_anything_is_granted(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter(capacity=4, running=[running(0), running(2)])
        leases = await env.leases(2)
        assert [(lease.lease_id, lease.incarnation) for lease in leases] == [(1, INCARNATION), (3, INCARNATION)]
        assert ours.intake.books().running == 4


async def test_an_adopted_group_is_accepted_journaled_and_trained(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter(capacity=4, running=[running(0), running(1)])
        await env.finish(group(0, incarnation=2), group(1, incarnation=2))
        assert [type(record) for record in ours.journal()] == [LoggedGroup, LoggedGroup]
        async with asyncio.timeout(60):
            batch = await ours.intake.take()
        assert [one.incarnation for one in batch.groups] == [2, 2]
        assert ours.intake.books().pending == 0


async def test_a_finished_group_of_a_former_life_is_readmitted_and_its_new_attempt_cancelled(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("a") as first, ours.env("b") as second:
        await first.enter(capacity=1)
        (lease,) = await first.leases(1)
        await second.enter(capacity=1)
        await second.finish(group(lease.lease_id, incarnation=1))
        (cancelled,) = (await first.next(LeaseCancellation)).leases
        assert (cancelled.incarnation, cancelled.lease_id, cancelled.attempt) == (INCARNATION, lease.lease_id, 0)
        assert [record.group.incarnation for record in ours.journal() if isinstance(record, LoggedGroup)] == [1]
        assert len(await first.leases(1)) == 1, "its room is free again"
        assert ours.intake.books().buffered == 1


async def test_the_filter_rule_holds_for_readmitted_groups(tmp_path: Path) -> None:
    async with learner(tmp_path, filters=GroupFilter(drop_uniform=True)) as ours, ours.env("e") as env:
        await env.enter(capacity=1)
        same = [trajectory(0, incarnation=2), trajectory(0, incarnation=2)]
        await env.finish(group(7, *same, incarnation=2))
        assert ours.journal()[-1] == LoggedFilter(lease_id=7)
        assert (ours.intake.books().filtered, ours.intake.books().leases) == (1, 8)


@pytest.mark.parametrize("adopted", [True, False])
async def test_a_group_of_versions_that_are_not_of_this_history_is_acknowledged_and_not_trained(
    tmp_path: Path, adopted: bool
) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter(capacity=1, running=[running(0)] if adopted else [])
        await env.finish(group(0, trajectory(0, incarnation=2), trajectory(0, 1, incarnation=2), incarnation=2))
        assert ours.intake.books().buffered == 0
        assert ours.left_out == {"failed_infrastructure" if adopted else "failed_late": 1}
        assert ours.intake.books().failed == int(adopted)


async def test_a_group_of_a_life_that_is_yet_to_come_is_acknowledged_and_ignored(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter(capacity=1)
        await env.finish(group(0, incarnation=INCARNATION + 1, version=0))
        assert ours.intake.books().buffered == 0


async def test_a_lease_id_that_no_life_can_have_given_opens_nothing(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter(capacity=1, running=[running(1 << 40)])
        assert (await env.next(LeaseCancellation)).leases == (running(1 << 40),)
        await env.finish(group(1 << 40, incarnation=2))
        assert ours.intake.books().leases == 1
        assert ours.left_out == {"unknown": 1}


async def test_a_group_that_has_become_too_old_is_acknowledged_and_rolled_out_again(tmp_path: Path) -> None:
    config = replace(LEDGER, max_lag=0)
    async with learner(tmp_path, ledger_config=config) as ours, ours.env("e") as env:
        await env.enter(capacity=2)
        await env.leases(2)
        await env.finish(group(0), group(1))
        await ours.train()
        assert [lease.lease_id for lease in await env.leases(2)] == [2, 3]
        await env.finish(group(5, incarnation=2))
        assert ours.left_out["late"] == 1
        assert ours.intake.books().pending == 2, "leases 4 and 5 are known now, and wait for a place"


async def test_heartbeats_adopt_what_the_hello_did_not_name(tmp_path: Path) -> None:
    async with learner(tmp_path, serves=False) as ours, ours.env("e") as env:
        await env.enter(capacity=4)
        await env.send(Heartbeat(running=(running(3), running(0, version=None))))
        await env.send(LeaseCancellation(leases=(running(0),)))
        assert (await env.next(PeerRefusal)).reason == "unexpected", "an answer, which comes after the heartbeat's"
        assert not [message for message in env.seen if isinstance(message, LeaseCancellation)]
        assert ours.intake.books().running == 2
        await ours.serve(0)
        assert [lease.lease_id for lease in await env.leases(2)] == [1, 2]


async def test_what_nobody_wants_is_cancelled_under_its_own_name(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("a") as first, ours.env("b") as second:
        await first.enter(capacity=2)
        await first.leases(2)
        await first.finish(group(0))
        unwanted = (
            running(0),
            running(1),
            running(3, version="2.1"),
            running(4, incarnation=9, version=None),
            running(5, purpose="evaluate"),
        )
        await second.enter(capacity=1, running=unwanted)
        assert (await second.next(LeaseCancellation)).leases == unwanted


async def test_an_adopted_attempt_that_comes_to_nothing_is_charged_and_others_are_not(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter(capacity=1, running=[running(0)])
        for lease_id in (0, 1):
            await env.send(failed(lease_id))
            acknowledged = await env.next(OutcomeReceipt)
            assert (acknowledged.incarnation, acknowledged.lease_id) == (2, lease_id)
        books = ours.intake.books()
        assert (books.failed, books.dead_lettered) == (1, 1)
        assert ours.left_out == {"failed_data": 1, "failed_late": 1}


async def test_an_adopted_attempt_expires_goes_to_another_and_is_cancelled(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("a") as first, ours.env("b") as second:
        await first.enter(capacity=1, running=[running(0)])
        await second.enter(capacity=4)
        alive = [running(lease.lease_id, incarnation=INCARNATION) for lease in await second.leases(3)]
        for now in (40.0, 80.0):
            ours.clock.now = now
            await second.send(Heartbeat(running=tuple(alive)))
        (again,) = await second.leases(1)
        assert (again.lease_id, again.attempt, again.incarnation) == (0, 1, INCARNATION)
        await first.send(Heartbeat(running=(running(0),)))
        assert (await first.next(PeerRefusal)).reason == "unknown_peer"
        await first.enter(capacity=1, running=[running(0)])
        assert (await first.next(LeaseCancellation)).leases[0].incarnation == 2


async def test_leases_of_another_run_are_not_taken_up(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.send(env.hello(capacity=2, running=[running(0)], run="another"))
        assert [lease.lease_id for lease in await env.leases(2)] == [0, 1]
        assert ours.intake.books().running == 2


async def test_an_env_service_that_was_started_afresh_gets_all_of_its_leases_again_at_once(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter(capacity=2)
        await env.leases(2)
        env.instance = "i1"
        await env.enter(capacity=2)
        assert [(lease.lease_id, lease.attempt) for lease in await env.leases(2)] == [(0, 1), (1, 1)]
        assert ours.left_out == {"holder_gone": 2}


async def test_an_env_service_that_greets_again_keeps_its_leases(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter(capacity=2)
        await env.leases(2)
        await env.enter(capacity=3, running=[running(0, incarnation=INCARNATION), running(1, incarnation=INCARNATION)])
        assert [(lease.lease_id, lease.attempt) for lease in await env.leases(1)] == [(2, 0)]
        assert ours.left_out == {}


async def test_who_was_silent_too_long_comes_back_with_groups_that_are_taken_if_they_are_the_first(
    tmp_path: Path,
) -> None:
    async with learner(tmp_path) as ours, ours.env("a") as first, ours.env("b") as second:
        await first.enter(capacity=3)
        await first.leases(3)
        await second.enter(capacity=3)
        await second.leases(1)
        ours.clock.now = LEDGER.lease_timeout_s + 1
        await second.send(Heartbeat(running=(running(3, incarnation=INCARNATION),)))
        assert [lease.attempt for lease in await second.leases(2)] == [1, 1]
        await second.finish(group(0, attempt=1))
        held = [running(lease_id, incarnation=INCARNATION) for lease_id in (0, 1, 2)]
        await first.send(FinishedLease(group=group(1)))
        assert (await first.next(PeerRefusal)).reason == "unknown_peer"
        await first.enter(capacity=3, running=held)
        assert {lease.lease_id for lease in (await first.next(LeaseCancellation)).leases} >= {0, 1}
        await first.finish(group(0), group(1))
        (cancelled,) = (await second.next(LeaseCancellation)).leases
        assert (cancelled.lease_id, cancelled.attempt) == (1, 1)
        assert ours.intake.books().buffered == 2
        assert ours.left_out["duplicate"] == 1
