"""Weights as the trainer offers them, how they are published, and the reports of what became of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from learner.weights.probe import Probe
from protocol.fleet import Backend


@dataclass(frozen=True)
class Snapshot:
    """Weights to be published: named CPU tensors, deduplicated by tie, and the learner's probe of them."""

    version: int
    tensors: Sequence[tuple[str, torch.Tensor]]
    probe: Probe


@dataclass(frozen=True)
class PublishReport:
    """What it took until a version was served, in seconds, and the largest mean gap of the probe, in nats, of its
    generators.

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
    """A generator that caught up by a download: what it serves now, what that took, its probe's mean gap in nats."""

    generator_id: str
    version: int
    seconds: float
    probe_gap: float


@dataclass(frozen=True)
class PublisherOptions:
    """Times in seconds. `probe_tolerance` bounds the mean gap in nats between the learner's and a generator's logprobs
    of the probe; if None, the type of their numbers does. `dtype` is that of the learner's.
    """

    incarnation: int
    backend: Backend
    host: str
    bucket_bytes: int
    bucket_timeout_s: float
    meet_timeout_s: float
    commit_timeout_s: float
    pull_timeout_s: float
    probe_tolerance: float | None
    dtype: str = "float32"
    parallel_pulls: int = 4
    """Downloads at once, at most."""
    slowest_pull_bytes_per_s: float = 20e6
    """What all downloads together are expected to do at least; `pull_timeout_s` comes on top."""
    pull_backoff_s: float = 0.5
    """Before the second try of a download; twice as long each time."""
    pull_attempts: int = 5
    """Failures in a row after which a generator is expelled."""
