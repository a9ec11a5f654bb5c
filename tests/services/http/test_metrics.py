"""Names of metrics, and a registry for each process."""

import pytest
from prometheus_client import generate_latest

from services.http.metrics import Metrics, PeerCounter


def test_names_carry_the_process() -> None:
    metrics = Metrics("reward-service")
    metrics.counter("scored_items", "Items scored.", labels=("verifier",)).labels(verifier="math").inc()
    metrics.gauge("queued_items", "Items that wait.").set(3)
    metrics.histogram("score_seconds", "Time to score.", buckets=(0.1, 1.0)).observe(0.5)
    text = generate_latest(metrics.registry).decode()
    assert 'headway_reward_service_scored_items_total{verifier="math"} 1.0' in text
    assert "headway_reward_service_queued_items 3.0" in text
    assert 'headway_reward_service_score_seconds_bucket{le="1.0"} 1.0' in text


def test_a_count_that_is_kept_elsewhere_is_read_when_somebody_looks() -> None:
    metrics, kept = Metrics("generator"), [3.0, 5.0]
    metrics.count("cache_hits", "Hits.", lambda: kept.pop(0))
    shown = [generate_latest(metrics.registry).decode() for _ in range(2)]
    assert "# TYPE headway_generator_cache_hits_total counter" in shown[0]
    assert "headway_generator_cache_hits_total 3.0" in shown[0]
    assert "headway_generator_cache_hits_total 5.0" in shown[1]
    with pytest.raises(ValueError, match="Duplicated"):
        metrics.counter("cache_hits", "Hits.")


def test_registries_are_separate_and_names_unique() -> None:
    first = Metrics("learner")
    first.gauge("lag", "Lag.")
    Metrics("learner").gauge("lag", "Lag.")
    with pytest.raises(ValueError, match="Duplicated"):
        first.gauge("lag", "Lag.")


def test_the_series_of_peers_that_come_and_go_are_bounded() -> None:
    metrics = Metrics("env-service")
    failures = PeerCounter(metrics.counter("generator_failures", "Failures.", labels=("generator_id",)), most=3)
    for start in range(100):
        failures.inc("pod-kept")
        failures.inc(f"pod-{start}")
    series = [line for line in generate_latest(metrics.registry).decode().splitlines() if "_total{" in line]
    assert set(series) == {
        'headway_env_service_generator_failures_total{generator_id="pod-98"} 1.0',
        'headway_env_service_generator_failures_total{generator_id="pod-kept"} 100.0',
        'headway_env_service_generator_failures_total{generator_id="pod-99"} 1.0',
    }
