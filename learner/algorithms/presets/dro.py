"""DRO: a squared pull towards who sampled, in place of a ratio."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from learner.algorithms.algorithm import GroupAlgorithm

if TYPE_CHECKING:
    from learner.algorithms.preset import Preset


class DroConfig(GroupAlgorithm):
    """Log p, weighted by the advantage, and a squared pull towards the logprobs of the behavior policy; without
    importance weights, whatever policies sampled.

    Source: direct reward optimization, arXiv 2405.19107, which squares the sum over a trajectory, and learns the
    baseline; here each token is squared, as the hosted service's loss of this name has it, and the group is compared.
    """

    type: Literal["dro"] = "dro"
    beta: float = Field(
        0.05,
        gt=0,
        description="Weight of the squared gap to the behavior policy's logprobs: a token stops at advantage / beta "
        "nats above them.",
    )

    def preset(self) -> Preset:
        """Group advantages, log p, and a squared pull towards who sampled."""
        from learner.algorithms.policy_gradient import of_group, to_behavior
        from learner.algorithms.policy_loss import dro

        return of_group(self, to_behavior(partial(dro, beta=self.beta)), to_behavior=True, pulls=True)
