"""The real processes, one by one, with a link or a tap between any two of them.

    generator g1, g2 ◀─link "generator:g1"── learner (control), env_services (traffic)
    learner HTTP     ◀─link "learner:g1"──── generators: announcements and pulls, a link each
    learner leases   ◀─link "leases"─ tap ◀─link "env:e1"── env_services
    reward r1, r2    ◀─link "reward:r1"───── env_services

Start, stop and judge from one thread: the kernel ends a process when the thread that started it ends.
"""

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM, Signals
from typing import Any, Self

import httpx

from services.process import START_AGAIN
from tests.chaos.control_watch import ControlWatch
from tests.chaos.faults import engine_core, send, tree
from tests.chaos.history import SystemHistory, read_history
from tests.chaos.invariants import RunTerms
from tests.chaos.journal_reader import Archive, Place, journal_end
from tests.chaos.lease_tap import LeaseTap
from tests.chaos.network import ChaosLink, LinkNetwork
from tests.chaos.run_config import RunSize, write_config
from tests.e2e.processes import Launched, Launcher, kill_marked, marked, until
from tests.e2e.run_files import RunFolder, free_ports

SHIM = Path(__file__).with_name("clock_shim")
LEARNER = "learner"
RANK_SILENCE_S = 5.0
RANKS_END_S = 20.0
"""Longest time from the death of one rank to the end of all of them."""


@dataclass
class Node:
    """A process of the system, through all of its starts. `words` are its command line after the run file."""

    name: str
    command: str
    words: Sequence[str]
    port: int
    launched: Launched | None = None
    starts: int = 0

    @property
    def alive(self) -> bool:
        return self.launched is not None and self.launched.alive

    @property
    def process(self) -> Launched:
        assert self.launched is not None, f"{self.name} was never started"
        return self.launched


@dataclass
class RunCounts:
    """Steps and publishes in metrics.jsonl so far. It is asked for often: only new lines are read."""

    steps: int = 0
    publishes: int = 0
    end: int = 0

    def read(self, path: Path) -> Self:
        if path.exists():
            with path.open("rb") as file:
                file.seek(self.end)
                for line in file:
                    if line.endswith(b"\n"):
                        self.end += len(line)
                        self._note(json.loads(line))
        return self

    def _note(self, line: Mapping[str, object]) -> None:
        self.publishes += "probe_gap" in line
        if line["kind"] == "step":
            self.steps = max(self.steps, int(str(line["step"])))


