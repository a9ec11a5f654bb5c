"""Custom losses of tenants: how long they are kept. Without a bound the catalog, which stands at the head of each file
of the journal, would grow with every one that a client has ever made.

A loss goes when its session has been silent for long, or when its tenant has made many others that were used later; but
never while an operation that a start would do again needs it. One that is being dropped is there for nobody any more.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator, Set

from learner.tenants.catalog import LossEntry
from learner.tenants.models import TrainingModels
from learner.tenants.operations import OperationLog

MOST_LOSSES = 1024
"""Of each tenant."""


class CustomLosses:
    """The losses in the catalog of `log`, with the operations that were the last to use them."""

    def __init__(self, log: OperationLog, models: TrainingModels, *, most: int = MOST_LOSSES) -> None:
        self._log, self._models, self._most = log, models, most
        self._uses: dict[str, dict[str, int]] = {}
        """By loss, the one made or used last at the end: the last operation of each model that uses it."""
        self._dropping: set[str] = set()
        self._lock = threading.Lock()
        """Held while it is decided whether a loss is used or dropped."""

    def made(self, loss_id: str) -> None:
        """A client has made the loss, and will use it."""
        self._uses[loss_id] = self._uses.pop(loss_id, {})

    def used(self, loss_id: str, model_id: str, seq_id: int) -> bool:
        """An operation uses the loss, if that is still there; False if it is not. May be called from any thread.

        The operation may not be in the journal yet; its model counts it as `accepting` from before this call on.
        """
        with self._lock:
            if loss_id in self._dropping or loss_id not in self._log.catalog.losses:
                return False
            uses = self._uses.pop(loss_id, {})
            uses[model_id] = max(seq_id, uses.get(model_id, seq_id))
            self._uses[loss_id] = uses
            return True

    async def drop(self, silent: Set[str]) -> None:
        """Drop those of sessions that were `silent` for long, and what a tenant has too many. Raises OSError."""
        entries = [*self._too_many(), *(each for each in self._entries() if each.session_id in silent)]
        for entry in {each.loss_id: each for each in entries}.values():
            if not self._begin_to_drop(entry.loss_id):
                continue
            try:
                await self._log.entry(entry.model_copy(update={"dropped": True}))
            except OSError:
                self._dropping.discard(entry.loss_id)
                raise
            self._uses.pop(entry.loss_id, None)
            self._dropping.discard(entry.loss_id)

    def _begin_to_drop(self, loss_id: str) -> bool:
        with self._lock:
            if free := self._is_free(loss_id):
                self._dropping.add(loss_id)
            return free

    def _entries(self) -> list[LossEntry]:
        return list(self._log.catalog.losses.values())

    def _too_many(self) -> Iterator[LossEntry]:
        """Of each tenant the losses that were not used for longest, in this life or before it, beyond the bound."""
        order = {loss_id: place for place, loss_id in enumerate(list(self._uses))}
        by_owner: dict[str, list[LossEntry]] = defaultdict(list)
        for entry in self._entries():
            by_owner[entry.owner].append(entry)
        for entries in by_owner.values():
            if len(entries) > self._most:
                oldest = sorted(entries, key=lambda each: (order.get(each.loss_id, -1), each.created_at))
                yield from oldest[: len(entries) - self._most]

    def _is_free(self, loss_id: str) -> bool:
        """All operations that use it are in snapshots of their models, or were given up."""
        uses = list(self._uses.get(loss_id, {}).items())
        models = ((self._models.by_id.get(model_id), seq_id) for model_id, seq_id in uses)
        return all(model is None or model.covered_seq >= seq_id for model, seq_id in models)
