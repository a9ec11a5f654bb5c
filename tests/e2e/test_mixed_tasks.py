"""A run of a mix of tasks, whose verifiers are at different reward services."""

import json
from pathlib import Path

import pytest

from tests.e2e.processes import Launcher
from tests.e2e.run_files import free_ports, write_run_file

pytestmark = pytest.mark.e2e


def test_a_mix_is_trained_with_each_task_judged_where_its_verifier_is(
    launcher: Launcher, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run_file = write_run_file(tmp_path_factory.mktemp("mixed"), model=model)
    config, (other,) = ("--config", str(run_file.path)), free_ports(1)
    lines = [
        {"prompt": f"{n:02d}+{n:02d}=", "verifier": "math", "arguments": {"answer": str(2 * n)}} for n in range(50)
    ]
    tasks = run_file.folder / "tasks.jsonl"
    tasks.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    environments = [
        {"source": "mix", "name": "mixed", "parts": [{"environment": "sums"}, {"environment": "lines"}]},
        {"source": "addition", "name": "sums"},
        {"source": "jsonl", "name": "lines", "train_file": str(tasks), "chat": False},
    ]
    rewards = [{"url": f"http://127.0.0.1:{other}", "verifiers": ["math"]}]
    launcher("generator", *config)
    launcher("reward-service", *config)
    launcher("reward-service", *config, "--http.port", str(other), "--id", "mathematician")
    launcher("env-service", *config, "--environments", json.dumps(environments), "--rewards", json.dumps(rewards))
    learner = launcher(
        "learner", *config, "--rollouts.environment", "mixed", "--steps", "6", "--evaluation.tasks", "0",
        "--evaluation.final-tasks", "20",
    )  # fmt: skip

    assert learner.wait(timeout_s=280) == 0, learner.text()

    run = run_file.run()
    records = [one.reward for _, groups in run.batches() for group in groups for one in group.trajectories]
    assert {record.verifier for record in records} == {"exact_match", "math"}
    assert all((record.service_id == "mathematician") == (record.verifier == "math") for record in records)
    told = {verifier for step in run.metrics("step") for verifier in step["reward_by_verifier"]}
    assert told == {"exact_match", "math"}
    assert set(run.metrics("evaluation")[-1]["accuracy_by_verifier"]) == {"exact_match"}
