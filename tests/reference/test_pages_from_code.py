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
