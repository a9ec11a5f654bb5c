"""A game of several turns, trained by all four processes."""

import json
from pathlib import Path

import pytest

from tests.e2e.processes import Launcher
from tests.e2e.run_files import write_run_file

pytestmark = pytest.mark.e2e

GAMES = Path(__file__).parent / "several_turns"


def test_a_game_of_several_turns_is_trained_on_the_very_tokens_that_were_sampled(
    untrained_model: Path, tmp_path: Path
) -> None:
    run_file = write_run_file(tmp_path, model=untrained_model)
    config = ("--config", str(run_file.path))
    environments = [{"source": "next_digit:NextDigit", "name": "digits", "train_tasks": 100, "evaluation_tasks": 10}]
    launch = Launcher(folder=tmp_path, environment={"PYTHONPATH": str(GAMES)})
    try:
        launch("generator", *config)
        launch("reward-service", *config)
        launch("env-service", *config, "--environments", json.dumps(environments))
        learner = launch(
            "learner", *config, "--rollouts.environment", "digits", "--steps", "40", "--algo", "gigpo",
            "--algo.turn-rewards", "true", "--training.optimizer.learning-rate", "3e-3", "--evaluation.tasks", "0",
            "--evaluation.final-tasks", "10",
        )  # fmt: skip
        assert learner.wait(timeout_s=280) == 0, learner.text()
    finally:
        for launched in launch.launched:
            launched.end()

    run = run_file.run()
    trajectories = [one for _, groups in run.batches() for group in groups for one in group.trajectories]
    assert {len(one.turns) for one in trajectories} == {3}
    assert {one.stop_reason for one in trajectories} == {"over"}
    assert all(one.loss_mask.sum() == 3 and len(one.token_ids) == 9 for one in trajectories)
    assert any(len({span.version for span in one.version_spans}) > 1 for one in trajectories)
    steps = run.metrics("step")
    gaps = [step["mismatch_kl"] for step in steps if step["mismatch_kl"] is not None]
    assert max(map(abs, gaps)) < 1e-3
    rewards = [step["reward_mean"] for step in steps]
    assert sum(rewards[-5:]) > 1.5 * sum(rewards[:5])
