"""Groups that a step has trained and a later one may train again, while their bound on the lag admits their oldest
token.

    trained for the first time ──▶ reusable ──drawn──▶ in training ──trained──▶ reusable, until it is used up or too old

A draw depends on the seed, the version and the groups that are here, and on nothing else: a learner that resumes draws
what the one before it would have drawn.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import xxhash

from learner.ledger.records import LedgerConfig

_LOTS = 2.0**64


@dataclass(frozen=True, slots=True, kw_only=True)
class ReusableGroup:
    """version: of the group's oldest token. worth: the larger, the more likely it is drawn by advantage.

    reuses: number of steps that have trained it again, after the first one.
    """

    version: int
    worth: float = 0.0
    reuses: int = 0


@dataclass(frozen=True, slots=True)
class _StepGroups:
    """Changes at the end of a step: `fresh` groups become reusable, and `reused` ones have been so once more."""

    fresh: dict[int, ReusableGroup]
    reused: tuple[int, ...]


class ReusableGroups:
    """All of them at one version, by lease id: at most those of as many steps as their bound on the lag counts. Empty
    where nothing is reused.
    """

    def __init__(self, config: LedgerConfig) -> None:
        self._config = config
        self._groups: dict[int, ReusableGroup] = {}
        self._in_training: deque[_StepGroups] = deque()
        self._reuses = 0

    @property
    def groups(self) -> Mapping[int, ReusableGroup]:
        """Groups of the present version, without what is in training."""
        return self._groups

    @property
    def reuses(self) -> int:
        """Number of reuses up to the present version."""
        return self._reuses

    @property
    def reuses_taken(self) -> int:
        """Number of reuses, with those in training."""
        return self._reuses + sum(len(step.reused) for step in self._in_training)

    def __contains__(self, lease_id: int) -> bool:
        """True for a group that a later step may train again, as far as is known now."""
        return lease_id in self._groups or any(lease_id in step.fresh for step in self._in_training)

    def restore(self, groups: Mapping[int, ReusableGroup], *, reuses: int, version: int) -> None:
        """As a checkpoint of `version` left them."""
        self._groups, self._reuses = dict(groups) if self._config.reused_per_step else {}, reuses
        self._forget_spent(version)

    def draw(self, *, version: int, max_lag: int) -> tuple[int, ...]:
        """Leases whose groups the step at `version` trains again, in training order; fewer where there are no more.

        The weights of a draw by advantage are those of Efraimidis and Spirakis (2006): of exponential times at rates
        of the groups' worths, the first ones.
        """
        admissible = [each for each, group in self._groups.items() if 0 <= version - group.version <= max_lag]
        return tuple(heapq.nsmallest(self._config.reused_per_step, *self._by_priority(admissible, version)))

    def _by_priority(
        self, admissible: list[int], version: int
    ) -> tuple[list[int], Callable[[int], tuple[float, float, int]]]:
        groups, priority, seed = self._groups, self._config.reuse_priority, self._config.reuse_seed

        def lot(lease_id: int) -> float:
            return (xxhash.xxh3_64_intdigest(f"{seed} {version} {lease_id}".encode()) + 1) / _LOTS

        if priority == "recent":
            return admissible, lambda lease_id: (-groups[lease_id].version, lot(lease_id), lease_id)
        if priority == "advantage":
            worthy = [lease_id for lease_id in admissible if groups[lease_id].worth > 0]
            return worthy, lambda lease_id: (-math.log(lot(lease_id)) / groups[lease_id].worth, 0.0, lease_id)
        return admissible, lambda lease_id: (lot(lease_id), 0.0, lease_id)

    def taken(self, fresh: Mapping[int, ReusableGroup], *, reused: tuple[int, ...]) -> None:
        """A batch goes to the trainer, or will be trained again from the log."""
        self._in_training.append(_StepGroups(dict(fresh) if self._config.reused_per_step else {}, reused))

    def trained(self, version: int) -> None:
        """The oldest batch that was taken has been trained, which made `version`."""
        step = self._in_training.popleft()
        for lease_id in step.reused:
            if lease_id in self._groups:
                group = self._groups[lease_id]
                self._groups[lease_id] = replace(group, reuses=group.reuses + 1)
        self._groups |= step.fresh
        self._reuses += len(step.reused)
        self._forget_spent(version)

    def forget(self, lease_ids: Iterable[int]) -> None:
        """These are never trained again."""
        for lease_id in lease_ids:
            self._groups.pop(lease_id, None)
            for step in self._in_training:
                step.fresh.pop(lease_id, None)

    def _forget_spent(self, version: int) -> None:
        """By the configured bound: one that is lower for a time may rise again."""
        most, max_lag = self._config.max_reuses, self._config.reused_lag
        self._groups = {
            lease_id: group
            for lease_id, group in self._groups.items()
            if group.reuses < most and version - group.version <= max_lag
        }
