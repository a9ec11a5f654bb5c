"""A fixed random sketch of a gradient: some thousand numbers whose dot products are, on average, those of the whole.

A count sketch (Charikar, Chen and Farach-Colton, 2002): the gradient of each weight is added, with a random sign, to
one of D sums, which is random too. For vectors x and y, over the draws of signs and sums,

    E <Sx, Sy> = <x, y>        Var <Sx, Sy> <= (<x, y>^2 + |x|^2 |y|^2) / D

Weights are counted through, from the first parameter's first one on. Those of a window of 2^20 find sum and sign in a
table; the next window uses the same table, with its sums turned by a random number of places and a sign of its own. So
weights of different windows meet by chance, as all others do, and no table is as long as the model.

The map is linear: sketches of parts of a gradient, on whatever rank, add up to that of the gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

SKETCH_SIZE = 8192
_WINDOW = 1 << 20
_SEED = 20_021


class GradientSketch:
    """Sketches gradients by the parameters of one model, always in the same order; `device` is where these lie."""

    def __init__(
        self, *, device: torch.device, size: int = SKETCH_SIZE, window: int = _WINDOW, seed: int = _SEED
    ) -> None:
        """Draws of another `seed` are another sketch, which has nothing in common with this one."""
        draws = np.random.default_rng(seed)
        self._size, self._window, self._seed = size, window, seed
        self._sums = torch.from_numpy(draws.integers(0, size, window)).to(device)
        self._signs = torch.from_numpy(draws.choice(np.array([-1.0, 1.0], dtype=np.float32), window)).to(device)
        self._turns: list[tuple[int, int]] = []

    def of(self, gradients: Iterable[Tensor | None], *, sizes: Iterable[int]) -> Tensor:
        """The sketch of a gradient, float64 [D] on the CPU, from that of each parameter, which has so many weights;
        None is 0.
        """
        found = torch.zeros(self._size, dtype=torch.float64, device=self._sums.device)
        sums, present = self._empty(), 0
        for window, at, part in self._parts(gradients, sizes):
            if window != present:
                self._gather(found, sums, window=present)
                sums, present = self._empty(), window
            end = at + len(part)
            sums.index_add_(0, self._sums[at:end], part.float() * self._signs[at:end])
        self._gather(found, sums, window=present)
        return found.cpu()

    def _empty(self) -> Tensor:
        return torch.zeros(self._size, device=self._sums.device)

    def _parts(self, gradients: Iterable[Tensor | None], sizes: Iterable[int]) -> Iterator[tuple[int, int, Tensor]]:
        """Pieces of the gradient that lie in one window each: its number, the piece's first place in it, the piece."""
        place = 0
        for gradient, size in zip(gradients, sizes, strict=True):
            flat = None if gradient is None else gradient.detach().reshape(-1)
            start = 0
            while flat is not None and start < size:
                window, at = divmod(place + start, self._window)
                end = min(size, start + self._window - at)
                yield window, at, flat[start:end]
                start = end
            place += size

    def _gather(self, found: Tensor, sums: Tensor, *, window: int) -> None:
        places, sign = self._turn(window)
        found += sign * sums.roll(places).double()

    def _turn(self, window: int) -> tuple[int, int]:
        """Places by which a window's sums are turned, and its sign."""
        while len(self._turns) <= window:
            draws = np.random.default_rng((self._seed, len(self._turns)))
            self._turns.append((int(draws.integers(self._size)), 1 - 2 * int(draws.integers(2))))
        return self._turns[window]
