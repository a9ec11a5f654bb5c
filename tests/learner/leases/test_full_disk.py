"""The intake at a checkpoint, and while its disk is full: nothing is acknowledged that is not kept."""

import asyncio
import json
import resource
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from learner.journal.journal import Journal, LoggedBatch, LoggedFilter, LoggedGroup
from learner.journal.segments import encoded, read_segment, segments_of
from learner.leases.dead_letters import DeadLetters
from learner.leases.filters import GroupFilter
from protocol.messages import FailedLease, FinishedLease, Heartbeat, LeaseCancellation, OutcomeReceipt, RunningLease
from protocol.trajectories import TrajectoryGroup
from tests.learner.envs import learner
from tests.learner.samples import INCARNATION, group, trajectory


async def test_while_the_disk_is_full_nothing_is_acknowledged_and_nothing_is_lost(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter()
        leases = await env.leases(4)
        await env.finish(group(leases[0].lease_id))
        former = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, former[1]))
        try:
            await env.send(FinishedLease(group=group(leases[1].lease_id)))
            await env.send(stranger(leases[1].lease_id + 1000))
            await env.next(LeaseCancellation)  # so the group was handled before, and not answered
            assert not any(isinstance(message, OutcomeReceipt) for message in env.seen)
            assert ours.not_written == {"journal": 1}, "what the alert of a disk that refuses looks at"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, former)
        await env.finish(group(leases[1].lease_id))
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, former[1]))
        try:
            taking = asyncio.create_task(ours.intake.take())
            await wait_until(lambda: "room on the disk" in str(ours.waits.readiness().waiting_for))
            assert not taking.done()
            await wait_until(lambda: ours.not_written["journal"] >= 4)  # the batch, and each try since
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, former)
        async with asyncio.timeout(60):
            batch = await taking
        assert ours.journal()[-1] == LoggedBatch(version=0, lease_ids=tuple(one.lease_id for one in batch.groups))
        assert len([record for record in ours.journal() if isinstance(record, LoggedGroup)]) == 2


async def test_a_filtered_group_is_in_the_journal_with_its_decision_or_not_at_all(tmp_path: Path) -> None:
    async with learner(tmp_path, filters=GroupFilter(drop_uniform=True)) as ours, ours.env("e") as env:
        await env.enter()
        (first, *_) = await env.leases(4)
        uniform = group(first.lease_id, trajectory(0, reward=1.0), trajectory(0, reward=1.0))
        (segment,) = segments_of(tmp_path / "journal")
        written = segment.path.stat().st_size + len(encoded(LoggedGroup(group=uniform)))
        former = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (written + 3, former[1]))
        try:
            await env.send(FinishedLease(group=uniform))
            await env.send(stranger(1000))
            await env.next(LeaseCancellation)  # so the group was handled before, and not answered
            assert ours.not_written == {"journal": 1}
            assert ours.journal() == [], "a resume would train it"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, former)
        await env.finish(uniform)
        assert ours.journal() == [LoggedGroup(group=ANY), LoggedFilter(lease_id=first.lease_id)]


async def test_a_checkpoint_of_the_intake_begins_a_segment_with_the_groups_in_the_buffer(tmp_path: Path) -> None:
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter()
        leases = await env.leases(4)
        await env.finish(*(group(lease.lease_id) for lease in leases[:3]))
        await ours.train()
        snapshot = await ours.intake.checkpoint()
        assert snapshot.version == 1
        newest = segments_of(tmp_path / "journal")[-1]
        assert newest.start == 1
        held = [record for record, _ in read_segment(newest.path)]
        assert [record.group.lease_id for record in held if isinstance(record, LoggedGroup)] == [leases[2].lease_id]


async def test_groups_that_come_in_while_a_checkpoint_is_written_are_in_the_segment_that_follows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    really = Journal.prepare

    def slowly(self: Journal, *, version: int, groups: Iterable[TrajectoryGroup], used: Any) -> None:
        begun.set()
        assert may_end.wait(30), "the group came in meanwhile"
        really(self, version=version, groups=groups, used=used)

    monkeypatch.setattr(Journal, "prepare", slowly)
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter()
        leases = await env.leases(4)
        await env.finish(*(group(lease.lease_id) for lease in leases[:3]))
        await ours.train()
        writing = asyncio.create_task(ours.intake.checkpoint())
        assert await asyncio.to_thread(begun.wait, 30)
        await env.finish(group(leases[3].lease_id))
        may_end.set()
        await writing
        newest = segments_of(tmp_path / "journal")[-1]
        held = [record.group.lease_id for record, _ in read_segment(newest.path) if isinstance(record, LoggedGroup)]
        assert (newest.start, held) == (1, [leases[2].lease_id, leases[3].lease_id])


def test_dead_letters_that_the_disk_did_not_take_are_written_later(tmp_path: Path) -> None:
    path = tmp_path / "dead_letters.jsonl"
    path.write_text('{"lease_id": 1}\n{"lease_id": 2, "rea')
    letters = DeadLetters(path, largest_share=0.5)
    failed = FailedLease(incarnation=INCARNATION, lease_id=7, attempt=0, purpose="train", data_fault=True, reason="x")
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, former[1]))
    try:
        letters.append(failed, task_index=3, version=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    assert path.read_text() == '{"lease_id": 1}\n', "the torn line of a former life is gone"
    letters.close()
    assert [json.loads(line)["lease_id"] for line in path.read_text().splitlines()] == [1, 7]


def stranger(lease_id: int) -> Heartbeat:
    """Of a lease that nobody granted, so that it is answered with a cancellation."""
    return Heartbeat(running=(RunningLease(incarnation=INCARNATION, lease_id=lease_id, attempt=0, purpose="train"),))


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0.01)
