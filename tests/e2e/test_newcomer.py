"""The first hour of somebody new: a project of `headway init`, one command, and the reward rises."""

from pathlib import Path

import pytest

from services.config import made_with
from tests.e2e.processes import Launcher, marked
from tests.e2e.run_files import RunFolder, free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]  # torch, vLLM and DeepSpeed are loaded on a busy machine

STEPS = 24


def test_a_project_of_init_is_trained_by_one_command_and_the_reward_rises(launcher: Launcher, tmp_path: Path) -> None:
    project = tmp_path / "sums"
    made = launcher("headway", "init", str(project))
    assert made.wait() == 0, made.text()

    # The ports are the one thing that a newcomer need not name: other tests have the usual ones.
    up = launcher("headway", "up", str(project / "run.toml"), "--learner.steps", str(STEPS), *_ports())
    assert up.wait(timeout_s=1200) == 0, up.text()

    run = RunFolder(project / "runs" / "sums")
    rewards = [line["reward_mean"] for line in run.metrics("step")]
    assert len(rewards) == STEPS
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.05, rewards
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        file.name for file in (run.path / "model").iterdir()
    }
    assert (run.path / "curves.png").exists()
    record = made_with.read(run.path)
    assert record["started_by"][:2] == ["headway", "up"]
    assert record["beside"]["env-service.environments.sums.source"] == "jsonl"
    assert record["beside"]["generator.engine.dtype"] == "float32"
    assert marked(launcher.mark) == {}


def _ports() -> list[str]:
    learner, leases, generator, reward, env = free_ports(5)
    settings = {
        "learner.http.port": learner,
        "learner.leases.address": f"tcp://127.0.0.1:{leases}",
        "generator.http.port": generator,
        "generator.join.learner": f"http://127.0.0.1:{learner}",
        "reward-service.http.port": reward,
        "env-service.http.port": env,
        "env-service.learner": f"tcp://127.0.0.1:{leases}",
        "env-service.reward-urls": f"http://127.0.0.1:{reward}",
    }
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]