@dataclass
class ChaosSystem:
    """Nodes and links by name. `starts` has the journal's end before each start of the learner, by incarnation."""

    launch: Launcher
    folder: Path
    run_file: Path
    size: RunSize
    network: LinkNetwork
    tap: LeaseTap
    nodes: dict[str, Node]
    links: dict[str, ChaosLink]
    watches: dict[str, ControlWatch]
    archive: Archive
    tasks_once: bool = True
    ranks: int = 1
    starts: dict[int, Place] = field(default_factory=dict)
    progress: RunCounts = field(default_factory=RunCounts)

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.folder / "runs" / "chaos")

    def start(self, name: str, *words: str) -> None:
        """Starts a node, or starts it again; the learner resumes its run."""
        node = self.nodes[name]
        assert not node.alive, f"{name} runs already"
        resume = ["--resume", "true"] if name == LEARNER and node.starts else []
        if name == LEARNER:
            self.starts[node.starts + 1] = journal_end(self.run.path)
        node.launched = self.launch(node.command, "--config", str(self.run_file), *node.words, *resume, *words)
        node.starts += 1

    def start_all(self, *names: str) -> None:
        """All nodes, or these."""
        for name in names or tuple(self.nodes):
            self.start(name)

    def pids(self, name: str, *, engine_only: bool = False) -> list[int]:
        """A node's processes; of a generator the engine's alone, if asked."""
        pid = self.nodes[name].process.pid
        if not engine_only:
            return tree(pid)
        core = engine_core(pid)
        return [] if core is None else tree(core)

    def signal(self, name: str, number: Signals, *, engine_only: bool = False) -> None:
        """Sends a signal to all of a node's processes."""
        send(number, self.pids(name, engine_only=engine_only))

    def victims(self, rank: int | None) -> list[int]:
        """The learner's processes, or that of one of its ranks: without rank 0 there are no others, either."""
        found = tree(self.nodes[LEARNER].process.pid)
        return [found[rank]] if rank is not None and rank < len(found) else found

    def kill(self, name: str) -> None:
        """SIGKILL to all of a node's processes; returns when it is gone."""
        self.signal(name, SIGKILL)
        self.nodes[name].process.wait(timeout_s=60)

    def kill_learner(self, rank: int | None) -> None:
        """SIGKILL to the learner, or to one of its ranks; returns when all of it is gone, and says how if by itself."""
        process, victims = self.nodes[LEARNER].process, self.victims(rank)
        send(SIGKILL, victims)
        code = process.wait(timeout_s=RANKS_END_S)
        assert process.pid in victims or code == START_AGAIN, f"it ended with {code}, expected {START_AGAIN}"

    def hang(self, name: str, *, engine_only: bool = False) -> Callable[[], None]:
        """SIGSTOP; returns what lets it go on."""
        pids = self.pids(name, engine_only=engine_only)
        send(SIGSTOP, pids)
        return lambda: send(SIGCONT, pids)

    def stop(self, name: str, *, timeout_s: float = 30.0) -> int:
        """SIGTERM to the node's first process, as an operator ends it; its exit code."""
        self.nodes[name].process.send(SIGTERM)
        return self.nodes[name].process.wait(timeout_s=timeout_s)

    def ask(self, name: str, path: str, **request: Any) -> httpx.Response:
        """An HTTP request straight to a node, past its links."""
        method = "POST" if request else "GET"
        return httpx.request(method, f"http://127.0.0.1:{self.nodes[name].port}{path}", timeout=20, **request)

    def state(self, name: str) -> dict[str, Any]:
        """A generator's own state; empty if it does not answer."""
        try:
            answer = self.ask(name, "/v1/state")
            state: dict[str, Any] = answer.json() if answer.status_code == 200 else {}
            return state
        except httpx.HTTPError:
            return {}

    def serves(self, name: str) -> bool:
        """True if a generator serves some version."""
        return bool(self.nodes[name].alive and self.state(name).get("serving"))

    def steps(self) -> int:
        """The newest step that metrics.jsonl tells of."""
        return self.progress.read(self.run.path / "metrics.jsonl").steps

    def published(self) -> int:
        """Number of publishes in metrics.jsonl."""
        return self.progress.read(self.run.path / "metrics.jsonl").publishes

    def wait(self, condition: Callable[[], object], what: str, *, timeout_s: float) -> float:
        """Waits for a condition; the seconds that it took. A wait in vain names the nodes that ended by themselves."""
        began = time.monotonic()
        try:
            until(lambda: condition() or None, what=what, timeout_s=timeout_s)
        except AssertionError as error:
            raise AssertionError("; ".join([str(error), *self.ended_by_itself()])) from error
        return time.monotonic() - began

    def ended_by_itself(self) -> list[str]:
        """Nodes that were started, are gone, and did not end well; the last line of each says why."""
        gone = [node for node in self.nodes.values() if node.launched is not None and not node.alive]
        return [f"{node.name}: {_last_line(node.process.text())}" for node in gone]

    def history(self) -> SystemHistory:
        """The history of the run until now, from files and wire."""
        self.archive.look()
        return read_history(self.run.path, archive=self.archive.folder, starts=self.starts, tap=self.tap.records)

    @property
    def terms(self) -> RunTerms:
        return RunTerms(
            steps=self.size.steps,
            groups_per_step=self.size.groups_per_step,
            max_lag=self.size.max_lag,
            tasks=self.size.tasks if self.tasks_once else None,
        )

    def heal(self) -> None:
        """All links and the tap pass everything again, without delay."""
        self.tap.calm()
        for link in self.links.values():
            link.heal()

    def pace(self, delay_s: float) -> None:
        """Delays every reward, both ways, so that the epoch lasts; 0 lets it run."""
        for name, link in self.links.items():
            if name.startswith("reward:"):
                link.trouble().delay_s = delay_s

    def jump(self, offset_s: float) -> None:
        """The wall clock of all processes goes by so much more than the kernel's."""
        draft = self.folder / "clock.new"
        draft.write_text(str(offset_s), encoding="utf-8")
        draft.replace(self.folder / "clock")

    def revive(self, *names: str) -> list[str]:
        """Starts whatever has ended, or what of these; says why each had."""
        found = []
        for node in self.nodes.values():
            if node.launched is not None and not node.alive and (not names or node.name in names):
                found.append(f"{node.name}: {_last_line(node.process.text())}")
                self.start(node.name)
        return found

    def end_all(self) -> list[str]:
        """Ends every node in good order; returns what is left of them then, which should be nothing."""
        for node in self.nodes.values():
            if node.alive:
                self.signal(node.name, SIGCONT)
                node.process.send(SIGTERM)
        deadline = time.monotonic() + 20
        while marked(self.launch.mark) and time.monotonic() < deadline:
            for node in self.nodes.values():
                _ = node.alive  # reaps it
            time.sleep(0.1)
        return list(marked(self.launch.mark).values())


