"""Best of k: the likelihood of a group's best."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from learner.algorithms.algorithm import Algorithm
from learner.algorithms.knobs import AggregationKnobs

if TYPE_CHECKING:
    from learner.algorithms.preset import Preset


class BestOfKConfig(Algorithm, AggregationKnobs):
    """Likelihood of the best of each group, if it is better than another: uncorrected for stale tokens.

    Groups of equal rewards, failed ones among them, are left out. Source: RAFT (arXiv 2304.06767).
    """

    wants_spread: ClassVar[bool] = True
    type: Literal["best_of_k"] = "best_of_k"

    def preset(self) -> Preset:
        """The likelihood of the best trajectory of each group with spread."""
        from learner.algorithms.likelihood import likelihood, weights
        from learner.algorithms.pairs import best
        from learner.algorithms.preset import Preset

        return Preset(name=self.type, loss=likelihood, weights=weights(self), select=best, samples_policy=True)
