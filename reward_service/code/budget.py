"""The time that the cases of one item have, together."""

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager

from reward_service.verifier import InfrastructureError


class Budget:
    """Seconds for one case and for all. `deadline` is the item's, on the event loop's clock.

    The solution's time is charged only while a case runs, so that a busy service takes nothing from it.
    """

    def __init__(self, *, case_s: float, total_s: float, deadline: float) -> None:
        self._case_s = case_s
        self._left_s = total_s
        self.deadline = deadline

    def next_s(self) -> float:
        """Seconds that the next case has; 0 if there is none left."""
        return max(0.0, min(self._case_s, self._left_s))

    @property
    def left_s(self) -> float:
        """Seconds that all remaining cases have together."""
        return max(0.0, self._left_s)

    def charge(self, seconds: float) -> None:
        """A case has taken that long."""
        self._left_s -= seconds

    @contextmanager
    def case(self) -> Iterator[float]:
        """Charges the time within, and gives the case's deadline.

        Raises InfrastructureError instead of TimeoutError where it was the item's deadline that came first.
        """
        clock = asyncio.get_running_loop().time
        started = clock()
        own = started + self.next_s()
        try:
            yield min(own, self.deadline)
        except TimeoutError:
            if own > self.deadline:
                raise late() from None
            raise
        finally:
            self.charge(clock() - started)


def late() -> InfrastructureError:
    """The item's deadline has come."""
    return InfrastructureError("deadline: the tests took longer than the item had; raise deadline_s")


def whole_seconds(seconds: float) -> float:
    """At least 1: a limit on CPU time is in whole seconds."""
    return float(max(1, math.ceil(seconds)))
