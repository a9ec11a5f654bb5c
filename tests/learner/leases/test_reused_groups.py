"""Groups that are trained again, from the intake to the trainer and through the journal."""

from dataclasses import replace
from pathlib import Path

from learner.journal.journal import LoggedBatch, LoggedGroup, LoggedUse
from tests.learner.envs import learner
from tests.learner.samples import LEDGER, group

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
