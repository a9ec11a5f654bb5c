"""Refusal, when a model is loaded, of what cannot be trained as it is sampled; and why one takes no packed rows."""

from __future__ import annotations

import dis
import inspect
import logging
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from learner.training.unfit_model import UnfitModel

logger = logging.getLogger(__name__)

OWN_ATTENTION = "attention that transformers does not let replace"

# Numbers of a config that change logits in ways that no rule here knows, and the values that do not.
_OF_LOGITS = {"logits_soft_cap": None, "output_logit_soft_cap": None}
_OF_LAYERS = ("layer_types", "layers_block_type", "block_types")
_PACKABLE = frozenset({"full_attention", "sliding_attention", "attention"})
# Ropes whose angles depend on the longest sequence of a call, beyond the length that they name.
_CHANGING_ROPES = frozenset({"longrope", "dynamic"})


def check_trainable(path: Path) -> None:
    """Raises UnfitModel for a model whose config says that it cannot be trained as it is sampled."""
    config = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config(decoder=True)
    for name, neutral in _OF_LOGITS.items():
        value = getattr(config, name, None)
        if value is not None and value != neutral:
            raise UnfitModel(
                f"{path}: its config has {name} = {value}, and logits that this changes are not supported: expected a "
                f"model without {name}. Name another model."
            )
    if config.model_type == "phimoe" or getattr(config, "router_jitter_noise", None):
        noise = getattr(config, "router_jitter_noise", None)
        raise UnfitModel(
            f"{path}: its config has model_type {config.model_type} and router_jitter_noise = {noise}: its router "
            "draws at random while it is trained, so tokens would be trained with other experts than sampled them: "
            "expected a router without noise. Name another model."
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise UnfitModel(
            f"{path}: its config has use_bidirectional_attention: expected causal attention. Name another model."
        )
    _check_rope(path, config)


def _check_rope(path: Path, config: PreTrainedConfig) -> None:
    given = getattr(config, "rope_parameters", None) or {}
    ropes = [given, *(value for value in given.values() if isinstance(value, dict))]
    longest = getattr(config, "max_position_embeddings", None) or 0
    for rope in ropes:
        kind = rope.get("rope_type", rope.get("type"))
        # A "dynamic" rope changes beyond max_position_embeddings itself, unless it names another length.
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if kind in _CHANGING_ROPES and (original is None or longest > original):
            raise UnfitModel(
                f"{path}: its config has rope_type {kind}, whose angles change for all tokens of a call as one "
                f"sequence is longer than {original or longest} tokens, in the learner otherwise than in vLLM: "
                "expected max_position_embeddings of at most original_max_position_embeddings. Shorten "
                "max_position_embeddings in its config.json, with the attention_factor that it had, or name another "
                "model."
            )


def why_not_packed(path: Path) -> str | None:
    """The reason, of its config, why the model in `path` cannot take a packed row; None if there is none."""
    config = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config(decoder=True)
    kinds = {kind for name in _OF_LAYERS for kind in getattr(config, name, None) or ()}
    foreign = sorted(kinds - _PACKABLE)
    if foreign:
        return f"layers of the kind {foreign[0]}"
    mamba = sorted(name for name in config.to_dict() if name.startswith("mamba_"))
    return f"{mamba[0]}, so layers with a recurrent state" if mamba and not kinds else None


def why_modules_are_not_packed(model: torch.nn.Module) -> str | None:
    """The reason, of its modules, why this model cannot take a packed row; None if there is none."""
    if not getattr(model, "_supports_attention_backend", False):
        return OWN_ATTENTION
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Conv1d):
            return f"a convolution over tokens, {name}"
        if isinstance(module, GradientCheckpointingLayer) and not _hands_on(type(module)):
            return f"layers that hand on nothing that attention is told, as {name}"
    return None


def _hands_on(kind: type[torch.nn.Module]) -> bool:
    """False if a layer's code drops the arguments that it does not name, in which attention finds its row."""
    code = inspect.unwrap(kind.forward).__code__
    if not code.co_flags & inspect.CO_VARKEYWORDS:
        return False
    others = code.co_varnames[code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)]
    named = (each.argval for each in dis.get_instructions(code))
    return any(others in name if isinstance(name, tuple) else name == others for name in named)


def say_unpacked(path: Path, model: torch.nn.Module, reason: str) -> None:
    """Says in the log what the model's training costs."""
    logger.warning(
        "%s: %s has %s, and takes no packed rows: its sequences are padded to rectangles, and a prompt that they share "
        "is computed for each, which is slower",
        path,
        type(model).__name__,
        reason,
    )
