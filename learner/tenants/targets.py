"""Targets of sampling sessions: the weights that each has now, and when their files go."""

import time

from learner.tenants.catalog import ModelEntry, SamplingEntry
from learner.tenants.checkpoints import TenantCheckpoints
from learner.tenants.operations import OperationLog
from learner.tenants.refusals import unknown
from learner.tenants.sampling import Sampler
from learner.tenants.turns import BASE_TARGET, OperationOutcome, TargetWeights, target_of


class SamplingTargets:
    """Weights by target. Those of an inflight model are replaced by its later saves, others stay."""

    def __init__(self, *, checkpoints: TenantCheckpoints, log: OperationLog, sampler: Sampler) -> None:
        """Finds those that former lives saved."""
        self._checkpoints, self._log, self._sampler = checkpoints, log, sampler
        self._weights = {BASE_TARGET: TargetWeights(BASE_TARGET)}
        for saved in sorted(checkpoints.targets(), key=lambda each: each.seq_id):
            target = target_of(saved, checkpoints)
            self._weights[target.target_id] = target
        self._remove_left_over()

    def weights_of(self, entry: SamplingEntry) -> TargetWeights:
        """The weights that a sampling session has now. Raises RequestRefused if its checkpoint has gone."""
        if entry.target_id is None:
            return self._weights[BASE_TARGET]
        known = self._weights.get(entry.target_id)
        if known is not None:
            return known
        facts = self._checkpoints.find(entry.target_id, reader=entry.owner)
        if facts is None:
            raise unknown("checkpoint", entry.target_id)
        return target_of(facts, self._checkpoints)

    async def serve(self, entry: ModelEntry, outcome: OperationOutcome) -> None:
        """Serve weights that an operation saved, and open its sampling session. Raises OSError."""
        target = outcome.target
        assert target is not None, outcome
        former = self._weights.get(target.target_id)
        if former is not None and former.seq_id > target.seq_id:
            former, target = target, former  # done again after a start: what it saved has been replaced since
        self._weights[target.target_id] = target
        await self._sampler.offer(target)
        if outcome.sampling_session_id not in self._log.catalog.samplings:
            session = sampling_entry(
                entry.owner, outcome.sampling_session_id, base_model=entry.base_model, target_id=target.target_id
            )
            await self._log.entry(session)
        if former is not None and former.folder not in (None, target.folder):
            self._remove_files(former)

    async def drop(self, entry: SamplingEntry) -> None:
        """Forget a sampling session, and the weights that it alone has. Raises OSError."""
        await self._log.entry(entry.model_copy(update={"dropped": True}))
        still_used = any(each.target_id == entry.target_id for each in self._log.catalog.samplings.values())
        target = None if still_used else self._weights.pop(entry.target_id or "", None)
        if target is not None:
            await self._sampler.forget(target.target_id)
            self._remove_files(target)

    def _remove_left_over(self) -> None:
        """Weights that a death has left: of sessions that are no more, replaced ones, and those that were not served
        yet, which the operation that saves them writes again.
        """
        used = {entry.target_id for entry in self._log.catalog.samplings.values()}
        for saved in self._checkpoints.targets():
            target = target_of(saved, self._checkpoints)
            if target.target_id not in used or self._weights[target.target_id] != target:
                self._checkpoints.delete(saved)
        self._weights = {name: each for name, each in self._weights.items() if name in used or name == BASE_TARGET}

    def _remove_files(self, target: TargetWeights) -> None:
        for facts in self._checkpoints.targets():
            if self._checkpoints.folder(facts.path) == target.folder:
                self._checkpoints.delete(facts)
                return


def sampling_entry(
    owner: str, name: str, *, base_model: str, target_id: str | None, model_path: str | None = None
) -> SamplingEntry:
    """The entry of a new sampling session, whose name begins with that of its session."""
    return SamplingEntry(
        owner=owner,
        session_id=name.partition(":")[0],
        created_at=time.time(),
        sampling_session_id=name,
        base_model=base_model,
        model_path=model_path,
        target_id=target_id,
    )
