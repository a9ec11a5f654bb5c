"""The runs of the algorithms' benchmark: each is one that the learner would take, and no two share a name."""

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.algorithm_runs import PRESETS, STALENESS, AlgorithmRun
from benchmarks.algorithm_table import another_start, read_rows
from benchmarks.algorithms import RESULTS
from learner.config import LearnerConfig
from services.config.models import load_config

DEMO = Path(__file__).parents[2] / "benchmarks" / "settings" / "addition.toml"
EACH = {run.variant: run for run in (*PRESETS, *STALENESS)}


def test_no_two_runs_share_a_folder() -> None:
    names = Counter(run.name for run in (*PRESETS, *STALENESS))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("run", EACH.values(), ids=EACH)
def test_the_learner_takes_the_options_of_every_variant(run: AlgorithmRun) -> None:
    words = [word for key, value in run.options.items() for word in (f"--{key}", str(value))]
    teacher = ["--teachers", '[{"name": "t", "path": "m"}]'] if run.has_teacher else []
    config = load_config(LearnerConfig, process="learner", argv=["--config", str(DEMO), *words, *teacher], environ={})
    assert config.algo.type == run.algo


def test_a_run_from_another_warm_start_is_not_put_beside_the_others() -> None:
    rows = read_rows(RESULTS)
    assert [fault for row in rows if (fault := another_start(row, rows))] == []
    row = next(row for row in rows if row.numbers is not None)
    assert row.numbers is not None
    other = row.model_copy(update={"numbers": row.numbers.model_copy(update={"accuracy_before": 0.157})})
    assert another_start(other, rows) is not None
    assert another_start(other, []) is None
