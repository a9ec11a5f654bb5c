"""A generator, reward-service and env-service that stay up, and learners that come and go."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, TypeAdapter

from services.process import huge_pages, parent_death_signal

Service = Literal["reward-service", "generator", "env-service"]
SERVICES: tuple[Service, ...] = ("reward-service", "generator", "env-service")
Options = Mapping[str, object]
_STARTS_WITHIN_S = 300
_ENDS_WITHIN_S = 60


def room_for(groups: int) -> Mapping[Service, Options]:
    """Room for so many groups of 8 in flight, all decoded at once. What is outstanding does not follow the generator's
    queue, which would keep tokens fresh.
    """
    return {
        "generator": {"engine.max-num-seqs": 8 * groups},
        "env-service": {"capacity": groups, "concurrency.adaptive": "false"},
    }


class LearnerFailed(Exception):
    """A learner that did not end well; the message says how, with the last of what it logged."""


class EvaluationNumbers(BaseModel):
    """The benchmark's part of an evaluation in summary.json."""

    accuracy: float
    accuracy_low: float
    accuracy_high: float


class SummaryNumbers(BaseModel):
    """The benchmark's part of summary.json."""

    evaluation_before: EvaluationNumbers
    evaluation_after: EvaluationNumbers
    steps: int
    train_wall_s: float
    completions_per_s: float
    lag_histogram: dict[int, int]
    max_lag_seen: int

    @property
    def lag_mean(self) -> float:
        """Of the trained trajectories, each by its oldest token."""
        total = sum(self.lag_histogram.values())
        return sum(lag * count for lag, count in self.lag_histogram.items()) / total


@dataclass(frozen=True)
class FinishedRun:
    """A run's folder, and what it came to."""

    folder: Path

    @property
    def summary(self) -> SummaryNumbers:
        """Of a run with evaluations."""
        return SummaryNumbers.model_validate_json((self.folder / "summary.json").read_text(encoding="utf-8"))

    @property
    def completions_per_s(self) -> float:
        """Of any run."""
        return float(json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))["completions_per_s"])

    def step_mean(self, name: str) -> float | None:
        """The mean over the steps of a number in metrics.jsonl, where steps have it."""
        values = [line[name] for line in self._lines("step") if line.get(name) is not None]
        numbers = TypeAdapter(list[float]).validate_python(values)
        return sum(numbers) / len(numbers) if numbers else None

    @property
    def guard_moves(self) -> int:
        """Number of times that the guard tightened the bound on the lag, or let it rise."""
        return sum(line["change"] != "powerless" for line in self._lines("guard"))

    def _lines(self, kind: str) -> Iterator[dict[str, object]]:
        for text in (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            line: dict[str, object] = json.loads(text)
            if line["kind"] == kind:
                yield line


@dataclass(frozen=True)
class Ports:
    """Ports of all processes on this host."""

    learner: int
    leases: int
    services: Mapping[Service, int]

    def options(self, service: Service) -> Options:
        """Options that tell `service` its own port and those of its peers."""
        own = {"http.port": self.services[service]}
        if service == "generator":
            return {**own, "join.learner": f"http://127.0.0.1:{self.learner}"}
        if service == "env-service":
            reward = f"http://127.0.0.1:{self.services['reward-service']}"
            return {**own, "learner": f"tcp://127.0.0.1:{self.leases}", "reward-urls": reward}
        return own


@dataclass(frozen=True)
class WarmSystem:
    """The services that stay; their logs and the runs are in `folder`."""

    config: Path
    folder: Path
    ports: Ports
    services: Mapping[Service, "subprocess.Popen[bytes]"]

    def learn(self, name: str, *, options: Options, limit_s: float) -> FinishedRun:
        """Runs a learner to its end in a new folder. Raises RunFailed; SystemExit if a service has died."""
        for service, process in self.services.items():
            if process.poll() is not None:
                raise SystemExit(f"{service} ended with {process.returncode}; its log is in {self.folder}")
        log = self.folder / f"{name}.log"
        with self.learning(name, options=options) as process:
            self._await_end(process, log=log, limit_s=limit_s)
        return FinishedRun(self.folder / name)

    @contextmanager
    def learning(
        self, name: str, *, options: Options, command: Sequence[str] = ()
    ) -> Iterator["subprocess.Popen[bytes]"]:
        """A learner in a new folder, ended when the body ends; `command` if it is not the command `learner`."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        place = {
            "run.name": name,
            "run.directory": self.folder,
            "http.port": self.ports.learner,
            "leases.address": f"tcp://127.0.0.1:{self.ports.leases}",
        }
        log = self.folder / f"{name}.log"
        options = {**place, **options}
        with _started("learner", config=self.config, options=options, log=log, command=command) as process:
            yield process

    @staticmethod
    def _await_end(process: "subprocess.Popen[bytes]", *, log: Path, limit_s: float) -> None:
        try:
            status = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired as error:
            raise LearnerFailed(f"not done after {limit_s:.0f} s: {_last_line(log)}") from error
        if status != 0:
            raise LearnerFailed(f"ended with {status}: {_last_line(log)}")


@contextmanager
def warm_system(config: Path, *, folder: Path, options: Mapping[Service, Options]) -> Iterator[WarmSystem]:
    """Runs the services on free ports until the body ends; enters when each of them answers."""
    folder.mkdir(parents=True, exist_ok=True)
    learner, leases, *others = _free_ports(2 + len(SERVICES))
    ports = Ports(learner=learner, leases=leases, services=dict(zip(SERVICES, others, strict=True)))
    with ExitStack() as stack:
        processes = {}
        for name in SERVICES:
            chosen = {**ports.options(name), **options.get(name, {})}
            log = folder / f"{name}.log"
            processes[name] = stack.enter_context(_started(name, config=config, options=chosen, log=log))
            _await_health(name, processes[name], port=ports.services[name], log=log)
        yield WarmSystem(config=config, folder=folder, ports=ports, services=processes)


@contextmanager
def _started(
    name: str, *, config: Path, options: Options, log: Path, command: Sequence[str] = ()
) -> Iterator["subprocess.Popen[bytes]"]:
    """A command of Headway, or what is given in its place, ended when the body ends. As `headway up` does, memory comes
    in huge pages to a learner.
    """
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    whole = [*(command or [str(Path(sys.executable).with_name(name))]), "--config", str(config), *words]
    environment = {**os.environ, **(huge_pages(os.environ) if name == "learner" else {})}
    with log.open("wb") as file:
        process = subprocess.Popen(whole, stdout=file, stderr=file, env=environment, preexec_fn=parent_death_signal)
        try:
            yield process
        finally:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(timeout=_ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _await_health(name: str, process: "subprocess.Popen[bytes]", *, port: int, log: Path) -> None:
    url = f"http://127.0.0.1:{port}/healthz"
    for _ in range(_STARTS_WITHIN_S * 2):
        if process.poll() is not None:
            raise SystemExit(f"{name} ended with {process.returncode} before it answered: {_last_line(log)}")
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.5)
    raise SystemExit(f"{name} does not answer at {url}")


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(listener.getsockname()[1]) for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "no output")[-500:]
