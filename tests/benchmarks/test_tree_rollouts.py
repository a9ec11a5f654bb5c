"""The table of groups that branch, also of runs that were broken off between two sides."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import tree_rollouts
from benchmarks.tree_rollouts import TreeRun

RUN = TreeRun(
    "grpo, branched",
    0,
    "2 cores (X), load 4.0 at the end; commit ab12cd34",
    {0: 0.36, 25: 0.5, 50: 0.6},
    200,
    1000,
    1200,
    128,
    9.0,
)


def test_a_side_that_was_not_reached_is_not_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tree_rollouts.json").write_text(json.dumps([asdict(RUN)]))
    monkeypatch.setattr(tree_rollouts, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["tree_rollouts", "--report"])
    tree_rollouts.main()
    text = (tmp_path / "tree_rollouts.md").read_text()
    assert "| grpo, branched | 0 | 0.360 | 0.500 at 25 | **0.600** | 128 | 1,000 | 1,200 | 9 |" in text
    assert "grpo, branched: 0.600 in the mean of 1 seeds" in text
    assert "treerl" not in text
