"""The order of tenants: deficit round-robin over tenants, so that each gets the share of its weight.

A round takes operations until its budget of tokens is together. A tenant saves what a round did not give it; one with
nothing to do saves nothing. Operations of a tenant's models come in turn, each model's in order. The budget is what the
trainer gets done in a short time, so that those who come during the round of a flood do not wait for long.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
_MIN_COST = 16
"""Tokens that the smallest operation counts as."""
_FIRST_BUDGET, _MIN_BUDGET = 4096, 512
_LEARNT = 0.3
"""The weight of the last round in what is known of the trainer's speed."""


@dataclass(frozen=True)
class Backlog(Generic[T]):
    """Operations of a tenant that may run now: a queue for each model."""

    tenant: str
    weight: float
    queues: Sequence[deque[T]]


class RoundBudget:
    """Tokens of a round: as many as take about `seconds` by what the last rounds took, `most` of them at most."""

    def __init__(self, *, seconds: float, most: int) -> None:
        self._seconds, self._most, self._rate = seconds, most, 0.0

    def tokens(self) -> int:
        """The budget of the next round."""
        known = self._rate * self._seconds if self._rate else _FIRST_BUDGET
        return int(min(self._most, max(_MIN_BUDGET, known)))

    def learn(self, tokens: int, seconds: float) -> None:
        """So long have the passes of so many tokens taken."""
        if tokens and seconds > 0:
            rate = tokens / seconds
            self._rate += (rate - self._rate) * (_LEARNT if self._rate else 1.0)


class DeficitRoundRobin(Generic[T]):
    """Remembers what each tenant has saved, and who comes first next time."""

    def __init__(self, *, cost: Callable[[T], int]) -> None:
        self._cost = cost
        self._saved: dict[str, float] = {}
        self._after = ""

    def take(self, backlogs: Iterable[Backlog[T]], *, round_tokens: int) -> list[T]:
        """The operations of a round of so many tokens, out of their queues; at least one if there is any."""
        waiting = self._in_turn([backlog for backlog in backlogs if any(backlog.queues)])
        self._saved = {each.tenant: self._saved.get(each.tenant, 0.0) for each in waiting}
        taken: list[T] = []
        left = round_tokens
        quantum = round_tokens / max(1.0, sum(each.weight for each in waiting))
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
