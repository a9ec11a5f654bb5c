"""The benchmark of a lag that is chosen: its sides are ones that the learner would take, and what it says of them."""

from pathlib import Path

import pytest

from benchmarks.lag_choice import CHOSEN, SIDES, TASKS, TimedRun, median_of, moves_of, table, verdict
from benchmarks.whole_runs import RunFiles
from learner.config import LearnerConfig
from services.config.models import load_config

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("side", SIDES)
def test_the_learner_takes_the_options_of_each(task: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    options = TASKS[task].options(side, seed=1)
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    argv = ["--config", str(TASKS[task].config), *words]
    config = load_config(LearnerConfig, process="learner", argv=argv, environ={})
    assert config.groups_per_step == TASKS[task].groups
    assert config.rollouts.group_size == 8
    assert (config.max_lag, config.lag.adapt) == ((8, "gradient") if side == CHOSEN else (int(side), "off"))


def timed(side: str, seed: int, *, reached_at: int) -> TimedRun:
    """A run that reaches the target of addition at a step; each step takes 2 s."""
    accuracies = {step: 0.9 if step >= reached_at else 0.4 for step in (0, 10, 20, 30)}
    seconds = {step: 2.0 * step for step in accuracies}
    machine = "2 cores (x), load 1.0 at the end; commit a"
    return TimedRun(
        "addition", side, seed, machine, accuracies, seconds, {0: 1, 2: 3}, {13: 4} if side == CHOSEN else {}
    )


def test_time_is_that_of_the_first_evaluation_of_the_target() -> None:
    assert timed("4", 0, reached_at=20).reached == 40.0
    assert timed("4", 0, reached_at=50).reached is None
    assert timed("4", 0, reached_at=20).mean_lag == 1.5
    runs = [timed("4", seed, reached_at=at) for seed, at in enumerate((10, 30, 50))]
    assert median_of(runs) == 40.0
    assert median_of(runs[1:]) is None, "half of them did not reach it"


def test_a_choice_is_compared_with_the_best_fixed_lag_alone() -> None:
    assert "0.95 of the time of the best fixed lag, 2; within" in verdict(
        {"0": 50.0, "2": 20.0, "4": None, CHOSEN: 19.0}
    )
    assert "**not** within" in verdict({"0": 50.0, "2": 20.0, CHOSEN: 22.0})
    assert "Not compared" in verdict({"0": 50.0, CHOSEN: None})


def test_the_table_shows_each_side_and_where_the_bound_was_moved() -> None:
    text = table([timed(side, 0, reached_at=20) for side in SIDES])
    assert "| by gradients | 40 | 40 | 0.900 | 1.5 | 4 from 13 |" in text
    assert "arithmetic" not in text


def test_a_bound_that_was_only_confirmed_is_no_move() -> None:
    entries = [
        {"kind": "guard", "step": 4, "before": 8, "after": 4},
        {"kind": "guard", "step": 6, "before": 4, "after": 4},
        {"kind": "step", "step": 7},
    ]
    assert moves_of(RunFiles(summary={}, entries=entries)) == {4: 4}
