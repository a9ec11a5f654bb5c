"""The test of generators in a run: the trainer's thread tells it each step, others read what it has found."""

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from learner.trust.evidence import Suspicion, TrustTest
from learner.trust.tokens import Place, StepTokens, step_tokens
from protocol.trajectories import TrajectoryGroup

logger = logging.getLogger(__name__)


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
        self._failed = False
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
        """Takes a step, as `step_tokens` does. Returns the suspicions that are new. A test that fails is said once, and
        no step is tested after it.
        """
        if self._failed:
            return []
        try:
            return self._found(step_tokens(groups, places, ours=ours, entropies=entropies, version=version))
        except Exception as error:  # noqa: BLE001 - no run ends of being watched
            self._failed = True
            logger.warning(
                "generators are not tested any more, since the test of step %d failed: %s: %s",
                version + 1,
                type(error).__name__,
                error,
            )
            return []

    def _found(self, tokens: StepTokens) -> list[Suspicion]:
        found = self._test.observe(tokens)
        self.notes = tuple(one.text for one in self._test.suspicions())
        self._measured(self._test.evidence())
        return found
