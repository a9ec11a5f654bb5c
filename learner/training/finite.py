"""Tells whether tensors hold nothing but finite numbers."""

import torch
from torch import Tensor

_HAVE_EXTREMES = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})


def all_finite(tensor: Tensor) -> bool:
    """True if no element is NaN or infinite, as of an empty tensor."""
    tensor = tensor.detach()
    if not tensor.numel():
        return True
    if tensor.dtype in _HAVE_EXTREMES:
        # One pass that makes no tensor of this size, unlike isfinite. NaN is both extremes.
        return all(bool(extreme.isfinite()) for extreme in torch.aminmax(tensor))
    # Torch has neither for most kinds of 8 bits; float32 holds all of their values.
    floats = tensor.float() if tensor.is_floating_point() else tensor
    return bool(floats.isfinite().all())
