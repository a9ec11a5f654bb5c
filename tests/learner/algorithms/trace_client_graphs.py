"""Traces losses with the real SDK, and writes what it would upload: `trace_client_graphs.py [FOLDER]`.

It needs `tinker` and torch, which need not be in the environment of the tests: they read what is committed. Each file
has the fields of the SDK's request, and for a datum the loss, its gradient and the metrics that the SDK computes.
"""

import importlib
import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

LENGTH, WIDTH = 12, 3
Made = tuple[Tensor, Mapping[str, Tensor]]


def squares(logprobs: Tensor, advantages: Tensor) -> Made:
    loss = (logprobs * advantages).pow(2).sum()
    return loss, {"custom/squares:sum": loss}


def weighted(logprobs: Tensor, weights: Tensor) -> Made:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/neg_ll:sum": loss, "custom/length:mean": weights.sum() / logprobs.shape[0]}


def clipped(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Made:
    ratio = torch.exp(logprobs - old)
    gain = torch.minimum(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages)
    far = torch.where((ratio - 1).abs() > 0.2, 1.0, 0.0)
    return -gain.sum(), {"custom/clipped:mean": far.mean(), "custom/ratio/max:mean": ratio.max().detach()}


def preference(logprobs: Tensor, weights: Tensor, reference: Tensor, beta: Tensor) -> Made:
    """A sigmoid of a masked sum, by functions of torch's insides."""
    margin = (logprobs * weights).sum() - reference.sum()
    loss = -functional.logsigmoid(beta * margin) + 0.1 * functional.softplus(-margin)
    return loss, {"custom/margin:mean": margin.detach()}


def masked(logprobs: Tensor, advantages: Tensor) -> Made:
    """A mask as an index, slices, fields of a result, sizes as numbers."""
    chosen = logprobs[advantages > 0]
    best = logprobs.max(dim=0).values + logprobs.topk(2)[0].sum() + logprobs[logprobs.argmax()]
    scale = math.log(logprobs.shape[0]) + logprobs.size(0)
    steps = torch.arange(logprobs.shape[0], device=logprobs.device, dtype=torch.float32)
    loss = chosen.mean() * scale + best - (logprobs[1:] - logprobs[:-1]).abs().sum() + (steps * logprobs).sum()
    loss += logprobs.to(torch.float64).float().logsumexp(0)
    return loss, {"custom/best:sum": best}


def distilled(logprobs: Tensor, target_distribution: Tensor) -> Made:
    """Targets [T, K]."""
    other = torch.log1p(-logprobs.exp().sum(dim=-1).clamp(max=0.999))
    loss = -(target_distribution * logprobs).sum() - 0.01 * other.sum() + torch.special.expm1(logprobs).mean()
    wide = logprobs[:, None, :].expand(-1, 2, -1).reshape(-1, logprobs.shape[1]).T
    return loss + 0.0 * wide.sum(), {"custom/kept:mean": torch.zeros_like(other).sum()}


def unbounded(logprobs: Tensor) -> Made:
    filled = logprobs.masked_fill(logprobs < -1.0, float("-inf"))
    loss = torch.logaddexp(filled, logprobs.new_zeros(logprobs.shape[0])).sum()
    return loss, {}


LOSSES: Mapping[Callable[..., Made], Mapping[str, int]] = {
    squares: {"logprobs": 1, "advantages": 1},
    weighted: {"logprobs": 1, "weights": 1},
    clipped: {"logprobs": 1, "old": 1, "advantages": 1},
    preference: {"logprobs": 1, "weights": 1, "reference": 1, "beta": 0},
    masked: {"logprobs": 1, "advantages": 1},
    distilled: {"logprobs": 2, "target_distribution": 2},
    unbounded: {"logprobs": 1},
}


def datum(ranks: Mapping[str, int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes: tuple[tuple[int, ...], ...] = ((), (LENGTH,), (LENGTH, WIDTH))
    drawn = {name: torch.randn(shapes[rank], generator=generator) for name, rank in ranks.items()}
    return drawn | {"logprobs": -drawn["logprobs"].exp() - 0.5 * ranks["logprobs"]}


def traced(loss: Callable[..., Made], ranks: Mapping[str, int]) -> dict[str, Any]:
    sdk = importlib.import_module("tinker.lib.public_interfaces.custom_loss")
    handle = sdk.trace_loss(loss, ranks, "session")
    inputs = datum(ranks)
    logprobs = inputs["logprobs"].requires_grad_()
    value, metrics = handle.graph(*inputs.values())
    (gradient,) = torch.autograd.grad(value, logprobs)
    return {
        "sdk": importlib.import_module("tinker").__version__,
        "name": handle.name,
        "inputs": [each.model_dump() for each in handle.inputs],
        "graph": sdk.encode_graph(handle).model_dump(),
        "datum": {name: each.detach().tolist() for name, each in inputs.items()},
        "loss": float(value.detach()),
        "gradient": gradient.tolist(),
        "metrics": {name: float(each.detach()) for name, each in metrics.items()},
    }


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "client_graphs"
    folder.mkdir(exist_ok=True)
    for loss, ranks in LOSSES.items():
        text = json.dumps(traced(loss, ranks), indent=None, separators=(", ", ": "))
        (folder / f"{loss.__name__}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
