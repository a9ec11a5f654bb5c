"""Env_services that were started again and go on with what their records hold, within one life of the learner."""

from pathlib import Path

from protocol.messages import Goodbye, Heartbeat, LeaseCancellation, RunningLease
from tests.env_service.peers import eventually
from tests.learner.envs import ScriptedEnv, learner
from tests.learner.leases.test_incarnations import running
from tests.learner.samples import INCARNATION, LEDGER, group


def recorded(*lease_ids: int) -> list[RunningLease]:
    return [running(each, incarnation=INCARNATION, version=None) for each in lease_ids]


async def comes_back(env: ScriptedEnv, *lease_ids: int, capacity: int) -> None:
    env.instance = "i1"
    await env.enter(capacity=capacity, running=recorded(*lease_ids))


async def test_it_keeps_what_it_goes_on_with_and_the_rest_is_granted_again(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter(capacity=3)
        await env.leases(3)
        await comes_back(env, 0, 2, capacity=4)
        assert [(lease.lease_id, lease.attempt) for lease in await env.leases(2)] == [(1, 1), (3, 0)]
        books = ours.intake.books()
        assert (books.running, books.expired, books.attempts) == (4, 1, 5)
        assert ours.left_out == {"holder_gone": 1}
        await env.finish(group(0), group(2))
        assert ours.intake.books().buffered == 2


async def test_one_of_another_run_keeps_nothing(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter(capacity=1)
        await env.leases(1)
        env.instance = "i1"
        await env.send(env.hello(capacity=1, running=recorded(0), run="another"))
        assert [(lease.lease_id, lease.attempt) for lease in await env.leases(1)] == [(0, 1)]


async def test_what_it_keeps_when_it_leaves_waits_for_it_until_the_deadline(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("a") as first, ours.env("b") as second:
        await first.enter(capacity=2)
        await first.leases(2)
        await second.enter(capacity=3)
        await second.leases(2)
        await first.send(Goodbye(reason="rolled", keeps=tuple(recorded(1))))
        assert [(lease.lease_id, lease.attempt) for lease in await second.leases(1)] == [(0, 1)]
        await comes_back(first, 1, capacity=1)
        await first.finish(group(1))
        assert ours.left_out == {"holder_gone": 1}
        assert ours.intake.books().buffered == 1


async def test_what_it_kept_and_never_came_back_for_goes_to_others(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("a") as first, ours.env("b") as second:
        await first.enter(capacity=1)
        await first.leases(1)
        await second.enter(capacity=4)
        held = [running(lease.lease_id, incarnation=INCARNATION) for lease in await second.leases(3)]
        await first.send(Goodbye(reason="rolled", keeps=tuple(recorded(0))))
        ours.clock.now = LEDGER.lease_timeout_s + 1
        await second.send(Heartbeat(running=tuple(held)))
        assert [(lease.lease_id, lease.attempt) for lease in await second.leases(1)] == [(0, 1)]


async def test_one_that_was_away_for_long_goes_on_with_what_nobody_else_has(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter(capacity=2)
        await env.leases(2)
        ours.clock.now = LEDGER.lease_timeout_s + 1
        await eventually(lambda: ours.intake.books().expired == 2)
        await comes_back(env, 0, 1, capacity=2)
        await env.send(Heartbeat(running=tuple(recorded(0, 1))))
        await env.finish(group(0))
        books = ours.intake.books()
        assert (books.running, books.buffered, books.accepted) == (2, 1, 1)
        assert (books.attempts, books.expired) == (5, 2)
        assert not [message for message in env.seen if isinstance(message, LeaseCancellation)]


async def test_what_another_has_by_now_is_cancelled(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("a") as first, ours.env("b") as second:
        await first.enter(capacity=1)
        await first.leases(1)
        await second.enter(capacity=4)
        held = [running(lease.lease_id, incarnation=INCARNATION) for lease in await second.leases(3)]
        ours.clock.now = LEDGER.lease_timeout_s + 1
        await second.send(Heartbeat(running=tuple(held)))
        await second.leases(1)
        await comes_back(first, 0, capacity=1)
        (cancelled,) = (await first.next(LeaseCancellation)).leases
        assert (cancelled.lease_id, cancelled.attempt) == (0, 0)


async def test_what_was_delivered_before_it_died_is_cancelled_and_counts_once(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter(capacity=1)
        await env.leases(1)
        await env.finish(group(0))
        await comes_back(env, 0, capacity=1)
        (cancelled,) = (await env.next(LeaseCancellation)).leases
        assert (cancelled.lease_id, cancelled.attempt) == (0, 0)
        await env.finish(group(0))
        assert (ours.intake.books().buffered, ours.intake.books().accepted) == (1, 1)
        assert ours.left_out["duplicate"] == 1
