"""From an algorithm's config to its preset."""

from __future__ import annotations

import importlib

from learner.algorithms.config import (
    AlgorithmConfig,
    BestOfKConfig,
    CispoConfig,
    CustomConfig,
    DapoConfig,
    DistillConfig,
    DpoConfig,
    DppoConfig,
    DrGrpoConfig,
    GdpoConfig,
    GigpoConfig,
    GmpoConfig,
    GrpoConfig,
    GspoConfig,
    KimiConfig,
    MaxRlConfig,
    OnlineDpoConfig,
    OpdConfig,
    PpoConfig,
    ReinforceConfig,
    ReinforcePpConfig,
    RlooConfig,
    RmConfig,
    SapoConfig,
    SftConfig,
    StreamedConfig,
    ToprConfig,
)
from learner.algorithms.presets import pairs, policy_gradient, weighted
from learner.algorithms.presets.preset import Preset
from services.process import WrongSettings
from services.user_code import in_a_sentence


class AlgorithmNotFound(WrongSettings, ValueError):
    """The algorithm of a user's own cannot be had from where the config says."""


def build_preset(config: AlgorithmConfig) -> Preset:
    """The preset that `config.type` names, with the knobs that `config` sets. Raises AlgorithmNotFound."""
    match config:
        case CustomConfig():
            return _custom(config)
        case SftConfig():
            return pairs.sft(config)
        case DistillConfig():
            return pairs.distill(config)
        case DpoConfig():
            return pairs.dpo(config)
        case RmConfig():
            return pairs.rm(config)
        case _:
            return _streamed(config)


def _streamed(config: StreamedConfig) -> Preset:
    match config:
        case GrpoConfig() | DrGrpoConfig() | DapoConfig() | MaxRlConfig():
            return policy_gradient.grpo(config)
        case GdpoConfig():
            return policy_gradient.gdpo(config)
        case ReinforcePpConfig():
            return policy_gradient.reinforce_pp(config)
        case PpoConfig():
            return policy_gradient.ppo(config)
        case GigpoConfig():
            return policy_gradient.gigpo(config)
        case OnlineDpoConfig():
            return pairs.online_dpo(config)
        case BestOfKConfig():
            return pairs.best_of_k(config)
        case GspoConfig() | GmpoConfig() | SapoConfig() | KimiConfig():
            return _to_proximal(config)
        case _:
            return _to_behavior(config)


def _to_proximal(config: GspoConfig | GmpoConfig | SapoConfig | KimiConfig) -> Preset:
    match config:
        case GspoConfig():
            return weighted.gspo(config)
        case GmpoConfig():
            return weighted.gmpo(config)
        case SapoConfig():
            return weighted.sapo(config)
        case KimiConfig():
            return weighted.kimi(config)


def _to_behavior(
    config: CispoConfig | ToprConfig | DppoConfig | ReinforceConfig | RlooConfig | OpdConfig,
) -> Preset:
    match config:
        case CispoConfig():
            return weighted.cispo(config)
        case ToprConfig():
            return weighted.topr(config)
        case DppoConfig():
            return weighted.dppo(config)
        case ReinforceConfig():
            return weighted.reinforce(config)
        case RlooConfig():
            return weighted.rloo(config)
        case OpdConfig():
            return weighted.opd(config)


def _custom(config: CustomConfig) -> Preset:
    module, _, name = config.path.partition(":")
    try:
        build = getattr(importlib.import_module(module), name)
        preset = build(**config.options)
    except Exception as error:
        raise AlgorithmNotFound(
            f"algo.path is {config.path!r} and algo.options {config.options}: {in_a_sentence(error)}; expected "
            "a function of these options, in a module that can be imported, that returns a Preset"
        ) from error
    if not isinstance(preset, Preset):
        raise AlgorithmNotFound(
            f"algo.path is {config.path!r}, which returned {type(preset).__name__}; expected a Preset of "
            "learner.algorithms.presets.preset"
        )
    return preset
