"""The learning rate as a plain function of the update's number."""

from __future__ import annotations

import math

from learner.training.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, *, update: int) -> float:
    """The learning rate of update number `update`, counted from 0.

    Rises linearly to the peak, which update `warmup_updates` is the first to use, then stays, or falls along a line or
    half a cosine to `final_fraction` of the peak at `total_updates`.
    """
    if update < config.warmup_updates:
        return config.learning_rate * (update + 1) / (config.warmup_updates + 1)
    if config.schedule == "constant":
        return config.learning_rate
    assert config.total_updates is not None, "validated by OptimizerConfig"
    span = max(config.total_updates - config.warmup_updates, 1)
    progress = min((update - config.warmup_updates) / span, 1.0)
    remaining = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.learning_rate * (config.final_fraction + (1.0 - config.final_fraction) * remaining)
