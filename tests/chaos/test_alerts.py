"""The rules in hurried time, and that scenarios ask for alerts that there are."""

import re

import yaml

from tests.chaos.alerts import RULES, hurried
from tests.chaos.scenarios import SCENARIOS

TEXT = RULES.read_text(encoding="utf-8")


def rules(text: str) -> dict[str, dict[str, str]]:
    return {rule["alert"]: rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]}


def test_every_duration_of_the_rules_is_a_60th() -> None:
    slow, fast = rules(TEXT), rules(hurried(TEXT))

    assert slow.keys() == fast.keys()
    assert (fast["ProcessDown"]["for"], fast["NoProgress"]["for"]) == ("2s", "5s")
    assert "> 15" in fast["NoProgress"]["expr"]
    assert "[15s]" in fast["LagAtItsBound"]["expr"]
    assert "[60s], 4 * 60)" in fast["DiskWillBeFull"]["expr"]
    assert "< 15" in fast["StepsReplayed"]["expr"]
    assert [name for name, rule in fast.items() if re.search(r"\[\d+[mh]|\d{3,}", rule["expr"])] == []
    assert [name for name, rule in fast.items() if not rule.get("for", "1s").endswith("s")] == []


def test_scenarios_ask_for_alerts_that_there_are_and_one_for_none() -> None:
    asked = {name: set(stage.alerts or ()) for name, stage in SCENARIOS.items()}

    assert set().union(*asked.values()) <= rules(TEXT).keys()
    assert [name for name, stage in SCENARIOS.items() if stage.alerts is None] == ["quiet"]
    assert len(set().union(*asked.values())) >= 3
