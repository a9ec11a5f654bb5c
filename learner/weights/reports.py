"""What is said about weights: what the trainer offers, and what became of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Snapshot:
    """Weights to be published: named CPU tensors, deduplicated by tie, and the learner's own logprobs of the probe."""

    version: int
    tensors: Sequence[tuple[str, torch.Tensor]]
    probe_token_ids: tuple[int, ...]
    probe_logprobs: tuple[float, ...]


@dataclass(frozen=True)
class PublishReport:
    """What it took until a version was served, in seconds, and the largest probe gap in nats over the generators.

    `members` counts those that served it at the end of its broadcast; others catch up by a download.
    """

    version: int
    members: int
    total_s: float
    prepare_s: float
    commit_s: float
    pause_s: float
    probe_gap: float


@dataclass(frozen=True)
class JoinReport:
    """A generator that caught up by a download: what it serves now, what that took, its probe gap in nats."""

    generator_id: str
    version: int
    seconds: float
    probe_gap: float
