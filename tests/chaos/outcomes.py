"""Findings of the scenarios: one JSON line each, and all of them as a table for people."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.machine import commit_of_code
from tests.chaos.kill_points import Recovery

HEADER = """# Chaos: what was done to a running system, and how it went on

Made by `make chaos` (`python -m tests.chaos --list` names the scenarios), with the real processes on one machine. Every
run is judged from the outside: from the journal's files, `metrics.jsonl`, the checkpoints' ledgers and a tap on the
messages between learner and env_services (`tests/chaos/invariants.py`). Times are seconds from the fault to the end of
the next training step, and to the next proven publish or join; other work may have run on the machine.
"""


@dataclass
class ScenarioOutcome:
    """Outcome of a scenario. `complaints` are the broken invariants, `notes` remarks for a reader."""

    scenario: str
    seed: int
    recoveries: list[Recovery] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.complaints


def write_outcome(outcome: ScenarioOutcome, *, lines: Path, table: Path) -> None:
    """Replaces the scenario's line, and makes the table anew."""
    kept = [one for one in read_lines(lines) if one["scenario"] != outcome.scenario]
    entry = {**asdict(outcome), "passed": outcome.passed, "commit": commit_of_code()}
    entries = sorted([*kept, entry], key=lambda one: str(one["scenario"]))
    lines.parent.mkdir(parents=True, exist_ok=True)
    lines.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    table.write_text(render(entries), encoding="utf-8")


def read_lines(path: Path) -> list[dict[str, object]]:
    """The outcomes written so far."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def render(entries: Sequence[dict[str, object]]) -> str:
    """The markdown page."""
    rows = ["| scenario | commit | seed | faults | seconds | invariants |", "|---|---|---:|---:|---:|---|"]
    rows += [_summary(entry) for entry in entries]
    return "\n".join([HEADER, *rows, "", *(line for entry in entries for line in _section(entry))])


def _summary(entry: dict[str, object]) -> str:
    broken = _list(entry, "complaints")
    verdict = "hold" if not broken else f"**{len(broken)} complaints**"
    faults = len(_list(entry, "recoveries"))
    facts = (entry["scenario"], entry.get("commit", "an earlier one"), entry["seed"], faults)
    return f"| {' | '.join(map(str, facts))} | {float(str(entry['seconds'])):.0f} | {verdict} |"


def _section(entry: dict[str, object]) -> list[str]:
    found = [
        f"## {entry['scenario']}",
        "",
        "| fault | at step | next step (s) | next publish (s) |",
        "|---|---:|---:|---:|",
    ]
    for one in _list(entry, "recoveries"):
        assert isinstance(one, dict)
        found.append(f"| {one['fault']} | {one['at_step']} | {one['next_step_s']:.1f} | {one['next_publish_s']:.1f} |")
    found += ["", *(f"- {note}" for note in _list(entry, "notes"))]
    found += [f"- **broken**: {text}" for text in _list(entry, "complaints")[:20]]
    return [*found, ""]


def _list(entry: dict[str, object], name: str) -> list[object]:
    value = entry[name]
    assert isinstance(value, list)
    return value
