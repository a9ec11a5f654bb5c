"""What goes wrong: each kind of fault, how it begins and how it ends."""

from collections.abc import Callable
from dataclasses import dataclass

from headway.simulation.cluster import LEARNER, Service
from headway.simulation.run import Stage

HEARTBEAT_S = 12.0


@dataclass(frozen=True)
class Fault:
    """At `at` seconds something of this kind happens to `target`, over after `lasts_s`; `amount` is the kind's."""

    at: float
    kind: str
    target: str = ""
    lasts_s: float = 0.0
    amount: float = 0.0

    def __str__(self) -> str:
        parts = [self.kind, self.target, f"for {self.lasts_s:.0f} s" if self.lasts_s else ""]
        return " ".join(part for part in parts if part) + (f" ({self.amount:g})" if self.amount else "")


Apply = Callable[[Stage, Fault], None]


def _service(stage: Stage, name: str) -> Service | None:
    return stage.cluster.services.get(name)


def _kill(stage: Stage, fault: Fault) -> None:
    service = _service(stage, fault.target)
    if service is not None and service.process is not None:
        service.process.kill()


def _terminate(stage: Stage, fault: Fault) -> None:
    service = _service(stage, fault.target)
    if service is not None and service.process is not None:
        service.process.terminate()


def _stop(stage: Stage, fault: Fault) -> None:
    service = _service(stage, fault.target)
    if service is not None and service.process is not None:
        stage.suspects.add(service.host)
        service.process.stand_still()
        stage.switchboard.check_links(after_s=HEARTBEAT_S)


def _continue(stage: Stage, fault: Fault) -> None:
    service = _service(stage, fault.target)
    if service is not None and service.process is not None:
        service.process.go_on()


def _pairs(stage: Stage, fault: Fault) -> list[tuple[str, str]]:
    """Both directions between the target and all others; only outwards if the amount is 1."""
    others = [service.host for service in stage.cluster.services.values() if service.host != fault.target]
    outwards = [(fault.target, other) for other in dict.fromkeys(others)]
    return outwards if fault.amount == 1 else outwards + [(other, source) for source, other in outwards]


def _cut(stage: Stage, fault: Fault) -> None:
    stage.suspects.update(stage.hosts() if fault.target == LEARNER else {fault.target})
    stage.cuts[fault] = _pairs(stage, fault)
    for source, target in stage.cuts[fault]:
        stage.network.cut(source, target)
    stage.switchboard.check_links(after_s=HEARTBEAT_S)


def _mend(stage: Stage, fault: Fault) -> None:
    for source, target in stage.cuts.pop(fault, []):
        stage.network.mend(source, target)


def _slow(stage: Stage, fault: Fault) -> None:
    stage.suspects.update(stage.hosts() if fault.target == LEARNER else {fault.target})
    stage.network.slowness[fault.target] = fault.amount


def _fast(stage: Stage, fault: Fault) -> None:
    stage.network.slowness.pop(fault.target, None)


def _engine(name: str, value: object) -> Apply:
    def apply(stage: Stage, fault: Fault) -> None:
        script = stage.engines[int(fault.target.removeprefix("gen-"))]
        stage.suspects.add(fault.target)
        if name == "hanging":
            script.hang(bool(value))
        else:
            setattr(script, name, value)

    return apply


def _gap(stage: Stage, fault: Fault) -> None:
    """Numerics that all generators share: nobody's fault."""
    for script in stage.engines:
        script.gap = fault.amount


def _second_learner(stage: Stage, fault: Fault) -> None:
    """Started by mistake beside one that lives. With none there it would be a run of its own, and no fault."""
    first = _service(stage, LEARNER)
    if first is None or first.process is None or first.process.loop.time() - first.process.started_at < 1.0:
        return
    service = stage.cluster.learner(name="second-learner")
    service.wanted = False
    stage.cluster.services[service.name] = service
    stage.cluster.start(service, again=fault.amount == 1)


def _second_env(stage: Stage, fault: Fault) -> None:
    stage.cluster.add(stage.cluster.env_service(0, host="second-env", env_id=fault.target))


