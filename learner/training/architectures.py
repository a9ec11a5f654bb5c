"""Refusal, when a model is loaded, of architectures that a packed row would compute wrongly."""

from pathlib import Path

import torch
from transformers import AutoConfig

# Numbers of a config that change logits after the output matrix, and the values that do not.
_OF_LOGITS = {
    "final_logit_softcapping": None,
    "logits_scaling": 1,
    "logit_scale": 1,
    "lm_head_multiplier": 1,
    "logits_soft_cap": None,
    "output_logit_soft_cap": None,
}
_OF_LAYERS = ("layer_types", "layers_block_type", "block_types")
_PACKABLE = frozenset({"full_attention", "sliding_attention"})


def check_packable(path: Path) -> None:
    """Raises ValueError for a model whose config says that packed rows, or its logits, would come out wrong."""
    config = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config(decoder=True)
    for name, neutral in _OF_LOGITS.items():
        value = getattr(config, name, None)
        if value is not None and value != neutral:
            raise ValueError(
                f"{path}: its config has {name} = {value}, and logits that are not the output matrix times the hidden "
                f"states alone are not supported: expected a model without {name}. Name another model."
            )
    kinds = {kind for name in _OF_LAYERS for kind in getattr(config, name, None) or ()}
    for kind in sorted(kinds - _PACKABLE):
        raise ValueError(
            f"{path}: its config has layers of the kind {kind}, which would mix the sequences of a packed row: "
            f"expected {' or '.join(sorted(_PACKABLE))} alone. Name another model."
        )
    mamba = sorted(name for name in config.to_dict() if name.startswith("mamba_"))
    if mamba and not kinds:
        raise ValueError(
            f"{path}: its config has {mamba[0]}, and layers with a recurrent state would mix the sequences of a packed "
            "row: expected layers of attention alone. Name another model."
        )
    if config.model_type == "phimoe" or getattr(config, "router_jitter_noise", None):
        noise = getattr(config, "router_jitter_noise", None)
        raise ValueError(
            f"{path}: its config has model_type {config.model_type} and router_jitter_noise = {noise}: its router "
            "draws at random while it is trained, so tokens would be trained with other experts than sampled them: "
            "expected a router without noise. Name another model."
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise ValueError(
            f"{path}: its config has use_bidirectional_attention: expected causal attention. Name another model."
        )


def check_modules(path: Path, model: torch.nn.Module) -> None:
    """Raises ValueError for a model that mixes tokens elsewhere than in attention that transformers lets replace."""
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(
            f"{path}: {type(model).__name__} computes attention itself, which would mix the sequences of a packed row: "
            "expected a model whose attention transformers lets replace, such as Llama. Name another model."
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Conv1d):
            raise ValueError(
                f"{path}: {type(model).__name__} has a convolution over tokens, {name}, which would mix the sequences "
                "of a packed row: expected layers of attention alone. Name another model."
            )
