"""Advantages from the rewards of one group. [G] is the group's size."""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithms.config import AdvantageScale

EPSILON = 1e-6


def group(*, rewards: Tensor, scale: AdvantageScale) -> Tensor:
    """(R - mean) / (d + 1e-6), with d the unbiased standard deviation, the mean, or nothing.

    `rewards` is [G]; so is the result. A group without spread, or of one, has advantages of exactly 0. With `scale =
    "mean"` a group whose mean reward is not positive has advantages of 0: dividing by it would turn signs around.
    Sources: arXiv 2402.03300 (std), 2503.20783 (none).
    """
    # A group of equal rewards can have a mean that differs from them by rounding; its advantages are 0 all the same.
    if rewards.numel() < 2 or bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)
    centred = rewards - rewards.mean()
    if scale == "none":
        return centred
    if scale == "std":
        return centred / (rewards.std(correction=1) + EPSILON)
    mean = rewards.mean()
    return centred / (mean + EPSILON) if mean > 0 else torch.zeros_like(rewards)
