"""The moments at which a kill hurts most, and how long the run then takes to go on."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from signal import SIGKILL

from tests.chaos.control_watch import Moment
from tests.chaos.faults import send
from tests.chaos.system import LEARNER, RANKS_END_S, ChaosSystem

PATIENCE_S = 240.0


@dataclass(frozen=True)
class Recovery:
    """A fault, and the seconds until the next step, and the next proven publish, were over."""

    fault: str
    at_step: int
    next_step_s: float
    next_publish_s: float

    def __str__(self) -> str:
        return (
            f"{self.fault} at step {self.at_step}: next step after {self.next_step_s:.1f} s, "
            f"next publish after {self.next_publish_s:.1f} s"
        )


def recovery(
    system: ChaosSystem,
    fault: str,
    *,
    since: float,
    patience_s: float = PATIENCE_S,
    meanwhile: Callable[[], object] = lambda: None,
) -> Recovery:
    """Waits for the next step and the next publish. `since` is when the fault struck, by the monotonic clock."""
    steps, publishes, last = system.steps(), system.published(), system.size.steps

    def stepped_on() -> bool:
        meanwhile()
        return system.steps() > steps or steps == last

    def published_on() -> bool:
        meanwhile()
        return system.published() > publishes or steps == last

    system.wait(stepped_on, f"a step after: {fault}", timeout_s=patience_s)
    stepped = time.monotonic() - since
    system.wait(published_on, f"a publish after: {fault}", timeout_s=patience_s)
    return Recovery(fault=fault, at_step=steps, next_step_s=stepped, next_publish_s=time.monotonic() - since)


def kill_in_sync(system: ChaosSystem, name: str, path: str, moment: Moment) -> float:
    """SIGKILL to a generator at its next request of that path; when it was."""
    trap = system.watches[name].trap(path, moment, lambda: send(SIGKILL, system.pids(name)))
    assert trap.sprung.wait(PATIENCE_S), f"no {path} of {name} for {PATIENCE_S:g} s"
    system.nodes[name].process.wait(timeout_s=PATIENCE_S)
    assert trap.sprung_at is not None
    return trap.sprung_at


def kill_learner_in_publish(system: ChaosSystem, name: str, *, rank: int | None = None) -> float:
    """SIGKILL to the learner, or to one of its ranks, when generator `name` has begun to receive a version; when."""
    trap = system.watches[name].trap("prepare", "middle", lambda: send(SIGKILL, system.victims(rank)))
    assert trap.sprung.wait(PATIENCE_S), f"no publish to {name} for {PATIENCE_S:g} s"
    system.nodes[LEARNER].process.wait(timeout_s=RANKS_END_S)
    assert trap.sprung_at is not None
    return trap.sprung_at


def kill_learner_in_checkpoint(system: ChaosSystem, *, rank: int | None = None) -> float:
    """SIGKILL to the learner, or to one of its ranks, while a draft of a checkpoint is in the run's folder; when."""
    victims = system.victims(rank)
    _at_once(lambda: list(system.run.path.glob("*draft*")), what="a draft of a checkpoint")
    send(SIGKILL, victims)
    struck = time.monotonic()
    system.nodes[LEARNER].process.wait(timeout_s=RANKS_END_S)
    return struck


def _at_once(condition: Callable[[], object], *, what: str) -> None:
    """Looks without a pause: a checkpoint of a tiny model takes a tenth of a second."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s in vain for {what}"
        time.sleep(0.002)
