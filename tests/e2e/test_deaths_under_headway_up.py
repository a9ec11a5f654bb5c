"""`headway up` keeps a run going whatever dies; `headway doctor` says who is dead, who hangs, and that all is well."""

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from services.local_processes import listener_of
from tests.e2e.processes import Launched, Launcher, marked, until
from tests.e2e.run_files import GROUPS_PER_STEP, RunFile, RunFolder, write_run_file

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ENDLESS = 100_000
"""Steps of a run that is stopped, and resumed for a few more: a fast machine would end any other one too early."""
RESTART_S = 180


@dataclass(frozen=True)
class RunUnderHeadwayUp:
    """A run under `headway up`, and the doctor for it."""

    launch: Launcher
    run_file: RunFile
    up: Launched

    @property
    def run(self) -> RunFolder:
        return self.run_file.run()

    def doctor(self, *words: str) -> tuple[int, str]:
        process = self.launch("headway", "doctor", str(self.run_file.path), *words)
        return process.wait(), process.text()

    def examined(self) -> tuple[int, dict[str, Any]]:
        code, text = self.doctor("--json")
        found: dict[str, Any] = json.loads(text)
        return code, found

    def pid(self, service: str) -> int:
        def listening() -> int | None:
            process = listener_of(getattr(self.run_file, service))
            return None if process is None else process.pid

        return until(listening, what=f"the {service} to listen", timeout_s=RESTART_S, during=[self.up])

    def send(self, service: str, number: signal.Signals) -> int:
        pid = self.pid(service)
        os.kill(pid, number)
        return pid

    def wait_for_steps(self, more: int) -> None:
        """Waits until so many more steps are trained."""
        goal = len(self.run.steps()) + more
        until(lambda: len(self.run.steps()) >= goal, what=f"{more} steps", timeout_s=RESTART_S, during=[self.up])

    def wait_for_health(self) -> None:
        until(lambda: self.doctor()[0] == 0, what="a healthy system", timeout_s=RESTART_S, during=[self.up])


@pytest.fixture(scope="module")
def system(launcher: Launcher, model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunUnderHeadwayUp:
    run_file = write_run_file(tmp_path_factory.mktemp("run"), model=model, token="let-me-in")
    doctor = launcher("headway", "doctor", str(run_file.path))
    assert doctor.wait() == 0, doctor.text()
    assert "before a start (no process of the config file answers)" in doctor.text()
    return RunUnderHeadwayUp(
        launch=launcher, run_file=run_file, up=start(launcher, run_file, "--learner.steps", str(ENDLESS))
    )


def start(launch: Launcher, run_file: RunFile, *words: str) -> Launched:
    # Each checkpoint is kept, and with it the journal back to the first batch.
    frequent = ("--learner.checkpoint.every-steps", "10", "--learner.checkpoint.keep", "1000")
    return launch("headway", "up", str(run_file.path), *frequent, "--learner.evaluation.tasks", "0", *words)


def test_a_healthy_run_is_called_healthy(system: RunUnderHeadwayUp) -> None:
    system.wait_for_steps(2)
    system.wait_for_health()
    code, found = system.examined()
    assert (code, found["mode"], found["healthy"], found["culprits"]) == (0, "running", True, [])
    assert [one["kind"] for one in found["processes"]] == ["learner", "generator", "reward-service", "env-service"]
    assert {one["condition"] for one in found["processes"]} == {"answers"}
    learner = found["processes"][0]["status"]
    assert (learner["progress"]["unit"], learner["progress"]["total"]) == ("steps", ENDLESS)
    assert {peer["kind"] for peer in learner["peers"]} == {"generator", "env-service"}


def test_a_stopped_generator_is_named_as_hanging(system: RunUnderHeadwayUp) -> None:
    pid = system.send("generator", signal.SIGSTOP)
    try:
        code, text = system.doctor()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert code == 1
    assert f"culprit: generator localhost:{system.run_file.generator}\n    hangs: accepts connections" in text
    assert f"kill -CONT {pid} lets it go on" in text
    assert text.count("culprit") == 1
    system.wait_for_health()


def test_a_killed_generator_is_named_as_dead_and_comes_back(system: RunUnderHeadwayUp) -> None:
    killed = system.send("generator", signal.SIGKILL)
    code, found = system.examined()
    assert code == 1
    (culprit,) = found["culprits"]
    assert culprit["who"] == f"generator localhost:{system.run_file.generator}"
    assert culprit["what"].startswith("dead: ")
    system.wait_for_health()
    assert system.pid("generator") != killed
    assert "generator was killed by SIGKILL; started again in 1 s (1 of 5)" in system.up.text()
    system.wait_for_steps(5)


def test_a_killed_learner_resumes_its_own_run(system: RunUnderHeadwayUp) -> None:
    system.send("learner", signal.SIGKILL)
    until(
        lambda: "learner was killed by SIGKILL; started again in 1 s (1 of 5)" in system.up.text(),
        what="the restart of the learner", during=[system.up],
    )  # fmt: skip
    system.wait_for_steps(5)


def test_a_killed_env_service_comes_back(system: RunUnderHeadwayUp) -> None:
    killed = system.send("env", signal.SIGKILL)
    system.wait_for_steps(5)
    assert system.pid("env") != killed


def test_the_run_ends_well_with_every_step_once(system: RunUnderHeadwayUp) -> None:
    """The last test: it stops the run, and resumes it for five more steps."""
    system.up.send(signal.SIGINT)
    assert system.up.wait() == 0, system.up.text()
    last = len(system.run.batches()) + 5
    resumed = start(system.launch, system.run_file, "--learner.resume", "true", "--learner.steps", str(last))
    assert resumed.wait(timeout_s=300) == 0, resumed.text()
    assert marked(system.launch.mark) == {}
    run = system.run
    replayed = [line["step"] for line in run.metrics("replay")]
    assert set(run.steps()) | set(replayed) == set(range(1, last + 1))
    assert len(run.steps()) == len(set(run.steps()))
    assert [version for version, _ in run.batches()] == list(range(last))
    leases = [group.lease_id for _, groups in run.batches() for group in groups]
    assert len(leases) == len(set(leases)) == last * GROUPS_PER_STEP
