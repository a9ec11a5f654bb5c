"""The benchmark of the ratio's bound: its sides are ones that the learner would take, and its table."""

from pathlib import Path

import pytest

from benchmarks.ratio_caps import SIDES, STEPS, Bounds, CappedRun, options_of, table
from learner.algorithms.presets.cispo import CispoConfig
from learner.algorithms.presets.rloo import RlooConfig
from learner.config import LearnerConfig
from services.config.models import load_config

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("task", STEPS)
@pytest.mark.parametrize("bounds", SIDES, ids=str)
def test_the_learner_takes_the_options_of_each(task: str, bounds: Bounds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    options = options_of(task, bounds, seed=1)
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    argv = ["--config", str(Path("examples", task, "run.toml")), *words]
    algo = load_config(LearnerConfig, process="learner", argv=argv, environ={}).algo
    if isinstance(algo, CispoConfig):
        assert 1 + algo.ratio_high == pytest.approx(bounds.cap)
    else:
        assert isinstance(algo, RlooConfig)
        assert (algo.ratio_cap, algo.ratio_cap_bad) == (bounds.cap, bounds.bad_cap)


def test_seeds_are_put_together_and_a_start_counts_for_nothing() -> None:
    machine = "2 cores (x), load 1.0 at the end; commit a"
    runs = [
        CappedRun(
            "maze", Bounds("rloo", 1.0, 5.0), seed, machine, {0: 0.0, 7: 0.2 + 0.1 * seed, 14: 0.4}, 3.0, 60.0
        )
        for seed in range(2)
    ]  # fmt: skip
    text = table(runs)
    assert "| maze | rloo | 1 | 5 | **0.325** (0.300 to 0.350) | **0.400** (0.400 to 0.400) | 3.0 | 2 |" in text
    assert "arithmetic" not in text.partition("|---")[2]
