"""Names of metrics, and a registry for each process."""

import pytest
from prometheus_client import generate_latest

from services.http.metrics import Metrics, PeerCounter, one_label


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


def shown(metrics: Metrics) -> str:
    text: str = generate_latest(metrics.registry).decode()
    return text


def test_every_process_tells_its_memory_its_start_its_release_and_its_run() -> None:
    text = shown(Metrics("env-service", run="sums"))

    for name in ("process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"):
        assert f"\n{name} " in text
    assert 'headway_build_info{process="env-service",' in text
    assert 'run="sums"' in text


def test_nothing_is_shown_of_when_a_series_was_made() -> None:
    metrics = Metrics("learner")
    metrics.counter("steps", "Steps.").inc()
    metrics.histogram("step_seconds", "Steps.", buckets=(1,)).observe(2)

    assert "_created" not in shown(metrics)


def test_a_counter_with_known_labels_is_there_before_its_first_event() -> None:
    metrics = Metrics("learner")
    metrics.counter("failed_writes", "Failed.", labels=("what",), known=one_label("checkpoint", "samples.jsonl"))
    changes = [("tightened", "behavior_kl")]
    metrics.counter("guard_changes", "Changes.", labels=("change", "measure"), known=changes)

    text = shown(metrics)
    assert 'headway_learner_failed_writes_total{what="checkpoint"} 0.0' in text
    assert 'headway_learner_failed_writes_total{what="samples.jsonl"} 0.0' in text
    assert 'headway_learner_guard_changes_total{change="tightened",measure="behavior_kl"} 0.0' in text


def test_a_distribution_takes_many_equal_values_and_reads_like_a_histogram() -> None:
    metrics, values = Metrics("learner"), [0, 0, 0, 1, 1, 7, 30]
    given = metrics.distribution("lag_versions", "Lag.", buckets=(0, 1, 4, 16))
    one_by_one = metrics.histogram("other_versions", "Lag.", buckets=(0, 1, 4, 16))
    for value in sorted(set(values)):
        given.add(value, values.count(value))
    for value in values:
        one_by_one.observe(value)

    lines = [line for line in shown(metrics).splitlines() if line.startswith("headway_learner_")]
    parts = {name: [line.removeprefix(name) for line in lines if line.startswith(name)] for name in (
        "headway_learner_lag_versions", "headway_learner_other_versions",
    )}  # fmt: skip
    assert sorted(parts["headway_learner_lag_versions"]) == sorted(parts["headway_learner_other_versions"])
    assert len(parts["headway_learner_lag_versions"]) == 7


def test_rises_count_from_where_they_began_and_never_fall() -> None:
    metrics = Metrics("learner")
    rises = metrics.rises("ended_attempts", "Ended.", label="outcome")
    assert "headway_learner_ended_attempts_total{" not in shown(metrics), "nothing is followed yet"
    states = [{"expired": 5.0}, {"expired": 5.0}, {"expired": 7.0}, {"expired": 6.0}, {"expired": 8.0}]
    rises.follow(lambda: states.pop(0))

    seen = [shown(metrics).partition('ended_attempts_total{outcome="expired"} ')[2].split()[0] for _ in range(4)]
    assert seen == ["0.0", "2.0", "2.0", "4.0"]


def test_peers_that_are_there_have_a_series_each_and_those_that_left_long_ago_have_none() -> None:
    metrics = Metrics("env-service")
    counter = metrics.counter("generator_failures", "Failures.", labels=("generator_id",))
    failures = PeerCounter(counter, most_left=1)
    failures.present({"a", "b"})
    assert 'generator_failures_total{generator_id="a"} 0.0' in shown(metrics)
    failures.inc("a")
    failures.present({"b"})
    assert 'generator_failures_total{generator_id="a"} 1.0' in shown(metrics), "a scrape still sees why it left"
    failures.present({"c"})
    failures.present({"d"})

    names = {line.partition('"')[2].partition('"')[0] for line in shown(metrics).splitlines() if "_total{g" in line}
    assert names == {"c", "d"}
