"""Groups that are trained again, from the intake to the trainer and through the journal."""

from dataclasses import replace
from pathlib import Path

from learner.journal.journal import LoggedBatch, LoggedGroup, LoggedUse
from learner.leases.filters import GroupFilter
from learner.ledger import ReusableGroup
from protocol.trajectories import GreedyBaseline, RewardRecord, VersionSpan
from tests.chaos.journal_reader import BatchRecord, UseRecord
from tests.chaos.journal_reader import read_journal as read_from_outside
from tests.learner.envs import learner
from tests.learner.samples import INCARNATION, INSTANCE, LEDGER, group, trajectory

REUSING = replace(LEDGER, max_lag=4, reused_per_step=1)


async def test_a_batch_has_its_new_groups_and_then_one_that_was_trained(tmp_path: Path) -> None:
    async with learner(tmp_path, ledger_config=REUSING, total_groups=4) as ours, ours.env("e") as env:
        await ours.serve(0)
        await env.enter()
        for version in range(2):
            leases = await env.leases(4) if version == 0 else []
            await env.finish(*(group(lease.lease_id, attempt=lease.attempt) for lease in leases))
            batch = await ours.intake.take()
            await ours.intake.trained(version + 1)
            await ours.serve(version + 1)
        assert [one.lease_id for one in batch.fresh] == [2, 3]
        (again,) = batch.reused_groups
        assert again.lease_id in (0, 1)
        assert (batch.lags, batch.reused) == ((1, 1, 1), 1)
        assert len(batch.times) == 2
        assert ours.journal()[-1] == LoggedBatch(version=1, lease_ids=(2, 3), reused=(again.lease_id,))
        books = ours.intake.books()
        books.check()
        assert (books.trained, books.reused) == (4, 1)

        await ours.intake.checkpoint()
        used = [record for record in ours.journal() if isinstance(record, LoggedUse)]
        left = {0, 1, 2, 3} - {again.lease_id}
        assert {record.lease_id for record in used} == left
        copied = [record.group.lease_id for record in ours.journal() if isinstance(record, LoggedGroup)]
        assert set(copied[-3:]) == left

        outside = read_from_outside(tmp_path).records
        assert {record.lease_id for record in outside if isinstance(record, UseRecord)} == left
        batches = [record for record in outside if isinstance(record, BatchRecord)]
        assert [(one.lease_ids, one.reused) for one in batches] == [((0, 1), ()), ((2, 3), (again.lease_id,))]


async def test_groups_without_a_greedy_answer_are_not_trained_again_where_it_is_compared_with(tmp_path: Path) -> None:
    """A former life had another algorithm."""
    spans = (VersionSpan(version=f"{INCARNATION}.0", start=2, end=3, instance=INSTANCE),)
    answer = GreedyBaseline(reward=RewardRecord(verifier="test", reward=0.5), version_spans=spans, sampled_tokens=1)
    former = [group(0), group(1).model_copy(update={"greedy_baseline": answer})]
    async with learner(tmp_path, ledger_config=REUSING, greedy_baseline=True) as ours:
        ours.ledger.replay((0, 1), groups={number: ReusableGroup(version=0) for number in range(2)})
        ours.intake.keep_used(former)
        await ours.intake.trained(1)
        assert list(ours.ledger.reusable) == [1]


async def test_groups_that_the_filters_have_come_to_leave_out_are_not_trained_again(tmp_path: Path) -> None:
    former = [group(0), group(1, trajectory(0), trajectory(0))]
    async with learner(tmp_path, ledger_config=REUSING, filters=GroupFilter(drop_uniform=True)) as ours:
        ours.ledger.replay((0, 1), groups={number: ReusableGroup(version=0) for number in range(2)})
        ours.intake.keep_used(former)
        await ours.intake.trained(1)
        assert list(ours.ledger.reusable) == [0]
