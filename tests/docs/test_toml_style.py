"""Run files look alike in the docs, the examples and what `headway init` writes: CONTRIBUTING.md has the style."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway import new_project
from tests.docs.test_blocks import ROOT, blocks
from tests.headway.mistakes.small_model import small_model

FILES = sorted([*(ROOT / "examples").rglob("*.toml"), *(ROOT / "deploy").rglob("*.toml")])
HEADER = re.compile(r"^(\[{1,2})([\w.-]+)\]{1,2}")
SETTING = re.compile(r"^([\w.-]+)\s*=\s*(.*)")


def departures(text: str) -> Iterator[str]:
    """Lines that are not in the style: dotted keys, and inline tables outside of the entries of lists."""
    entries: set[str] = set()
    in_entry, commented = False, re.sub(r"\[\s*(#[^\n]*)?\n\s*", "[", text)  # a list begins on the line of its key
    for line in commented.splitlines():
        if header := HEADER.match(line):
            name = header[2]
            if header[1] == "[[":
                entries.add(name)
            in_entry = any(f"{name}.".startswith(f"{entry}.") for entry in entries)
        elif setting := SETTING.match(line):
            inline = re.match(r"\[?\s*\{", setting[2])
            if "." in setting[1] or (inline and not in_entry):
                yield line


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_run_files_keep_the_style(path: Path) -> None:
    assert [*departures(path.read_text(encoding="utf-8"))] == []


def test_the_settings_that_the_docs_show_keep_the_style() -> None:
    assert [(place, line) for place, text in blocks("toml") for line in departures(text)] == []


def test_a_new_project_keeps_the_style(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_project, "make_tiny_model", small_model)
    new_project.make_project([str(tmp_path / "sums")])

    assert [*departures((tmp_path / "sums/run.toml").read_text(encoding="utf-8"))] == []


def test_departures_are_found_and_entries_of_lists_may_have_inline_tables() -> None:
    text = """
[learner]
rollouts = { max_tokens = 5 }
lag.on_lag = "drop"
learning_rates = [1.0, 2.0]
[reward-service]
verifiers = [   # one
    { name = "a" },
]
[[env-service.environments]]
rules = { max_turns = 2 }
parts = [{ environment = "a" }]
[env-service.environments.options]
nested = { form = "text" }
[env-service]
scoring = { batch_items = 2 }
"""

    assert [line.split()[0] for line in departures(text)] == ["rollouts", "lag.on_lag", "verifiers", "scoring"]
