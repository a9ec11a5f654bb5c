"""A run, and generators that join it, die, leave and return."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.chaos.faults import engine_core
from tests.e2e.processes import Launched, Launcher, until
from tests.e2e.run_files import RunFile, RunFolder, free_ports, token_lags, write_run_file

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

STEPS = 5000
"""More than the test waits for."""


@dataclass
class RunUnderWay:
    """A run under way, and its first generator."""

    launch: Launcher
    run_file: RunFile
    run: RunFolder
    learner: Launched
    first: Launched

    def generator(self, name: str, port: int) -> Launched:
        words = ("--config", str(self.run_file.path), "--http.port", str(port), "--id", name)
        return self.launch("generator", *words, "--drain-s", "2")

    def newest(self) -> int:
        return max([line["version"] for line in self.run.metrics("publish")], default=-1)

    def goes_on(self, *, steps: int = 10) -> None:
        """Waits for more steps."""
        goal = len(self.run.steps()) + steps
        until(lambda: len(self.run.steps()) >= goal, what=f"{steps} steps", during=[self.learner])

    def joins(self, name: str) -> list[dict[str, object]]:
        return [line for line in self.run.metrics("join") if line["generator_id"] == name]

    def serving(self) -> set[str]:
        """The generators that serve, as the learner sees it."""
        status = httpx.get(f"{self.run_file.url('learner')}/v1/status", timeout=30).json()
        return {peer["name"] for peer in status["peers"] if peer["serving_version"] is not None}


@pytest.fixture(scope="module")
def running(launcher: Launcher, model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunUnderWay:
    run_file = write_run_file(tmp_path_factory.mktemp("run"), model=model)
    words = ("--config", str(run_file.path))
    for name in ("reward-service", "env-service"):
        launcher(name, *words)
    first = launcher("generator", *words, "--id", "first")
    evaluation = ("--evaluation.tasks", "0", "--evaluation.final-tasks", "0")
    learner = launcher("learner", *words, "--steps", str(STEPS), "--max-lag", "4", *evaluation)
    running = RunUnderWay(launch=launcher, run_file=run_file, run=run_file.run(), learner=learner, first=first)
    until(lambda: len(running.run.steps()) >= 5, what="5 steps", timeout_s=600, during=[learner, first])
    return running


def serving_state(port: int) -> dict[str, object] | None:
    """A generator's own state; None while its engine starts."""
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}/v1/state", timeout=5)
    except httpx.HTTPError:
        return None
    state: dict[str, object] | None = answer.json() if answer.status_code == 200 else None
    return state


def served_number(port: int) -> int:
    """The number of the version that a generator serves; -1 if none."""
    version = str((serving_state(port) or {}).get("policy_version"))
    return int(version.partition(".")[2] or -1)


def test_a_generator_that_joins_in_the_middle_serves_the_current_version_with_the_learners_logprobs(
    running: RunUnderWay,
) -> None:
    (port,) = free_ports(1)
    second = running.generator("second", port)
    until(lambda: serving_state(port), what="its engine", timeout_s=600, during=[running.learner, second])
    until(lambda: running.joins("second"), what="the join", during=[running.learner, second])
    (joined,) = running.joins("second")[:1]
    assert isinstance(joined["seconds"], float)
    assert joined["seconds"] < 30
    assert isinstance(joined["probe_gap"], float)
    assert joined["probe_gap"] < 1e-3

    def follows() -> bool:
        return served_number(port) >= running.newest() - 1

    until(follows, what="the newest version on the second", during=[running.learner, second])
    until(
        lambda: any(line["members"] == 2 for line in running.run.metrics("publish")[-5:]),
        what="a broadcast to both", during=[running.learner, second, running.first],
    )  # fmt: skip
    running.goes_on()

    running.first.send(signal.SIGKILL)
    running.first.wait()
    running.goes_on()
    assert second.alive

    first = running.generator("first", running.run_file.generator)
    before = len(running.joins("first"))
    until(lambda: len(running.joins("first")) > before, what="the first's return", timeout_s=600, during=[first])
    running.goes_on()

    second.send(signal.SIGTERM)
    assert second.wait() == 0, second.text()
    assert "Traceback" not in second.text()
    running.goes_on()
    assert token_lags(running.run) <= set(range(5))
    assert all(line["probe_gap"] < 1e-3 for line in running.run.metrics("publish"))
    running.first = first


def test_a_generator_whose_engine_is_stopped_is_out_of_service_until_it_goes_on(running: RunUnderWay) -> None:
    """The last test: it leaves the learner with one generator that was away."""
    engine = engine_of(running.first)
    os.kill(engine, signal.SIGSTOP)
    try:
        until(
            lambda: "has not answered" in running.first.text(), what="the generator to notice",
            during=[running.first],
        )  # fmt: skip
        until(
            lambda: "first" not in running.serving(), what="the learner to hear it",
            during=[running.learner, running.first],
        )  # fmt: skip
    finally:
        os.kill(engine, signal.SIGCONT)
    # By a download; or, if it stood still in the middle of a commit, by the end of that, which is no join.
    until(lambda: "first" in running.serving(), what="its return", during=[running.first])
    running.goes_on()


def engine_of(generator: Launched) -> int:
    """The process that computes."""
    return until(lambda: engine_core(generator.pid), what="the engine's process", during=[generator])
