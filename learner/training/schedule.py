"""The learning rate as a plain function of the update's number."""

from __future__ import annotations

import math

from learner.training.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, *, update: int) -> float:
    """The learning rate of update number `update`, counted from 0.

    Rises linearly to the peak, which update `warmup_updates` is the first to use. Then, with w the warm-up and t the
    total:

    - `constant` stays.
    - `linear` and `cosine` fall along a line or half a cosine to `final_fraction` of the peak at t.
    - `inverse_sqrt` falls as sqrt((w + 1) / (update + 1)) (arXiv 1706.03762).
    - `wsd` stays, and falls along a line to `final_fraction` over the last `decay_updates` (arXiv 2404.06395).
    """
    if update < config.warmup_updates:
        return config.learning_rate * (update + 1) / (config.warmup_updates + 1)
    if config.schedule == "constant":
        return config.learning_rate
    if config.schedule == "inverse_sqrt":
        return config.learning_rate * math.sqrt((config.warmup_updates + 1) / (update + 1))
    remaining = 1.0 - _fallen(config, update=update)
    if config.schedule == "cosine":
        remaining = 0.5 * (1.0 - math.cos(math.pi * remaining))
    return config.learning_rate * (config.final_fraction + (1.0 - config.final_fraction) * remaining)


def _fallen(config: OptimizerConfig, *, update: int) -> float:
    """How far the fall is done, from 0 to 1."""
    assert config.total_updates is not None, "validated by OptimizerConfig"
    span = config.decay_updates or max(config.total_updates - config.warmup_updates, 1)
    return min(max((update - config.total_updates + span) / span, 0.0), 1.0)
