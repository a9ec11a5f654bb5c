"""Alert rules and dashboards, which watch a run from outside: each of their metrics exists."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy/prometheus"
GRAFANA = ROOT / "deploy/grafana"
OF_EVERY_PROCESS = {
    "process_start_time_seconds", "process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds",
    "headway_build_info", "up",
}  # fmt: skip
PARTS = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}
WITHOUT_SUM = {"headway_env_service_verifier_reward"}
NAME = r"\b(?:headway|process)_\w+|\bup\b"


def exported() -> set[str]:
    """The names of series, by the page that a test compares with the processes' registries."""
    page = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    kinds = dict(re.findall(r"^\| `(headway_\w+)` \| (\w+) \|", page, re.MULTILINE))
    series = {f"{name}{part}" for name, kind in kinds.items() for part in PARTS[kind]}
    return series - {f"{name}_sum" for name in WITHOUT_SUM} | OF_EVERY_PROCESS


def rules() -> list[dict[str, Any]]:
    found = yaml.safe_load((PROMETHEUS / "rules.yml").read_text(encoding="utf-8"))
    return [rule for group in found["groups"] for rule in group["rules"]]


def names_in(expression: str) -> set[str]:
    """Of the metrics in an expression; what stands in quotes is no metric."""
    return set(re.findall(NAME, re.sub(r'"[^"]*"', "", expression)))


def test_every_alert_asks_for_what_a_process_exports() -> None:
    strange = {rule["alert"]: missing for rule in rules() if (missing := names_in(rule["expr"]) - exported())}

    assert strange == {}


@pytest.mark.parametrize("path", sorted((GRAFANA / "dashboards").glob("*.json")), ids=lambda path: path.stem)
def test_every_panel_asks_for_what_a_process_exports(path: Path) -> None:
    panels = json.loads(path.read_text(encoding="utf-8"))["panels"]
    asked = {(panel["title"], name) for panel in panels for one in panel["targets"] for name in names_in(one["expr"])}

    assert len(asked) >= 9
    assert {(title, name) for title, name in asked if name not in exported()} == set()


def test_the_committed_dashboards_are_those_of_their_table(tmp_path: Path) -> None:
    made = GRAFANA / "make_dashboards.py"
    copy = tmp_path / made.name
    (tmp_path / "dashboards").mkdir()
    copy.write_text(made.read_text(encoding="utf-8"), encoding="utf-8")
    subprocess.run([sys.executable, copy], check=True, timeout=60)

    new = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "dashboards").iterdir()}
    committed = {path.name: path.read_text(encoding="utf-8") for path in (GRAFANA / "dashboards").iterdir()}
    assert committed == new, "run python deploy/grafana/make_dashboards.py and commit"


def test_every_alert_has_a_test_in_which_it_fires_and_says_how_bad_it_is() -> None:
    tests = yaml.safe_load((PROMETHEUS / "rules-test.yml").read_text(encoding="utf-8"))["tests"]
    fired = {one["alertname"] for test in tests for one in test["alert_rule_test"] if one["exp_alerts"]}

    assert {rule["alert"] for rule in rules()} == fired
    assert {rule["labels"]["severity"] for rule in rules()} == {"critical", "warning", "info"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: make test-tools")
@pytest.mark.parametrize("words", [("check", "rules", "rules.yml"), ("test", "rules", "rules-test.yml")])
def test_the_rules_are_good_and_fire_when_they_should(words: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["promtool", *words], cwd=PROMETHEUS, capture_output=True, text=True, timeout=120, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
