"""Consecutive gradients: how far an update's gradient points where the one before it did, and the control of that.

    c = <g, p> / (|g| |p|)      g: the gradient of this update, over all ranks, before it is clipped
                                p: that of the update before, as it was computed
    c <= project_above          g is applied as it is
    c <= skip_above             g - f p is applied, whose cosine to p is project_above
    c >  skip_above             nothing is applied

Gradient Alignment Control (GAC, arXiv 2603.01501): where tokens are old, consecutive gradients stay aligned, and their
sum overshoots. The two thresholds, what is taken of the parallel part and the bound on skips are Headway's own.

The next update compares with g itself, whatever became of it. A gradient that is not finite, or 0, has no direction: it
has no cosine, and p stays.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from learner.training.config import AlignmentConfig
from learner.training.deferred import DeferredFiles
from learner.training.ranks import summed_over_ranks

logger = logging.getLogger(__name__)

_ZERO = torch.zeros((), dtype=torch.float64)
_CHUNK = 1 << 20
"""Numbers that are multiplied and added up in float32; such sums are added up in float64."""


@dataclass(frozen=True, slots=True)
class Products:
    """Dot products over all weights: |g|^2, |p|^2 and <g, p>."""

    own: float
    former: float
    cross: float

    @property
    def cosine(self) -> float | None:
        """Cosine of g and p; None where one of them has no direction."""
        length = math.sqrt(self.own) * math.sqrt(self.former)
        return min(max(self.cross / length, -1.0), 1.0) if length > 0 and math.isfinite(length) else None

    def factor_to(self, cosine: float) -> float:
        """The f for which g - f p has this cosine to p, in 0..1 without 1: the part orthogonal to p stays."""
        orthogonal = math.sqrt(max(self.own - self.cross * self.cross / self.former, 0.0))
        kept = orthogonal * cosine / math.sqrt(1.0 - cosine * cosine)
        return self.cross / self.former - kept / math.sqrt(self.former)


@dataclass(frozen=True, slots=True)
class AlignmentJudgement:
    """The decision on an update. `norm` is |g|; `factor` the f of what is taken off, 0 where nothing is."""

    norm: float
    cosine: float | None = None
    action: Literal["keep", "project", "skip"] = "keep"
    factor: float = 0.0


def judged(products: Products, config: AlignmentConfig, *, skips_in_row: int) -> AlignmentJudgement:
    """The decision, after `skips_in_row` updates that were skipped one after the other."""
    norm, cosine = math.sqrt(products.own), products.cosine
    if config.mode != "control" or cosine is None or cosine <= config.project_above:
        return AlignmentJudgement(norm, cosine)
    if cosine > config.skip_above and skips_in_row < config.max_skips_in_row:
        return AlignmentJudgement(norm, cosine, "skip")
    return AlignmentJudgement(norm, cosine, "project", products.factor_to(config.project_above))


@dataclass(frozen=True, slots=True)
class AlignmentReading:
    """Updates of a step: the mean of their cosines, None without any, and the shares of them that were projected and
    skipped, None where nothing is controlled.
    """

    cosine: float | None = None
    projected_share: float | None = None
    skipped_share: float | None = None


class GradientAlignment:
    """Follows the gradients of one engine; it keeps a copy of the former one, of this rank's part if these are parts.

    Every rank must call `examine` at the same time, and comes to the same decision.
    """

    def __init__(self, config: AlignmentConfig, *, parts: bool) -> None:
        """`parts`: each rank has a part of the gradient; otherwise each has all of it."""
        self._config = config
        self._parts = parts
        self._former: list[Tensor] = []
        self._former_square = 0.0
        self._skips_in_row = 0
        self._judgements: list[AlignmentJudgement] = []

    def examine(self, gradients: Sequence[Tensor]) -> AlignmentJudgement:
        """Judges the gradient, which is float32, projects it in place if so decided, and remembers it as it was."""
        products = self._products(gradients)
        found = AlignmentJudgement(math.sqrt(products.own) if products.own >= 0 else math.nan)
        if math.isfinite(products.own) and products.own > 0:
            found = judged(products, self._config, skips_in_row=self._skips_in_row)
            self._remember(gradients, factor=found.factor)
            self._former_square = products.own
            self._skips_in_row = self._skips_in_row + 1 if found.action == "skip" else 0
        self._judgements.append(found)
        return found

    def _products(self, gradients: Sequence[Tensor]) -> Products:
        """Of all ranks. Those that have all of a gradient take the mean, so that rounding parts no decisions."""
        known = [one.shape for one in self._former] == [one.shape for one in gradients]
        own = sum((dot(one, one) for one in gradients), start=_ZERO)
        pairs = zip(gradients, self._former, strict=True) if known else ()
        cross = sum((dot(one, two) for one, two in pairs), start=_ZERO)
        ranks = torch.distributed.get_world_size()
        sums = summed_over_ranks(torch.stack([own.cpu(), cross.cpu(), _ZERO + known]))
        if sums[2] < ranks:
            if self._former:
                _say_begun_anew("the gradient before it, of a checkpoint, is cut otherwise")
            self._forget()
        own_square, product = (sums[:2] if self._parts else sums[:2] / ranks).tolist()
        return Products(own_square, self._former_square, product)

    @torch.no_grad()
    def _remember(self, gradients: Sequence[Tensor], *, factor: float) -> None:
        if not self._former:
            self._former = [gradient.clone(memory_format=torch.contiguous_format) for gradient in gradients]
            return
        for gradient, former in zip(gradients, self._former, strict=True):
            if not factor:
                former.copy_(gradient)
                continue
            raw = gradient.clone()  # of one tensor after the other: there is no room for another copy of all
            gradient.add_(former, alpha=-factor)
            former.copy_(raw)

    def _forget(self) -> None:
        self._former, self._former_square, self._skips_in_row = [], 0.0, 0

    def taken(self) -> AlignmentReading:
        """The reading of the updates since it was last taken."""
        found, self._judgements = self._judgements, []
        cosines = [one.cosine for one in found if one.cosine is not None]
        controls = self._config.mode == "control" and bool(found)

        def share(action: str) -> float | None:
            return sum(one.action == action for one in found) / len(found) if controls else None

        mean = sum(cosines) / len(cosines) if cosines else None
        return AlignmentReading(mean, share("project"), share("skip"))

    def save(self, directory: Path, *, rank: int, later: DeferredFiles | None = None) -> None:
        """Writes the former gradient, if there is one, at once or `later`: of whole ones rank 0 alone."""
        if not self._former or (rank and not self._parts):
            return
        state = {"cut": self._cut, "square": self._former_square, "skips_in_row": self._skips_in_row}
        contents = {str(number): former for number, former in enumerate(self._former)}
        path, notes = _file(directory, rank), {"state": json.dumps(state)}
        if later is None:
            save_file(contents, path, metadata=notes)
        else:
            later.put(save_file, contents, path, metadata=notes)

    def load(self, directory: Path, *, rank: int, device: torch.device) -> None:
        """Takes up what `save` wrote. It begins anew where there is nothing, or what other ranks cut otherwise."""
        self._forget()
        path = _file(directory, rank if self._parts else 0)
        state: dict[str, Any] = {}
        if path.is_file():
            with safe_open(path, framework="pt") as file:
                state = json.loads(file.metadata()["state"])
                if state["cut"] == self._cut:
                    # Copied: what a file maps begins anywhere in a cache line, and a dot product is rounded by that.
                    tensors = (file.get_tensor(str(number)) for number in range(len(file.keys())))
                    self._former = [tensor.to(device, copy=True) for tensor in tensors]
        if self._former:
            self._former_square, self._skips_in_row = float(state["square"]), int(state["skips_in_row"])
        else:
            _say_begun_anew(f"{directory} has no gradient before it{' that is cut as it is now' if state else ''}")

    @property
    def _cut(self) -> str:
        return f"in {torch.distributed.get_world_size()} parts" if self._parts else "whole"


def dot(one: Tensor, other: Tensor) -> Tensor:
    """The dot product of two float32 tensors of the same shape, float64."""
    left, right = one.detach().reshape(-1), other.detach().reshape(-1)
    places = range(0, max(len(left), 1), _CHUNK)
    products = [torch.dot(left[place : place + _CHUNK], right[place : place + _CHUNK]) for place in places]
    return torch.stack(products).sum(dtype=torch.float64)


def _say_begun_anew(reason: str) -> None:
    if torch.distributed.get_rank() == 0:
        logger.info("the next update is neither compared nor controlled (training.alignment): %s", reason)


def _file(directory: Path, rank: int) -> Path:
    return directory / f"former_gradient_{rank}.safetensors"
