"""A mixture of experts through the whole loop: updates of a real engine, which packs its experts anew each time."""

from pathlib import Path

import pytest

from tests.e2e.mixture import CHOSEN, EXPERTS, write_mixture
from tests.e2e.processes import Launcher, marked
from tests.e2e.run_files import write_run_file

pytestmark = pytest.mark.e2e

STEPS = 4


def test_a_mixture_is_trained_as_it_is_sampled_and_says_its_load(launcher: Launcher, tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path, model=write_mixture(tmp_path / "mixture"))
    # Random weights earn nothing: the load-balancing loss is what moves them.
    words = ["--learner.steps", str(STEPS), "--learner.training.router.aux-loss-coef", "1.0"]
    words += ["--learner.evaluation.every-steps", "1000", "--learner.training.microbatch-tokens", "256"]
    up = launcher("headway", "up", str(run_file.path), *words)

    assert up.wait(timeout_s=400) == 0, up.text()
    assert marked(launcher.mark) == {}
    run = run_file.run()
    publishes, steps = run.metrics("publish"), run.metrics("step")
    assert [line["version"] for line in publishes][-1] == STEPS
    assert all(line["probe_gap"] < 1e-3 for line in publishes), publishes
    mismatches = [line["mismatch_kl"] for line in steps if line["mismatch_kl"] is not None]
    assert mismatches
    assert max(map(abs, mismatches)) < 1e-5
    assert steps[-1]["router_aux_loss"] < steps[0]["router_aux_loss"], "a loss that is learned falls"
    for line in steps:
        assert 1 <= line["expert_load_max"] <= EXPERTS / CHOSEN
        assert line["dead_experts"] <= 2 * (EXPERTS - CHOSEN)
        assert line["router_entropy"] > 0
