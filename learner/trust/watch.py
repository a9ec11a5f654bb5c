"""The test of generators in a run: the trainer's thread tells it each step, others read what it has found."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from learner.trust.evidence import Suspicion, TrustTest
from learner.trust.tokens import Place, step_tokens
from protocol.trajectories import TrajectoryGroup


class TrustWatch:
    """`measured` is told the evidence by generator after each step, in the thread that calls `step`; `suspected` each
    new suspicion, by that thread's owner and in the thread that owns the fleet.
    """

    def __init__(
        self,
        test: TrustTest,
        *,
        measured: Callable[[Mapping[str, float]], None],
        suspected: Callable[[Suspicion], None],
    ) -> None:
        self._test = test
        self._measured = measured
        self.suspected = suspected
        self.notes: tuple[str, ...] = ()
        """The generators that are not believed, in words. Any thread may read."""

    def step(
        self,
        groups: Sequence[TrajectoryGroup],
        places: Sequence[Place],
        *,
        ours: NDArray[np.float32],
        entropies: NDArray[np.float32],
        version: int,
    ) -> list[Suspicion]:
        """Takes a step, as `step_tokens` does. Returns the suspicions that are new."""
        found = self._test.observe(step_tokens(groups, places, ours=ours, entropies=entropies, version=version))
        if found:
            self.notes = tuple(one.text for one in self._test.suspicions())
        self._measured(self._test.evidence())
        return found
