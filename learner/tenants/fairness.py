"""The order of tenants: deficit round-robin over tenants, so that each gets the share of its weight.

A round takes operations until `round_tokens` are together. A tenant saves what a round did not give it; one with
nothing to do saves nothing. Operations of a tenant's models come in turn, each model's in order.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
_MIN_COST = 16
"""Tokens that the smallest operation counts as."""


@dataclass(frozen=True)
class Backlog(Generic[T]):
    """Operations of a tenant that may run now: a queue for each model."""

    tenant: str
    weight: float
    queues: Sequence[deque[T]]


class DeficitRoundRobin(Generic[T]):
    """Remembers what each tenant has saved, and who comes first next time."""

    def __init__(self, *, round_tokens: int, cost: Callable[[T], int]) -> None:
        self._round_tokens = round_tokens
        self._cost = cost
        self._saved: dict[str, float] = {}
        self._after = ""

    def take(self, backlogs: Iterable[Backlog[T]]) -> list[T]:
        """The operations of a round, out of their queues; at least one if there is any."""
        waiting = self._in_turn([backlog for backlog in backlogs if any(backlog.queues)])
        self._saved = {each.tenant: self._saved.get(each.tenant, 0.0) for each in waiting}
        taken: list[T] = []
        left = self._round_tokens
        quantum = self._round_tokens / max(1.0, sum(each.weight for each in waiting))
        while waiting and left > 0:
            for backlog in waiting:
                self._saved[backlog.tenant] += quantum * backlog.weight
                for operation in self._affordable(backlog, left):
                    taken.append(operation)
                    left -= self._price(operation)
                self._after = backlog.tenant
                if left <= 0:
                    return taken
            waiting = [backlog for backlog in waiting if any(backlog.queues)]
        return taken

    def _in_turn(self, backlogs: list[Backlog[T]]) -> list[Backlog[T]]:
        return sorted(backlogs, key=lambda each: (each.tenant <= self._after, each.tenant))

    def _price(self, operation: T) -> int:
        return max(_MIN_COST, self._cost(operation))

    def _affordable(self, backlog: Backlog[T], left: int) -> Iterable[T]:
        """Takes out what the tenant has saved for, model by model."""
        queues = deque(queue for queue in backlog.queues if queue)
        while queues and left > 0:
            queue = queues.popleft()
            price = self._price(queue[0])
            if price > self._saved[backlog.tenant]:
                continue  # its next operation is too dear now; another model's may not be
            self._saved[backlog.tenant] -= price
            left -= price
            yield queue.popleft()
            if queue:
                queues.append(queue)
        if not any(backlog.queues):
            self._saved[backlog.tenant] = 0.0
