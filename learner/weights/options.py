"""How weights are published."""

from dataclasses import dataclass

from protocol.fleet import Backend


@dataclass(frozen=True)
class PublisherOptions:
    """Times in seconds. `probe_tolerance` bounds the gap in nats between the learner's and a generator's logprobs of
    the probe; where it is larger, three times the gap at the generator's first commit does.
    """

    incarnation: int
    backend: Backend
    host: str
    bucket_bytes: int
    bucket_timeout_s: float
    meet_timeout_s: float
    commit_timeout_s: float
    pull_timeout_s: float
    probe_tolerance: float
    pull_backoff_s: float = 0.5
    """Before the second try of a download; twice as long each time."""
    pull_attempts: int = 5
    """Failures in a row after which a generator is expelled."""
