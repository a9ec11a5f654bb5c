"""Gradient checkpointing: a layer's states are computed once more in the backward pass instead of being kept.

Kept is what goes into each layer, on its device or in host memory; and, if attention is not to be computed once more,
what its kernels give: they take most of the time of a long sequence, and give little.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

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
    settings: dict[str, Any] = {} if config.recompute_attention else {"context_fn": _keeping_attention}
    recomputed: Callable[..., Any] = partial(checkpoint, use_reentrant=False, **settings)
    function = partial(_on_host, recomputed) if config.offload_activations else recomputed
    for layer in model.modules():
        if hasattr(layer, "_gradient_checkpointing_func"):
            layer._gradient_checkpointing_func = function  # type: ignore[assignment]


def _on_host(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The function's result; what it saves of its arguments for the backward pass waits in host memory."""
    with save_on_cpu(pin_memory=torch.cuda.is_available()):
        return function(*arguments, **named)


def _keeping_attention() -> tuple[_KernelsKept, _KernelsGiven]:
    """Contexts of a layer's first pass and of those that compute it once more."""
    results: list[Any] = []
    return _KernelsKept(results), _KernelsGiven(results)


# Torch's own contexts of this kind count all operators, and find others where ZeRO-3 gathers weights in between.
class _KernelsKept(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what attention's kernels give."""

    def __init__(self, results: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if _is_kernel(func):
            self._results.append(tree_map_only(Tensor, Tensor.detach, found))
        return found


class _KernelsGiven(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives it again, in the same order, once; behind that the kernels compute."""

    def __init__(self, results: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results
        self._next = 0

    def __enter__(self) -> Any:
        self._next = 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_kernel(func):
            number, self._next = self._next, self._next + 1
            kept, self._results[number] = self._results[number], None
            if kept is not None:
                return kept
        return func(*args, **(kwargs or {}))


def _is_kernel(operator: Any) -> bool:
    return operator.name().partition(".")[0] in _KERNELS