@contextmanager
def chaos_system(
    folder: Path,
    *,
    model: Path,
    size: RunSize,
    generators: Sequence[str] = ("g1", "g2"),
    envs: Sequence[str] = ("e1",),
    rewards: Sequence[str] = ("r1",),
    run_file: Path | None = None,
    learner_words: Sequence[str] = (),
    ranks: int = 1,
) -> Iterator[ChaosSystem]:
    """Nothing is started yet. At the end everything is killed. `run_file` is another one than the short epoch's."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [*generators, *envs, *rewards]
    ports = dict(zip([LEARNER, "leases", *names], free_ports(2 + len(names)), strict=True))
    clock = folder / "clock"
    launch = Launcher(folder=folder, environment=_environment(clock))
    run = folder / "runs" / "chaos"
    with ExitStack() as stack:
        network = stack.enter_context(LinkNetwork())
        watches = {name: ControlWatch() for name in generators}
        links = {f"generator:{name}": network.link(ports[name], watcher=watches[name]) for name in generators}
        links |= {f"learner:{name}": network.link(ports[LEARNER], watcher=ControlWatch()) for name in generators}
        links |= {f"reward:{name}": network.link(ports[name]) for name in rewards}
        links["leases"] = network.link(ports["leases"])
        tap = stack.enter_context(
            LeaseTap(learner_port=lambda: links["leases"].port, journal_end=lambda: journal_end(run))
        )
        links |= {f"env:{name}": network.link(tap.port) for name in envs}
        reward_urls = [f"http://127.0.0.1:{links[f'reward:{name}'].port}" for name in rewards]
        path = run_file or write_config(folder, model=model, size=size, reward_urls=reward_urls)
        archive = stack.enter_context(Archive(run=run, folder=folder / "archive"))
        if ranks > 1:  # whoever watches the history starts it again, and so knows where each of its lives begins
            silence = ("--training.rank-silence-s", str(RANK_SILENCE_S))
            learner_words = (*learner_words, "--ranks", str(ranks), "--rank-restarts", "0", *silence)
        where = ("--run.name", "chaos", "--run.directory", str(folder / "runs"))
        nodes = [
            Node(LEARNER, "learner", (*_learner_words(ports), *where, *learner_words), ports[LEARNER]),
            *(Node(name, "generator", _generator_words(name, ports, links), ports[name]) for name in generators),
            *(Node(name, "reward-service", ("--http.port", str(ports[name])), ports[name]) for name in rewards),
            *(Node(name, "env-service", _env_words(name, ports, links, reward_urls), ports[name]) for name in envs),
        ]
        system = ChaosSystem(
            launch=launch, folder=folder, run_file=path, size=size, network=network, tap=tap,
            nodes={node.name: node for node in nodes}, links=links, watches=watches, archive=archive,
            tasks_once=run_file is None, ranks=ranks,
        )  # fmt: skip
        try:
            yield system
        finally:
            for launched in launch.launched:
                launched.end()
            kill_marked(launch.mark)


def _learner_words(ports: dict[str, int]) -> Sequence[str]:
    return ("--http.port", str(ports[LEARNER]), "--leases.address", f"tcp://127.0.0.1:{ports['leases']}")


def _generator_words(name: str, ports: dict[str, int], links: dict[str, ChaosLink]) -> Sequence[str]:
    return (
        "--http.port", str(ports[name]), "--id", name,
        "--join.url", f"http://127.0.0.1:{links[f'generator:{name}'].port}",
        "--join.learner", f"http://127.0.0.1:{links[f'learner:{name}'].port}",
    )  # fmt: skip


def _env_words(name: str, ports: dict[str, int], links: dict[str, ChaosLink], reward_urls: list[str]) -> Sequence[str]:
    return (
        "--http.port", str(ports[name]), "--env-id", name,
        "--learner", f"tcp://127.0.0.1:{links[f'env:{name}'].port}",
        "--reward-urls", json.dumps(reward_urls),
    )  # fmt: skip


def _environment(clock: Path) -> dict[str, str]:
    clock.write_text("0", encoding="utf-8")
    paths = [str(SHIM), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "CHAOS_CLOCK_FILE": str(clock)}


def _last_line(text: str) -> str:
    lines = [line for line in re.split(r"[\r\n]+", text) if line.strip()]
    return lines[-1] if lines else "it said nothing"
