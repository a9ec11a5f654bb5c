"""The truth about weights: what each version was trained on, so that no stamp, journal or proof has to be believed.

A simulated policy is the row of batches that made it. Its tensors hold a digest of that row, an engine that loads them
samples tokens whose logprobs name the row, and a trainer reads there which policy really sampled what it trains on.
"""

import hashlib
from dataclasses import dataclass, field

import torch

_SCALE = 1 << 16
_HALF_LOADED = 0

History = tuple[tuple[int, ...], ...]
"""The leases of each batch, in order."""


@dataclass
class Truth:
    """All policies that ever were, by the digest of their history, and by a small number."""

    histories: list[History] = field(default_factory=lambda: [(), ()])
    numbers: dict[str, int] = field(default_factory=dict)

    def number_of(self, history: History) -> int:
        """A number for the policy that was trained on this; 0 stands for weights that are none."""
        digest = digest_of(history)
        if digest not in self.numbers:
            self.numbers[digest] = len(self.histories)
            self.histories.append(history)
        return self.numbers[digest]


def digest_of(history: History) -> str:
    """Of all batches in order."""
    return hashlib.blake2b(repr(history).encode(), digest_size=12).hexdigest()


def tensors_of(history: History, number: int, *, finite: bool, size: int) -> list[tuple[str, torch.Tensor]]:
    """Two parameters; the first names the policy, the second is as large as the simulation wants weights to be."""
    seed = int(digest_of(history), 16)
    head = torch.tensor([float(number), float(len(history))], dtype=torch.float32)
    body = torch.full((size,), float(seed % 9973) if finite else float("nan"), dtype=torch.float32)
    return [("head", head), ("body", body)]


def number_in(tensors: dict[str, torch.Tensor]) -> int:
    """Which policy these tensors are of."""
    return int(tensors["head"][0])


def is_finite(tensors: dict[str, torch.Tensor]) -> bool:
    """Whether all of them are numbers."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())


def logprob_of(number: int) -> float:
    """What a token sampled by a policy has; float32 holds it as it is."""
    return -(number + 1) / _SCALE


def number_of_logprob(logprob: float) -> int:
    """The inverse."""
    return round(-logprob * _SCALE) - 1


def probe_logprob(number: int, token: int, *, finite: bool) -> float:
    """Of a token of the probe, by learner and engines alike: differs a little between versions."""
    return -(1.0 + (number * 7 + token * 13) % 101 / 500.0) if finite else float("nan")
