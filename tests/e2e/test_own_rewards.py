"""An environment that gives all rewards itself is trained without a reward service."""

import json
from pathlib import Path

import pytest

from headway.new_project import make_tiny_model
from tests.e2e.processes import Launcher, marked
from tests.e2e.run_files import RunFolder, free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]  # torch, vLLM and DeepSpeed are loaded on a busy machine

_STEPS = 2
_ENVIRONMENT = '''\
"""Sums whose right digit is rewarded here."""

from env_service.environments.interface import Action, Step, Task
from env_service.environments.rules import Rules


class Sums:
    rules = Rules(max_turns=1)
    roles = ()

    def reset(self, task: Task, seed: int) -> str:
        self._first, self._second = task.seed % 5, task.seed % 4
        return f"{self._first}+{self._second}="

    def step(self, action: Action) -> Step:
        return Step(reward=float(action.text.startswith(str(self._first + self._second))), stop="over")
'''
_RUN = """\
[learner]
model = "model"
algo = "grpo"
steps = {steps}
groups_per_step = 4
rollouts = {{ group_size = 4, max_tokens = 3 }}
evaluation = {{ tasks = 0, final_tasks = 0 }}
leases.address = "tcp://127.0.0.1:{leases}"
http.port = {learner}

[generator]
model = "model"
engine = {{ dtype = "float32", max_model_len = 32, kv_cache_gb = 0.25 }}
http.port = {generator}
join.learner = "http://127.0.0.1:{learner}"

[env-service]
model = "model"
learner = "tcp://127.0.0.1:{leases}"
http.port = {env}

[[env-service.environments]]
name = "sums"
source = "sums:Sums"
"""


def test_an_environment_with_rewards_of_its_own_needs_no_reward_service(launcher: Launcher, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model")
    (tmp_path / "sums.py").write_text(_ENVIRONMENT)
    learner, leases, generator, env = free_ports(4)
    run_file = tmp_path / "run.toml"
    run_file.write_text(_RUN.format(steps=_STEPS, learner=learner, leases=leases, generator=generator, env=env))

    checked = launcher("headway", "check", str(run_file))
    assert checked.wait() == 0, checked.text()
    up = launcher("headway", "up", str(run_file))
    assert up.wait(timeout_s=900) == 0, up.text()

    assert "reward service" not in up.text()
    run = RunFolder(tmp_path / "runs" / run_file.parent.name)
    assert len(run.metrics("step")) == _STEPS
    samples = [json.loads(line) for line in (run.path / "samples.jsonl").read_text().splitlines()]
    assert samples
    assert marked(launcher.mark) == {}
