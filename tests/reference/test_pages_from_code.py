"""The reference pages of HTTP routes and metrics hold what the processes' applications and registries hold now."""

import re
import warnings
from collections.abc import Mapping

import pytest

# vLLM warns at import of things that are not ours to change.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from docs.reference.__main__ import FOLDER
    from docs.reference.http_page import http_page
    from docs.reference.metrics_page import metrics_page
    from docs.reference.processes import Described, described


@pytest.fixture(scope="module")
def processes() -> Mapping[str, Described]:
    """The four of them. Imports vLLM, which takes its time."""
    return described()


def test_the_page_of_routes_is_that_of_the_present_applications(processes: Mapping[str, Described]) -> None:
    committed = (FOLDER / "http.md").read_text(encoding="utf-8")

    assert committed == http_page(processes), "run `make reference` and commit"


def test_the_page_of_metrics_is_that_of_the_present_registries(processes: Mapping[str, Described]) -> None:
    committed = (FOLDER / "metrics.md").read_text(encoding="utf-8")

    assert committed == metrics_page(processes), "run `make reference` and commit"


def test_every_route_says_what_it_does(processes: Mapping[str, Described]) -> None:
    silent = [
        f"{name} {path}"
        for name, process in processes.items()
        for path, operations in process.app.openapi()["paths"].items()
        for operation in operations.values()
        if not operation.get("description")
    ]

    assert silent == []


def test_every_metric_of_the_other_pages_is_one(processes: Mapping[str, Described]) -> None:
    known = {metric.name for process in processes.values() for metric in process.metrics}
    named = {
        name
        for page in FOLDER.parent.glob("*.md")
        for name in re.findall(
            r"\bheadway_(?:learner|generator|reward_service|env_service)_\w+", page.read_text("utf-8")
        )
    }

    assert named <= known


UNITS = ("seconds", "bytes", "nats", "versions", "ratio", "items", "reward")
FROM_OUTSIDE = {
    "environment", "verifier", "teacher", "tracker", "generator_id", "endpoint", "outcome", "state", "tenant",
}  # fmt: skip
"""Labels whose values come with settings, tasks, peers, or the books of a run."""


def test_every_process_shows_itself_and_nothing_of_when_a_series_was_made(processes: Mapping[str, Described]) -> None:
    for name, process in processes.items():
        assert "\nprocess_resident_memory_bytes " in process.shown
        assert "\nprocess_start_time_seconds " in process.shown
        assert f'headway_build_info{{process="{name}",' in process.shown
        assert "_created" not in process.shown


def test_counters_are_there_before_their_first_event(processes: Mapping[str, Described]) -> None:
    absent = {
        metric.name
        for process in processes.values()
        for metric in process.metrics
        if metric.kind == "counter"
        and not FROM_OUTSIDE & set(metric.labels)
        and not re.search(rf"^{metric.name}[ {{]", process.shown, re.MULTILINE)
    }

    assert absent == set()


def test_names_end_in_what_is_counted_or_in_a_unit(processes: Mapping[str, Described]) -> None:
    made = [metric for process in processes.values() for metric in process.metrics]

    assert [metric.name for metric in made if (metric.kind == "counter") != metric.name.endswith("_total")] == []
    strange = [metric.name for metric in made if metric.kind == "histogram" and not metric.name.endswith(UNITS)]
    assert strange == []
    assert [metric.name for metric in made if metric.kind == "gauge" and metric.name.endswith("_seconds")] == []


def test_verifiers_of_a_reward_service_have_their_series_from_the_start(processes: Mapping[str, Described]) -> None:
    shown = processes["reward-service"].shown

    for kind in ("user", "data", "infrastructure"):
        assert f'headway_reward_service_errors_total{{kind="{kind}",verifier="math"}} 0.0' in shown
        assert f'headway_reward_service_errors_total{{kind="{kind}",verifier="unknown"}} 0.0' in shown
    assert 'headway_reward_service_killed_workers_total{verifier="math"} 0.0' in shown
