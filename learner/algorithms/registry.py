"""From an algorithm's config to its preset."""

from __future__ import annotations

from learner.algorithms.config import AlgorithmConfig, GrpoConfig
from learner.algorithms.grpo import grpo
from learner.algorithms.preset import Preset
from learner.algorithms.sft import sft


def build_preset(config: AlgorithmConfig) -> Preset:
    """The preset that `config.type` names, with the knobs that `config` sets."""
    if isinstance(config, GrpoConfig):
        return grpo(config)
    return sft(config)
