"""Two reward services, of which one is killed and comes back under another name while a run goes on."""

import signal
from pathlib import Path

import httpx
import pytest

from protocol.trajectories import RewardRecord
from tests.e2e.processes import Launched, Launcher, until
from tests.e2e.run_files import RunFile, RunFolder, free_ports, write_run_file

pytestmark = pytest.mark.e2e

PATIENCE_S = 180.0


def reward_service(launcher: Launcher, run_file: RunFile, *, port: int, name: str) -> Launched:
    return launcher("reward-service", "--config", str(run_file.path), "--http.port", str(port), "--id", name)


def measured(url: str, metric: str) -> float:
    """The sum of a metric over its labels; 0 of a process that is not up yet."""
    try:
        lines = httpx.get(f"{url}/metrics", timeout=20).text.splitlines()
    except httpx.TransportError:
        return 0.0
    return sum(float(line.split()[-1]) for line in lines if line.startswith(metric))


def rewards_of(run: RunFolder) -> list[RewardRecord]:
    """The rewards of what was trained so far."""
    return [one.reward for _, groups in run.batches() for group in groups for one in group.trajectories]


def test_a_reward_service_that_dies_and_returns_costs_no_lease(
    launcher: Launcher, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run_file = write_run_file(tmp_path_factory.mktemp("rewards"), model=model)
    run, config, (other,) = run_file.run(), ("--config", str(run_file.path)), free_ports(1)
    urls = [run_file.url("reward"), f"http://127.0.0.1:{other}"]
    during = [
        launcher("generator", *config),
        launcher("env-service", *config, "--reward-urls", f'["{urls[0]}", "{urls[1]}"]'),
        reward_service(launcher, run_file, port=run_file.reward, name="stays"),
        learner := launcher(
            "learner", *config, "--steps", "100000", "--evaluation.tasks", "0", "--checkpoint.keep", "1000"
        ),  # each checkpoint is kept, and with it the journal back to the first batch
    ]

    def goes_on(what: str) -> None:
        so_far = len(run.steps())
        until(lambda: len(run.steps()) >= so_far + 5, what=f"steps {what}", timeout_s=PATIENCE_S, during=during)

    def is_trained_on(name: str, who: Launched) -> None:
        def found() -> bool:
            return name in {reward.service_id for reward in rewards_of(run)}

        until(found, what=f"rewards of {name}", timeout_s=PATIENCE_S, during=[*during, who])

    goes_on("with one of two services")
    is_trained_on("first", first := reward_service(launcher, run_file, port=other, name="first"))
    first.send(signal.SIGKILL)
    first.wait()
    goes_on("without the one that was killed")
    is_trained_on("second", reward_service(launcher, run_file, port=other, name="second"))
    failed = measured(run_file.url("env"), "headway_env_service_failed_leases_total")
    learner.send(signal.SIGTERM)
    assert learner.wait() == 0, learner.text()

    assert failed == 0
    rewards = rewards_of(run)
    assert {reward.service_id for reward in rewards} == {"stays", "first", "second"}
    assert {reward.endpoint for reward in rewards} == set(urls)
    assert all(reward.reward is not None for reward in rewards)
