"""docs/algorithms.md has an equation and a source of each algorithm, and the accuracies that were measured."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from learner.algorithms.presets.dpo import PreferenceLoss
from learner.algorithms.presets.registry import ALGORITHMS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
MEASURED = ROOT / "benchmarks/results/algorithms.jsonl"


def rows(heading: str) -> Iterator[list[str]]:
    """Cells of the table whose heading row begins so; each line of it has as many."""
    _, _, table = PAGE.partition(f"\n{heading}")
    titles, _, *lines = (heading + table.partition("\n\n")[0]).splitlines()
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == titles.count("|") - 1, line
        yield cells


def names(heading: str) -> list[str]:
    return [cells[0].strip("`") for cells in rows(heading)]


def test_each_algorithm_that_samples_has_an_equation() -> None:
    samples = {name for name, kind in ALGORITHMS.items() if not kind.learns_from_files} - {"custom"}

    assert sorted(names("| `--algo` | loss of a token |")) == sorted(samples)
    assert sorted(names("| `--algo` | advantages |")) == sorted(samples)


def test_each_algorithm_that_learns_from_files_and_each_of_dpos_family_has_an_equation() -> None:
    from_files = {name for name, kind in ALGORITHMS.items() if kind.learns_from_files}

    assert sorted(names("| `--algo` | loss | source |")) == sorted(from_files)
    assert sorted(names("| `loss` | loss of a pair |")) == sorted(get_args(PreferenceLoss))


def test_the_sources_are_those_that_the_settings_name() -> None:
    shown = [*rows("| `--algo` | loss of a token |"), *rows("| `--algo` | loss | source |")]
    for name, _, source, *_ in shown:
        named = set(re.findall(r"\d{4}\.\d{5}", ALGORITHMS[name.strip("`")].__doc__ or ""))
        assert not named or named & set(re.findall(r"\d{4}\.\d{5}", source)), name


def test_the_accuracies_are_those_that_were_measured() -> None:
    runs = [json.loads(line) for line in MEASURED.read_text(encoding="utf-8").splitlines()]
    of = {run["variant"]: run["numbers"] for run in runs if run["name"].endswith("-lag4-seed0")}
    for name, _, _, accuracy, _ in rows("| `--algo` | loss of a token |"):
        algorithm = name.strip("`")
        if algorithm not in of:
            elsewhere = re.search(r"\]\((\.\./benchmarks/results/[^)]+)\)", accuracy)
            assert accuracy == "not measured" or (elsewhere and (ROOT / "docs" / elsewhere[1]).is_file()), algorithm
            continue
        assert abs(float(accuracy[:5]) - of[algorithm]["accuracy_after"]) <= 0.0006, algorithm
        assert abs(start_of(accuracy) - of[algorithm]["accuracy_before"]) <= 0.0006, algorithm


def start_of(accuracy: str) -> float:
    """Accuracy from which a run of the table started, by what its cell and the text above it say."""
    if named := re.search(r" from (0\.\d{3})$", accuracy):
        return float(named[1])
    return 0.354 if accuracy.endswith("*") else 0.411
