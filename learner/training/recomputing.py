"""Gradient checkpointing: a layer's states are computed once more in the backward pass instead of being kept.

Kept is what goes into each layer, on its device or in host memory; and, if attention is not to be computed once more,
what its kernels give: they take most of the time of a long sequence, and give little.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from learner.training.config import TrainingConfig

_KERNELS = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "torch_attn::_varlen_attn",
)
"""Operators that give what attention makes of a row, and no score of it. Attention that is written out has none."""


def recompute_layers(model: nn.Module, config: TrainingConfig) -> None:
    """Has a model of transformers compute its layers once more in the backward pass, if `config` wants it."""
    if not config.gradient_checkpointing:
        return
    enable: Any = model.gradient_checkpointing_enable
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    settings = {} if config.recompute_attention else {"context_fn": _keeping_attention}
    recomputed: Callable[..., Any] = partial(checkpoint, use_reentrant=False, **settings)
    function = partial(_on_host, recomputed) if config.offload_activations else recomputed
    for layer in model.modules():
        if hasattr(layer, "_gradient_checkpointing_func"):
            layer._gradient_checkpointing_func = function  # type: ignore[assignment]


def _on_host(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The function's result; what it saves of its arguments for the backward pass waits in host memory."""
    with save_on_cpu(pin_memory=torch.cuda.is_available()):
        return function(*arguments, **named)


def _keeping_attention() -> Any:
    return create_selective_checkpoint_contexts(_kept)


def _kept(_: SelectiveCheckpointContext, operator: Any, *__: object, **___: object) -> CheckpointPolicy:
    kept = operator.name().partition(".")[0] in _KERNELS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
