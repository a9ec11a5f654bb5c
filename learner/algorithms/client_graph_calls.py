"""Functions, methods and attributes that a client's loss graph may use: tables of what computes and does nothing else.

Left out are all that read or write files, load code, show memory, run a function that they are given, draw at random
(a replay would differ), hand a tensor's elements to Python, or make a tensor whose size no other check sees. Functions
have the names that torch.fx gives them, of which some are of torch's insides.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Value = object
"""A tensor, number, text, None, type, device, slice, ellipsis, or a tuple, list or dict of these."""
ATTRIBUTES = frozenset({"shape", "dtype", "device", "ndim", "T", "mT"})
"""Attributes of tensors."""
FIELDS = frozenset({"values", "indices"})
"""Attributes of what `max` and its like give."""
PRODUCTS = frozenset({"dot", "mv", "mm", "bmm", "matmul", "imatmul"})
"""Calls that multiply more often than they read or write."""
SORTS = frozenset({"sort", "argsort", "topk", "kthvalue", "median", "quantile"})
"""Calls that read each element several times."""
FACTORIES = frozenset({"zeros", "ones", "full", "arange", "linspace"})
"""Functions that have no tensor to take a device from."""
_MAX_NUMBER = 2**63
_MAX_EXPONENT = 64


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_POINTWISE = _words(
    "abs absolute add sub subtract mul multiply div divide true_divide floor_divide remainder fmod neg negative pow "
    "square sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p logaddexp logaddexp2 xlogy sigmoid tanh sin cos "
    "tan sinh cosh asinh acosh atanh atan atan2 asin acos erf erfc relu floor ceil round trunc frac sign sgn clamp "
    "clip clamp_min clamp_max maximum minimum fmax fmin eq ne gt ge lt le logical_and logical_or logical_not "
    "logical_xor isnan isinf isfinite nan_to_num where lerp addcmul addcdiv heaviside hypot softmax log_softmax "
    "masked_fill detach clone"
)
_REDUCTIONS = _words(
    "sum mean prod std var max min amax amin aminmax argmax argmin any all norm logsumexp cumsum cumprod cummax cummin "
    "logcumsumexp median nanmean nansum quantile sort argsort topk kthvalue count_nonzero dist dot mv mm bmm matmul"
)
_SHAPES = _words(
    "reshape flatten unflatten squeeze unsqueeze transpose permute t movedim narrow select gather "
    "take_along_dim index_select masked_select flip roll tril triu diag broadcast_to tile numel"
)
_OF_TORCH_ALONE = _words("cat concat stack zeros_like ones_like full_like std_mean var_mean")
_OF_TENSORS_ALONE = _words(
    "float double half bfloat16 long int bool to type_as contiguous cpu view view_as reshape_as expand expand_as "
    "repeat size dim ndimension new_zeros new_ones new_full"
)
_FUNCTIONAL = _words(
    "softplus logsigmoid log_sigmoid relu relu6 leaky_relu elu selu celu gelu silu mish hardtanh hardsigmoid "
    "hardswish tanhshrink softsign softmax log_softmax softmin mse_loss l1_loss smooth_l1_loss huber_loss kl_div "
    "binary_cross_entropy binary_cross_entropy_with_logits nll_loss cross_entropy poisson_nll_loss gaussian_nll_loss "
    "hinge_embedding_loss margin_ranking_loss soft_margin_loss normalize cosine_similarity"
)
_SPECIAL = _words("expm1 exp2 log1p logit expit erf erfc erfinv xlogy xlog1py entr log_ndtr ndtr log_softmax logsumexp")
_OPERATORS = _words("add sub mul truediv floordiv mod pow neg pos abs matmul eq ne lt le gt ge and_ or_ xor invert")
# What changes a tensor in place in Python makes a new one here, which has the same value.
_IN_PLACE = _words("add sub mul truediv floordiv mod pow matmul")
_MATH = _words("exp expm1 log log1p log2 log10 sqrt pow floor ceil fabs tanh erf isnan isinf isfinite sin cos")
_METHODS = frozenset((*_POINTWISE, *_REDUCTIONS, *_SHAPES, *_OF_TENSORS_ALONE))


@dataclass(frozen=True)
class TensorMethod:
    """A method of tensors, called on its first argument."""

    name: str

    def __call__(self, *args: Value, **kwargs: Value) -> Value:
        if not args or not isinstance(args[0], Tensor):
            raise TypeError(f"{self.name} is called on {described(args[0]) if args else 'nothing'}: expected a tensor")
        if self.name == "to":
            return _converted(args[0], [*args[1:], *kwargs.values()])
        if self.name == "where":
            return _chosen(args[1] if len(args) > 1 else None, args[0], *args[2:], **kwargs)
        if self.name == "cpu":
            return args[0]
        result: Value = getattr(args[0], self.name)(*args[1:], **kwargs)
        return result


def method(name: str) -> Callable[..., Value] | None:
    """The method of tensors with this name; None for one that is not allowed."""
    return TensorMethod(name) if name in _METHODS else None


def function(target: str) -> Callable[..., Value] | None:
    """The function that torch.fx calls `target`; None for one that is not allowed."""
    return _FUNCTIONS.get(target)


def described(value: Value) -> str:
    """A value as a message says it."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return f"{type(value).__name__} {str(value)[:40]}"


