"""Counts that an env_service keeps of rewards, environments and peers."""

from prometheus_client import generate_latest

from env_service.rollouts.outcomes import RolloutMetrics
from protocol.trajectories import RewardRecord
from services.http.metrics import Metrics


def value(metrics: Metrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(f"headway_env_service_{name}", labels)
    assert found is not None, f"{name} {labels} is not shown"
    return float(found)


def test_the_mean_of_rewards_below_zero_is_that_of_two_sums_which_never_fall() -> None:
    metrics = Metrics("env-service")
    counted = RolloutMetrics(metrics)
    given = (1.0, -0.5, -3.0, 0.0, 0.25)
    above = []
    for reward in given:
        counted.judged(RewardRecord(verifier="chess", reward=reward), environment="games")
        above.append(value(metrics, "verifier_positive_reward_total", environment="games", verifier="chess"))

    labels = {"environment": "games", "verifier": "chess"}
    assert above == sorted(above)
    below = value(metrics, "verifier_negative_reward_total", **labels)
    assert (above[-1], below) == (1.25, 3.5)
    assert (above[-1] - below) / value(metrics, "verifier_reward_count", **labels) == sum(given) / len(given)
    assert value(metrics, "verifier_reward_bucket", le="-2.0", **labels) == 1
    assert value(metrics, "verifier_reward_bucket", le="-0.1", **labels) == 2, "not all below 0 share a bucket"
    assert "verifier_reward_sum" not in generate_latest(metrics.registry).decode(), "a sum that may fall"


def test_the_errors_of_a_verifier_have_series_before_the_first_one() -> None:
    metrics = Metrics("env-service")
    counted = RolloutMetrics(metrics)
    counted.judged(RewardRecord(verifier="math", reward=1.0), environment="sums")
    assert value(metrics, "verifier_errors_total", verifier="math", kind="infrastructure") == 0
    counted.judged(RewardRecord(verifier="math", error="away", error_kind="infrastructure"), environment="sums")

    assert value(metrics, "verifier_errors_total", verifier="math", kind="infrastructure") == 1
    assert value(metrics, "unscored_trajectories_total") == 1


def test_tasks_that_name_a_verifier_each_make_no_series_without_end() -> None:
    metrics = Metrics("env-service")
    counted = RolloutMetrics(metrics)
    for number in range(500):
        counted.judged(RewardRecord(verifier=f"verifier-{number}", reward=1.0), environment="sums")

    counts = [
        line for line in generate_latest(metrics.registry).decode().splitlines() if "verifier_reward_count{" in line
    ]
    assert len(counts) < 100
    assert value(metrics, "verifier_reward_count", environment="sums", verifier="others") == 500 - (len(counts) - 1)


def test_an_environment_has_its_series_before_its_first_group() -> None:
    metrics = Metrics("env-service")
    RolloutMetrics(metrics).know("sums")

    assert value(metrics, "finished_groups_total", environment="sums") == 0
    assert value(metrics, "environment_faults_total", environment="sums", kind="hung") == 0
    assert value(metrics, "failed_leases_total", kind="data") == 0
    assert value(metrics, "refusals_total", reason="unknown_peer") == 0
