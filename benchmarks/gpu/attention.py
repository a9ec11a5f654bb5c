"""Attention of a packed row, forward and backward: rectangles against one call, of a layer of Qwen3's shape.

Both take the same row of 8192 tokens in bfloat16, in alternation; the median of each is told, and what they differ by.
A long sequence alone, which training leaves in its rectangle, is taken both ways here.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.gpu.rows import rehearses, say
from learner.training import varlen
from learner.training.attention import PackedIndex, build_packed_index, packed_attention

TOKENS, HEADS, SHARED, WIDTH = 8192, 16, 8, 128
ROUNDS, WARM = 12, 3
Taking = Callable[[Tensor, Tensor], varlen.VarlenKernel | None]


@dataclass(frozen=True)
class RowKind:
    """Lengths of a row's sequences, of which all but the first lack the first `prompt` tokens: those are shared."""

    about: str
    lengths: tuple[int, ...]
    prompt: int = 0

    @property
    def rows(self) -> tuple[list[NDArray[np.int64]], int]:
        """The tokens of each sequence, and how many there are in all."""
        rows, end = [], 0
        for place, length in enumerate(self.lengths):
            shared = self.prompt if place else 0
            rows.append(np.concatenate([np.arange(shared), np.arange(end, end + length - shared)]))
            end += length - shared
        return rows, end


KINDS = (
    RowKind("one of 8192", (8192,)),
    RowKind("lengths 512 to 3072", (512, 1024, 1536, 2048, 3072)),
    RowKind("64 of 128", (128,) * 64),
    RowKind("16 of 1472 with a prompt of 1024 in common", (1472,) * 16, prompt=1024),
    RowKind("32 of 320 to 1000 with a prompt of 256 in common", tuple(range(320, 1000, 21))[:32], prompt=256),
)


class _Layer(torch.nn.Module):
    """An attention's module, as far as it is looked at."""


def run(index: PackedIndex, inputs: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """The output and the gradients of query, key and value."""
    query, key, value = (tensor.detach().requires_grad_() for tensor in inputs)
    found, _ = packed_attention(_Layer(), query, key, value, None, packed_index=index)
    return [found.detach(), *torch.autograd.grad(found, (query, key, value), grad)]


def _timed(index: PackedIndex, inputs: Sequence[Tensor], grad: Tensor) -> tuple[float, list[Tensor]]:
    torch.cuda.synchronize()
    began = time.perf_counter()
    found = run(index, inputs, grad)
    torch.cuda.synchronize()
    return time.perf_counter() - began, found


def measure(kind: RowKind) -> bool:
    """Says the row's times; False if the two ways differ by more than rounding."""
    rows, tokens = kind.rows
    device, drawn = torch.device("cuda"), torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=drawn, device=device, dtype=torch.bfloat16)

    # As a projection leaves them: the heads of a token beside each other.
    inputs = [normal(1, tokens, heads, WIDTH).transpose(1, 2) for heads in (HEADS, SHARED, SHARED)]
    grad = normal(1, tokens, HEADS, WIDTH)
    index = build_packed_index(rows, tokens=tokens).to(device)
    ways: dict[str, Taking] = {"rectangles": lambda query, value: None, "one call": varlen.kernel_taking}
    found: dict[str, list[Tensor]] = {}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for place in range(ROUNDS + WARM):
        for name, way in ways.items():
            with patch.object(varlen, "kernel_taking", way), patch.object(varlen, "MANY_SCORES", TOKENS**2):
                seconds, found[name] = _timed(index, inputs, grad)
            if place >= WARM:
                times[name].append(seconds)
    one, other = found.values()
    gap = max(
        float((left.float() - right.float()).norm() / right.float().norm())
        for left, right in zip(one, other, strict=True)
    )
    slow, fast = (statistics.median(each) for each in times.values())
    say(
        f"attention of a layer, {tokens} tokens: {kind.about}",
        f"rectangles {slow * 1e3:.2f} ms, one call {fast * 1e3:.2f} ms: {slow / fast:.2f} times as fast; relative "
        f"difference {gap:.1e} at most",
    )
    return gap < 0.02


def main() -> int:
    """1 if the two ways differ."""
    if rehearses() or varlen.torch_kernel() is None:
        say("attention in one call", "needs CUDA, and a torch that has torch.nn.attention.varlen", "skipped")
        return 0
    right = [measure(kind) for kind in KINDS]
    return 0 if all(right) else 1


if __name__ == "__main__":
    raise SystemExit(main())