def _converted(tensor: Tensor, others: Sequence[Value]) -> Tensor:
    """`tensor` in the type that is among `others`; its device is not the client's to choose."""
    for each in others:
        if isinstance(each, torch.dtype | Tensor):
            return tensor.to(each if isinstance(each, torch.dtype) else each.dtype)
    return tensor


def attribute(value: Value, name: str) -> Value:
    """An attribute of a tensor, or of what `max` and its like give. Raises TypeError for any other."""
    of_pair = type(value).__module__ == "torch.return_types"
    if name not in (ATTRIBUTES if isinstance(value, Tensor) else FIELDS if of_pair else ()):
        raise TypeError(f"{described(value)} has no attribute {name!r} that is allowed")
    result: Value = getattr(value, name)
    return result


def _item(container: Value, index: Value) -> Value:
    if isinstance(container, Tensor):
        return container[index]  # type: ignore[index]  # torch refuses what is no index
    if not isinstance(container, tuple | list) or not isinstance(index, int | slice):
        raise TypeError(f"{described(container)} cannot be indexed by {described(index)}")
    item: Value = container[index]
    return item


def _chosen(condition: Value, *branches: Value, **kwargs: Value) -> Value:
    # With a condition alone it would give places, as many as there are.
    if len(branches) != 2 or kwargs or not isinstance(condition, Tensor):
        raise TypeError("where takes a condition and two values")
    return torch.where(condition, *branches)  # type: ignore[call-overload]


def _of_numbers(compute: Callable[..., Value], *args: Value) -> Value:
    """`compute` of numbers alone, if the result has a usual size: Python's own have none."""
    other = next((each for each in args if not isinstance(each, int | float)), None)
    if other is not None or not args:
        raise TypeError(f"{described(other)} is no number and no tensor")
    if compute is operator.pow and not all(abs(float(each)) <= _MAX_EXPONENT for each in args[1:]):  # type: ignore[arg-type]
        raise OverflowError(f"the exponent is beyond {_MAX_EXPONENT}")
    result = compute(*args)
    if isinstance(result, complex) or (isinstance(result, int) and abs(result) > _MAX_NUMBER):
        raise OverflowError("the result is complex, or beyond 64 bits")
    return result


def _operator(name: str) -> Callable[..., Value]:
    compute: Callable[..., Value] = getattr(operator, name)

    def apply(*args: Value) -> Value:
        # Python's own operators would repeat a list, or format a text, as often as a tensor says.
        other = next((each for each in args if not isinstance(each, Tensor | int | float)), None)
        if other is not None or not any(isinstance(each, Tensor) for each in args):
            return _of_numbers(compute, *args)
        return compute(*args)

    return apply


def _of_math(name: str) -> Callable[..., Value]:
    compute: Callable[..., Value] = getattr(math, name)

    def apply(*args: Value) -> Value:
        return _of_numbers(compute, *args)

    return apply


def _of_torch() -> Iterator[tuple[str, Callable[..., Value]]]:
    for name in (*_POINTWISE, *_REDUCTIONS, *_SHAPES, *_OF_TORCH_ALONE, *FACTORIES):
        if hasattr(torch, name):
            yield f"torch.{name}", getattr(torch, name)
    for name in _FUNCTIONAL:
        for prefix, module in (("torch.nn.functional", torch.nn.functional), ("torch._C._nn", torch._C._nn)):
            if hasattr(module, name):
                yield f"{prefix}.{name}", getattr(module, name)
    for name in _SPECIAL:
        yield f"torch.special.{name}", getattr(torch.special, name)
        yield f"torch._C._special.special_{name}", getattr(torch.special, name)


def _functions() -> dict[str, Callable[..., Value]]:
    """The functions that a graph may call, by each of the names that torch.fx gives them."""
    found: dict[str, Callable[..., Value]] = dict(_of_torch())
    found |= {f"operator.{name}": _operator(name) for name in _OPERATORS}
    found |= {f"operator.i{name}": _operator(name) for name in _IN_PLACE}
    found |= {f"math.{name}": _of_math(name) for name in _MATH}
    return found | {"operator.getitem": _item, "torch.where": _chosen}


_FUNCTIONS: Mapping[str, Callable[..., Value]] = _functions()
