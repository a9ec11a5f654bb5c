"""Tokens of a version that the process which sampled them has not proven: they wait, are refused, or are given back."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from learner.evaluation.config import EvaluationConfig
from learner.journal.journal import Journal, LoggedDistrust, LoggedGroup
from learner.journal.segments import read_segment, segments_of
from learner.weights.provenance import LoadedWeights, Provenance, Standing
from protocol.messages import FailedLease, FinishedLease, LeaseGrant, OutcomeReceipt
from protocol.model import PolicyVersion
from protocol.trajectories import TrajectoryGroup
from tests.learner.envs import RunningIntake, ScriptedEnv, learner
from tests.learner.generators import announcement
from tests.learner.samples import INCARNATION, group, trajectory

OTHER = "h-1"
"""A process of which nothing is proven."""


def sampled_by(instance: str, lease_id: int, *, version: int = 0, attempt: int = 0) -> TrajectoryGroup:
    """Only the first of its trajectories is of that process."""
    return group(lease_id, trajectory(version, instance=instance), trajectory(version, reward=0.0), attempt=attempt)


async def commits(ours: RunningIntake, *, version: int = 0) -> None:
    """Process OTHER is asked to serve a version, and has not proven it yet."""
    ours.fleet.announce(announcement("h", "http://127.0.0.1:2"), now=0.0)
    (member,) = [member for member in ours.fleet.members() if member.generator_id == "h"]
    ours.fleet.asked_to_commit(member, PolicyVersion(INCARNATION, version))
    await ours.intake.fleet_changed()


async def is_not_acknowledged(env: ScriptedEnv) -> None:
    """Sees to it that the learner has looked at what was sent before."""
    await env.send(
        FailedLease(incarnation=INCARNATION, lease_id=99, attempt=0, purpose="train", data_fault=False, reason="")
    )
    assert (await env.next(OutcomeReceipt)).lease_id == 99


@asynccontextmanager
async def granted(tmp_path: Path) -> AsyncIterator[tuple[RunningIntake, ScriptedEnv]]:
    """A learner, and an env_service that holds leases 0 to 3."""
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter()
        await env.leases(4)
        yield ours, env


@asynccontextmanager
async def waiting_for_proof(tmp_path: Path) -> AsyncIterator[tuple[RunningIntake, ScriptedEnv]]:
    """The same, and the group of lease 0 is there, with tokens of which OTHER owes the proof."""
    async with granted(tmp_path) as (ours, env):
        await commits(ours)
        await env.send(FinishedLease(group=sampled_by(OTHER, 0)))
        await is_not_acknowledged(env)
        yield ours, env


async def test_a_group_waits_for_the_proof_of_its_tokens_and_is_taken_when_it_is_good(tmp_path: Path) -> None:
    async with waiting_for_proof(tmp_path) as (ours, env):
        assert ours.intake.books().buffered == 0
        assert ours.journal() == []
        ours.fleet.committed("h", version=PolicyVersion(INCARNATION, 0), fingerprint="f")
        await ours.intake.fleet_changed()
        assert (await env.next(OutcomeReceipt)).lease_id == 0
        assert ours.intake.books().buffered == 1
        assert [type(record) for record in ours.journal()] == [LoggedGroup]


async def test_a_group_whose_proof_fails_is_refused_with_the_reason_and_its_lease_is_granted_again(
    tmp_path: Path,
) -> None:
    async with waiting_for_proof(tmp_path) as (ours, env):
        ours.fleet.distrust(OTHER, since=PolicyVersion(INCARNATION, 0))
        await ours.intake.fleet_changed()
        assert (await env.next(OutcomeReceipt)).lease_id == 0
        assert ours.left_out["failed_infrastructure"] == 1
        assert ours.fleet.provenance.fault(sampled_by(OTHER, 0)) == (
            "tokens of policy version 3.0 were sampled by a generator that did not prove to serve it "
            "(the group was sampled by g): they are sampled again"
        )
        assert [lease.lease_id for lease in await env.leases(1)] == [4], "its own turn comes after a pause"
        ours.clock.now = 10.0
        await env.finish(group(1), group(2))
        await ours.train()
        again, _ = await env.leases(2)
        assert (again.lease_id, again.attempt) == (0, 1)
        ours.intake.books().check()
        assert 0 not in [record.group.lease_id for record in ours.journal() if isinstance(record, LoggedGroup)]


async def test_a_process_that_leaves_before_its_proof_has_proven_nothing(tmp_path: Path) -> None:
    async with waiting_for_proof(tmp_path) as (ours, env):
        ours.fleet.lost("h")
        await ours.intake.fleet_changed()
        await env.next(OutcomeReceipt)
        assert ours.intake.books().failed == 1


async def test_the_proof_of_a_later_process_of_the_same_name_says_nothing_of_the_one_before(tmp_path: Path) -> None:
    async with granted(tmp_path) as (ours, env):
        ours.fleet.announce(announcement("h", "http://127.0.0.1:2", instance="2"), now=0.0)
        ours.fleet.committed("h", version=PolicyVersion(INCARNATION, 0), fingerprint="f")
        await env.finish(sampled_by(OTHER, 0), sampled_by("h-2", 1))
        assert (ours.intake.books().failed, ours.intake.books().buffered) == (1, 1)


async def test_what_a_process_sampled_since_it_is_distrusted_leaves_the_buffer_and_is_granted_again(
    tmp_path: Path,
) -> None:
    async with granted(tmp_path) as (ours, env):
        await env.finish(group(0), group(1))
        await ours.train()
        await env.leases(2)
        for version in (0, 1):
            ours.fleet.provenance.prove(OTHER, LoadedWeights(PolicyVersion(INCARNATION, version), "", ""))
        await env.finish(group(2, version=1), sampled_by(OTHER, 3, version=0), sampled_by(OTHER, 4, version=1))
        ours.fleet.distrust(OTHER, since=PolicyVersion(INCARNATION, 1))
        batch = await ours.intake.take()  # before anybody else heard of it
        assert sorted(each.lease_id for each in batch.groups) == [2, 3]
        books = ours.intake.books()
        books.check()
        assert (books.buffered, books.dropped, ours.left_out["unproven"]) == (0, 1, 1)
        assert ours.forgotten == [(4, "unproven")]
        assert 4 in [lease.lease_id for lease in (await env.next(LeaseGrant)).leases]
        assert LoggedDistrust(OTHER, PolicyVersion(INCARNATION, 1)) in ours.journal()
        await env.finish(sampled_by(OTHER, 4, version=1, attempt=1))
        assert ours.intake.books().failed == 1, "it comes too late"


async def test_a_checkpoint_during_which_a_process_is_distrusted_says_so_after_the_groups_that_it_had_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied, distrusted, prepare = asyncio.Event(), threading.Event(), Journal.prepare
    loop = asyncio.get_running_loop()

    def slow(journal: Journal, *, version: int, groups: Iterable[TrajectoryGroup], used: Any) -> None:
        prepare(journal, version=version, groups=groups, used=used)
        loop.call_soon_threadsafe(copied.set)
        assert distrusted.wait(60)

    monkeypatch.setattr(Journal, "prepare", slow)
    async with granted(tmp_path) as (ours, env):
        await env.finish(group(0), group(1))
        await ours.train()
        await env.leases(2)
        ours.fleet.provenance.prove(OTHER, LoadedWeights(PolicyVersion(INCARNATION, 1), "", ""))
        await env.finish(group(2, version=1), sampled_by(OTHER, 3, version=1))
        checkpoint = asyncio.create_task(ours.intake.checkpoint())
        await copied.wait()
        ours.fleet.distrust(OTHER, since=PolicyVersion(INCARNATION, 1))
        await ours.intake.fleet_changed()
        distrusted.set()
        await checkpoint
        newest = segments_of(tmp_path / "journal")[-1]
        records = [record for record, _ in read_segment(newest.path)]
        assert newest.start == 1
        copies = [record.group.lease_id for record in records if isinstance(record, LoggedGroup)]
        assert copies == [2, 3]
        assert records[len(copies)] == LoggedDistrust(OTHER, PolicyVersion(INCARNATION, 1))


async def test_a_held_out_task_is_sampled_again_too(tmp_path: Path) -> None:
    async with learner(tmp_path, evaluation=EvaluationConfig(samples=2)) as ours, ours.env("e") as env:
        await env.enter()
        future = await ours.intake.evaluate(tasks=1, version=0)
        assert future is not None
        lease = next(each for each in await env.leases(5) if each.purpose == "evaluate")
        bad = group(lease.lease_id, trajectory(0, instance=OTHER), trajectory(0), purpose="evaluate")
        await env.finish(bad)
        again = next(each for each in (await env.next(LeaseGrant)).leases if each.purpose == "evaluate")
        await env.finish(group(again.lease_id, trajectory(0), trajectory(0), purpose="evaluate"))
        async with asyncio.timeout(60):
            assert (await future).result.tasks == 1


def test_tokens_that_are_too_old_anyway_are_left_to_the_ledger() -> None:
    provenance = Provenance()
    old = sampled_by(OTHER, 0, version=3)
    assert provenance.standing(old) is Standing.UNPROVEN
    provenance.forget(below=4)
    assert provenance.standing(old) is Standing.PROVEN
