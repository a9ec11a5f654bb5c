"""A scenario's frame: a running system in, faults by the scenario, then the end of the epoch and all checks."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from signal import SIGCONT, SIGSTOP

from httpx import HTTPError

from tests.chaos.alerts import alerts_watched
from tests.chaos.books import books_of
from tests.chaos.faults import send
from tests.chaos.invariants import books_balance, complaints
from tests.chaos.kill_points import recovery
from tests.chaos.outcomes import ScenarioOutcome
from tests.chaos.run_config import RunSize
from tests.chaos.system import LEARNER, RANKS_END_S, ChaosSystem, chaos_system
from tests.chaos.weights_check import Sampled, sample_at_checkpoint, serves_checkpoint, serves_exported_weights
from tests.e2e.mixture import write_mixture

EVEN_LOAD = ("--training.router.aux-loss-coef", "1.0")

FIRES_WITHIN_S = 15.0
"""An alert, after the end of its scenario."""
JOIN_S = 300.0
SAMPLE_S = 90.0
END_S = 600.0
"""Of an epoch without faults, from one step to the next, and from the last one to the end."""


@dataclass
class Trial:
    """A system under way, a source of chance, and what is found."""

    system: ChaosSystem
    random: Random
    outcome: ScenarioOutcome
    say: Callable[[str], None]
    expected: set[str] = field(default_factory=set)
    """Nodes that the scenario has killed: they do not end by themselves."""
    sampled: list[Sampled] = field(default_factory=list)
    """Samples of generators under versions of which there is a checkpoint."""

    def note(self, text: str) -> None:
        """For the reader of the results."""
        self.say(text)
        self.outcome.notes.append(text)

    def complain(self, text: str) -> None:
        """Something that must hold does not."""
        self.say(f"BROKEN {text}")
        self.outcome.complaints.append(text)

    def recover(self, fault: str, *, since: float, patience_s: float = 240.0) -> bool:
        """Waits until the run goes on, and writes it down; whether it did."""
        try:
            found = recovery(self.system, fault, since=since, patience_s=patience_s, meanwhile=self.mend)
        except AssertionError as error:
            self.complain(f"{fault}: {error}; processes that ended: {self.system.ended_by_itself()}")
            return False
        self.say(str(found))
        self.outcome.recoveries.append(found)
        return True

    def mend(self) -> None:
        """Starts what has ended though nobody killed it, and complains of it."""
        for name in [name for name, node in self.system.nodes.items() if node.launched is not None and not node.alive]:
            if name not in self.expected and not self._is_at_its_end(name):
                self.complain("; ".join(f"ended by itself: {text}" for text in self.system.revive(name)))

    def revive(self) -> None:
        """`mend`, and starts again what was killed."""
        self.mend()
        for name in sorted(self.expected):
            self.system.revive(name)
        self.expected.clear()

    def _is_at_its_end(self, name: str) -> bool:
        return name == LEARNER and self.system.nodes[name].process.wait(timeout_s=1) == 0

    def kill(self, name: str) -> float:
        """SIGKILL; when it was."""
        self.expected.add(name)
        self.system.kill(name)
        return time.monotonic()

    def kill_learner(self) -> float:
        """SIGKILL to the learner, of several ranks to one by chance; when it was."""
        self.expected.add(LEARNER)
        struck = time.monotonic()
        self.system.kill_learner(self.any_rank())
        return struck

    def any_rank(self) -> int | None:
        """A rank of the learner by chance, None if it has only one."""
        return None if self.system.ranks == 1 else self.random.randrange(self.system.ranks)

    def hang_learner(self) -> Callable[[], None]:
        """SIGSTOP to the learner, of several ranks to one by chance; returns what lets it go on.

        A rank that is silent for too long is given up by the others, which then end.
        """
        rank = self.any_rank()
        victims = self.system.victims(rank)
        send(SIGSTOP, victims)

        def go_on() -> None:
            send(SIGCONT, victims)
            process = self.system.nodes[LEARNER].process
            if rank and not all(Path(f"/proc/{victim}").exists() for victim in victims):
                self.expected.add(LEARNER)
                process.wait(timeout_s=RANKS_END_S)

        return go_on

    def restart(self, name: str) -> None:
        """Starts a node that was killed."""
        self.expected.discard(name)
        self.system.start(name)

    def serves(self, name: str) -> float:
        """Waits until a generator serves; the seconds from its being ready for requests until then."""
        system = self.system
        try:
            system.wait(lambda: system.state(name), f"{name} to be ready", timeout_s=JOIN_S)
            joined_s = system.wait(lambda: system.serves(name), f"{name} to serve", timeout_s=JOIN_S)
        except AssertionError as error:
            self.complain(str(error))
            self.revive()
            return float("inf")
        return joined_s

    def sample(self, name: str) -> None:
        """Notes what a generator that serves gives under a version that is a checkpoint, to be judged at the end."""
        try:
            found = sample_at_checkpoint(self.system, name, patience_s=SAMPLE_S)
        except (AssertionError, OSError, ValueError, HTTPError) as error:
            self.complain(f"{name} was not compared with a checkpoint: {type(error).__name__}: {error}")
            return
        self.sampled.append(found)
        self.say(f"{name} was asked at version {found.version}, of which there is a checkpoint")


Scenario = Callable[[Trial], None]


@dataclass(frozen=True)
class ScenarioSetting:
    """Setting of a scenario. `delay_s` is that of each reward, so that the epoch lasts. `alerts` must fire while it
    is played, where Prometheus is installed; None: no alert may. `mixture`: of a random mixture of experts in place of
    the demo's model; it earns nothing, so that the load-balancing loss alone moves it.
    """

    play: Scenario
    steps: int = 150
    delay_s: float = 0.4
    generators: Sequence[str] = ("g1", "g2")
    first: Sequence[str] | None = None
    envs: Sequence[str] = ("e1",)
    rewards: Sequence[str] = ("r1",)
    learner_words: Sequence[str] = ()
    ranks: int = 1
    alerts: Collection[str] | None = frozenset()
    mixture: bool = False


def run_trial(
    name: str, stage: ScenarioSetting, *, folder: Path, model: Path, seed: int, say: Callable[[str], None]
) -> ScenarioOutcome:
    """Plays a scenario to the end of its epoch and judges it."""
    began = time.monotonic()
    outcome = ScenarioOutcome(scenario=name, seed=seed)
    size = RunSize(steps=stage.steps)
    with chaos_system(
        folder,
        model=write_mixture(folder / "mixture") if stage.mixture else model,
        size=size,
        generators=stage.generators,
        envs=stage.envs,
        rewards=stage.rewards,
        ranks=stage.ranks,
        learner_words=(*stage.learner_words, *(EVEN_LOAD if stage.mixture else ())),
    ) as system:
        trial = Trial(system=system, random=Random(seed), outcome=outcome, say=say)
        with _told(trial):
            _begin(trial, stage)
            _play(trial, stage)
            finish(trial)
    outcome.seconds = time.monotonic() - began
    return outcome


def _play(trial: Trial, stage: ScenarioSetting) -> None:
    with alerts_watched(trial.system) as alerts:
        stage.play(trial)
        if alerts is None:
            trial.note("alerts were not watched: prometheus is not installed")
            return
        fired = alerts.wait_for(stage.alerts or (), patience_s=FIRES_WITHIN_S)
    trial.note(f"alerts that fired: {', '.join(sorted(fired)) or 'none'}")
    if stage.alerts is None and fired:
        trial.complain(f"alerts fired where nothing was wrong: {sorted(fired)}")
    if missing := set(stage.alerts or ()) - fired:
        trial.complain(f"alerts did not fire: {sorted(missing)}")


@contextmanager
def _told(trial: Trial) -> Iterator[None]:
    """A scenario that cannot go on is a complaint; whatever hangs is let go."""
    try:
        yield
    except (AssertionError, OSError, TimeoutError) as error:
        trial.complain(f"the scenario could not go on: {type(error).__name__}: {error}")
    finally:
        trial.system.heal()
        for node in trial.system.nodes.values():
            if node.alive:
                trial.system.signal(node.name, SIGCONT)
        if left := trial.system.end_all():
            trial.complain(f"left behind: {left}")


def _begin(trial: Trial, stage: ScenarioSetting) -> None:
    system = trial.system
    system.pace(stage.delay_s)
    generators = tuple(stage.generators if stage.first is None else stage.first)
    system.start_all(LEARNER, *generators, *stage.envs, *stage.rewards)
    for name in generators:
        trial.serves(name)
    system.wait(lambda: system.steps() >= 2, "two steps", timeout_s=240)
    trial.say("two steps are done")


def finish(trial: Trial) -> None:
    """Lets the epoch end without faults, then checks everything."""
    system = trial.system
    system.heal()
    trial.mend()
    learner = system.nodes[LEARNER]
    steps, since = system.steps(), time.monotonic()
    while learner.alive and time.monotonic() - since < END_S:
        time.sleep(0.2)
        if system.steps() > steps:
            steps, since = system.steps(), time.monotonic()
    if learner.alive or learner.process.wait(timeout_s=1) != 0:
        trial.complain(f"the run did not end well at step {system.steps()}: {learner.process.text()[-600:]}")
        return
    judge(trial)


def judge(trial: Trial) -> None:
    """All invariants of a run that has ended."""
    system = trial.system
    history, terms = system.history(), system.terms
    trial.outcome.complaints += complaints(history, terms)
    trial.outcome.complaints += books_balance(books_of(system.run.path), history, terms)
    for name, node in system.nodes.items():
        if node.command == "generator" and system.serves(name):
            trial.outcome.complaints += serves_exported_weights(system, name)
    for one in trial.sampled:
        trial.outcome.complaints += serves_checkpoint(system, one)
    if trial.sampled:
        versions = ", ".join(one.version for one in trial.sampled)
        trial.note(f"logprobs compared with the checkpoints of versions {versions}")
    replayed = sum(one.replayed for one in history.steps)
    trial.note(
        f"{terms.steps} steps, {len(history.lives)} starts of the learner, {len(history.acknowledged)} acknowledged "
        f"groups, {len(history.publishes)} proven publishes, {replayed} replayed steps"
    )
    for text in trial.outcome.complaints:
        trial.say(f"BROKEN {text}")
