"""Names of metrics, and a registry for each process."""

import pytest
from prometheus_client import generate_latest

from services.metrics import Metrics


def test_names_carry_the_process() -> None:
    metrics = Metrics("reward-service")
    metrics.counter("scored_items", "Items scored.", labels=("verifier",)).labels(verifier="math").inc()
    metrics.gauge("queued_items", "Items that wait.").set(3)
    metrics.histogram("score_seconds", "Time to score.", buckets=(0.1, 1.0)).observe(0.5)
    text = generate_latest(metrics.registry).decode()
    assert 'headway_reward_service_scored_items_total{verifier="math"} 1.0' in text
    assert "headway_reward_service_queued_items 3.0" in text
    assert 'headway_reward_service_score_seconds_bucket{le="1.0"} 1.0' in text


def test_registries_are_separate_and_names_unique() -> None:
    first = Metrics("learner")
    first.gauge("lag", "Lag.")
    Metrics("learner").gauge("lag", "Lag.")
    with pytest.raises(ValueError, match="Duplicated"):
        first.gauge("lag", "Lag.")