def _second_env_ends(stage: Stage, fault: Fault) -> None:
    service = _service(stage, "second-env")
    if service is not None:
        service.wanted = False
        if service.process is not None:
            service.process.kill()


def _rewards(name: str, value: object) -> Apply:
    def apply(stage: Stage, fault: Fault) -> None:
        setattr(stage.rewards[int(fault.target.removeprefix("rewards-"))], name, value)

    return apply


def _lie(stage: Stage, fault: Fault) -> None:
    stage.rewards[int(fault.target.removeprefix("rewards-"))].lies += int(fault.amount) or 1


def _disk(name: str, value: bool) -> Apply:
    return lambda stage, fault: setattr(stage.disk, name, value)


def _power(stage: Stage, fault: Fault) -> None:
    """The learner's host goes down: what was not synced is lost in part."""
    _kill(stage, Fault(fault.at, "kill", LEARNER))
    stage.unsynced_lost = True
    lost = stage.disk.lose_unsynced(stage.cluster.run_folder) if stage.cluster.run_folder.exists() else []
    stage.world.note(LEARNER, f"its host went down; lost were {', '.join(lost) or 'no bytes'}")


def _hanging_task(stage: Stage, fault: Fault) -> None:
    stage.environment.hangs.update(range(int(fault.amount), stage.environment.tasks, 20))


def _task_recovers(stage: Stage, fault: Fault) -> None:
    """Only for good: those that hang go on to hang."""


def _raising_task(stage: Stage, fault: Fault) -> None:
    stage.environment.raises.update(range(int(fault.amount), stage.environment.tasks, 20))


def _nothing(stage: Stage, fault: Fault) -> None:
    """Is over by itself."""


KINDS: dict[str, tuple[Apply, Apply]] = {
    "kill": (_kill, _nothing),
    "terminate": (_terminate, _nothing),
    "stop": (_stop, _continue),
    "cut off": (_cut, _mend),
    "slow link": (_slow, _fast),
    "engine hangs": (_engine("hanging", True), _engine("hanging", False)),
    "load fails": (_engine("fails_to_load", True), _engine("fails_to_load", False)),
    "loads wrong": (_engine("loads_wrong", True), _engine("loads_wrong", False)),
    "shared gap": (_gap, _nothing),
    "second learner": (_second_learner, _nothing),
    "second env_service": (_second_env, _second_env_ends),
    "rewards hang": (_rewards("hanging", True), _rewards("hanging", False)),
    "rewards fail": (_rewards("failing", True), _rewards("failing", False)),
    "rewards err": (_rewards("errors", 0.3), _rewards("errors", 0.0)),
    "absurd reward": (_lie, _nothing),
    "disk full": (_disk("full", True), _disk("full", False)),
    "disk fails": (_disk("failing", True), _disk("failing", False)),
    "power loss": (_power, _nothing),
    "task hangs": (_hanging_task, _task_recovers),
    "task raises": (_raising_task, _nothing),
}
"""By name: how each begins, and how it ends."""

PERMANENT = ("shared gap", "task hangs", "task raises", "second env_service")
"""What a run has to go on with, so that it excuses no standstill."""


def schedule(stage: Stage, faults: tuple[Fault, ...]) -> None:
    """Has every fault happen at its time."""
    for fault in faults:
        stage.world.at(fault.at, lambda fault=fault: _begin(stage, fault))  # type: ignore[misc]


def _begin(stage: Stage, fault: Fault) -> None:
    if stage.violation is not None:
        return
    stage.world.note("FAULT", str(fault))
    stage.faults += 1
    stage.active.add(fault)
    KINDS[fault.kind][0](stage, fault)
    if fault.kind in PERMANENT and not fault.lasts_s:
        stage.active.discard(fault)
        stage.quiet_since = stage.world.now
    else:
        stage.world.after(fault.lasts_s, lambda: _end(stage, fault))


def _end(stage: Stage, fault: Fault) -> None:
    KINDS[fault.kind][1](stage, fault)
    stage.active.discard(fault)
    stage.quiet_since = stage.world.now
    if fault.lasts_s:
        stage.world.note("FAULT", f"over: {fault}")
