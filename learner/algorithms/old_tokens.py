"""The bound under which tokens are trained that are older than all others may be. Loads no torch."""

from dataclasses import dataclass

LEFT_OUT_OF_OLD = "second_moment_left_out"
"""Name of a step's metric: number of its tokens that this bound takes out of the loss."""


@dataclass(frozen=True, slots=True)
class OldTokenBound:
    """Of the tokens of a step that lag more than `max_lag` versions as many are trained as have a mean of (log of the
    policy's probability over that of the policy that sampled it)^2 of at most `second_moment_limit`; those that are
    farthest leave the loss. The policy is that at the step's start.

    Source: M2PO (arXiv 2510.01161), for these tokens by themselves: among younger ones their mean would be hidden.
    """

    max_lag: int
    second_moment_limit: float
