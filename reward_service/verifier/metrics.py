"""The Prometheus metrics of the reward service, by verifier."""

from dataclasses import dataclass

from prometheus_client import Counter, Gauge, Histogram

from protocol.rewards import ScoreError
from reward_service.verifier.submission import Outcome
from services.http.metrics import Metrics

_LATENCY_BUCKETS_S = (0.0001, 0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)
_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

# The label of items that name no verifier of ours: their own words would make labels without bound.
UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class ScoringMetrics:
    """`latency` has one observation for each item, and each part of one, those that end in an error included."""

    latency: Histogram
    errors: Counter
    killed_workers: Counter
    pending_items: Gauge
    waiting_items: Gauge
    cached: Counter
    repeated_requests: Counter
    batch_items: Histogram
    asked_requests: Counter
    asked_tokens: Counter

    def count(self, outcome: Outcome, *, verifier: str, latency_s: float) -> None:
        """An item, or a part of one, that a verifier has judged."""
        self.latency.labels(verifier).observe(latency_s)
        if isinstance(outcome.result, ScoreError):
            self.errors.labels(verifier, outcome.result.kind).inc()
        if outcome.cached:
            self.cached.labels(verifier).inc()


def make_metrics(metrics: Metrics) -> ScoringMetrics:
    """Register the service's metrics."""
    return ScoringMetrics(
        latency=metrics.histogram(
            "score_seconds",
            "Time from an item's arrival to its result.",
            buckets=_LATENCY_BUCKETS_S,
            labels=["verifier"],
        ),
        errors=metrics.counter("errors", "Items without a reward, by whose fault it was.", labels=["verifier", "kind"]),
        killed_workers=metrics.counter(
            "killed_workers", "Worker processes killed or lost in a job.", labels=["verifier"]
        ),
        pending_items=metrics.gauge("pending_items", "Items that have arrived and have no result yet."),
        waiting_items=metrics.gauge(
            "waiting_items",
            "Items of each verifier that have arrived and whose request is not answered yet.",
            labels=["verifier"],
        ),
        cached=metrics.counter("cached_items", "Items judged from what was judged before.", labels=["verifier"]),
        repeated_requests=metrics.counter(
            "repeated_requests", "Requests answered by the answer to the same request before, by its idempotency key."
        ),
        batch_items=metrics.histogram(
            "batch_items",
            "Items that were scored together, by a reward model or another service.",
            buckets=_BATCH_BUCKETS,
            labels=["verifier"],
        ),
        asked_requests=metrics.counter(
            "asked_requests",
            "Requests to services that verifiers ask: answered, failed, or not sent since they were over budget.",
            labels=["verifier", "outcome"],
        ),
        asked_tokens=metrics.counter(
            "asked_tokens", "Tokens, in and out, that services say were used.", labels=["verifier"]
        ),
    )
