"""The promises of each line of defence by itself, looked at where they are made.

What one line lets through the next one often makes good: a wrong count is caught by a bound, an expelled generator is
asked by nobody, a group that comes twice is a duplicate. A run in which only results are looked at does not see that
a line is gone. So each is looked at here for what it promises alone: who serves says so and can, nobody waits at an
open gate, leases go out by the oldest version that serves, who is silent is let go, nothing is named damaged that is
whole, and what a resume takes up is what was written.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from simulation.actors.engine import EngineScript, EngineScripts
from simulation.checking.stage import Stage
from simulation.world.process import Process

_APART = ("stop", "cut off", "slow link")
"""Faults by which news is late."""
_HEARD_S = 30.0
"""After so many seconds without such a fault everybody has heard what the others have said."""
_SETTLED_S = 5.0
"""Leases may go out for so long by what was served before."""
_SILENT_S = 60.0
"""Twice the time after which a learner of these runs lets go of an env_service."""
_SERVED = "served"
"""Name of what is seen when a lease is granted, and not every few seconds."""
_CAUGHT_UP = "to catch up"
"""In the reason of an expulsion that no proof asks for."""

Arguments = tuple[Any, ...]
Named = Mapping[str, Any]


@dataclass
class FirstLines:
    """Tales of the processes about themselves, and since when they disagree. Each `told` method gets the result of a
    call, and its arguments.
    """

    stage: Stage
    serving: dict[Process, Any] = field(default_factory=dict)
    instances: dict[str, Process] = field(default_factory=dict)
    fleets: dict[Process, Any] = field(default_factory=dict)
    intakes: dict[Process, Any] = field(default_factory=dict)
    expelled: dict[Process, tuple[Process, float]] = field(default_factory=dict)
    """Generators' processes, by whom they were expelled, and when."""
    adopted: dict[tuple[Process, int, int, int], Any] = field(default_factory=dict)
    """Attempts of former lives, by who took them over, and as they stand on the wire."""
    arrived: set[tuple[Process, Any]] = field(default_factory=set)
    guards: dict[int, list[Any]] = field(default_factory=dict)
    """States of the guard in the checkpoints that were begun, by version: which of them got their name is not told."""
    written: int = 0
    """Version of the newest checkpoint."""
    joined: dict[Process, set[int]] = field(default_factory=dict)
    locks: dict[Process, Any] = field(default_factory=dict)
    apart_at: float = 0.0
    _levels: dict[int, int] = field(default_factory=dict)
    _changes: dict[Process, int] = field(default_factory=dict)
    _since: dict[tuple[object, ...], float] = field(default_factory=dict)
    _looked_at: set[object] = field(default_factory=set)

    @property
    def _here(self) -> Process:
        process = self.stage.world.current
        assert isinstance(process, Process)
        return process

    def _lasts_s(self, what: tuple[object, ...], *, holds: bool) -> float:
        """Seconds for which it has been seen to hold; 0 if it does not."""
        self._looked_at.add(what)
        if not holds:
            self._since.pop(what, None)
            return 0.0
        return self.stage.world.now - self._since.setdefault(what, self.stage.world.now)

    # What is told

    def serving_made(self, result: object, args: Arguments, kwargs: Named) -> None:
        """A generator begins to serve."""
        self.serving[self._here] = args[0]

    def announcement_made(self, result: Any, args: Arguments, kwargs: Named) -> None:
        """A generator has the name of its process."""
        self.instances[result.instance] = self._here

    def fleet_made(self, result: object, args: Arguments, kwargs: Named) -> None:
        """A learner begins to know generators."""
        self.fleets[self._here] = args[0]

    def intake_made(self, result: object, args: Arguments, kwargs: Named) -> None:
        """A learner begins to know env_services."""
        self.intakes[self._here] = args[0]

    def granted(self, grants: Iterable[Any], ledger: Any) -> None:
        """A lease goes out only while there is a place for its group, by the oldest version that serves: consumed,
        buffered and running ones are fewer than those that the batches up to `max_lag` versions on can take.
        """
        fleet, process = self.fleets.get(self._here), self._here
        if fleet is None or not grants:
            return
        served = [member.serving.number for member in fleet.members() if member.serving is not None]
        newer = bool(served) and ledger.served > min(served)
        if self._lasts_s((_SERVED, process), holds=newer) > _SETTLED_S:
            what = f"leases go out as if {ledger.served} were served, and a generator serves {min(served)}"
            self.stage.broken("pacing", what)
        per_step, table = ledger.config.groups_per_step, ledger._table
        places = (ledger.served + ledger.max_lag + 1) * per_step
        taken = ledger.next_version * per_step + len(table.buffered) + len(table.running)
        if taken > places:
            self.stage.broken("pacing", f"{taken} groups were taken, are there or are on their way for {places} places")

    def leased(self, leases: Iterable[Any], granting: Any) -> None:
        """A lease keeps its level, whoever grants what, and whether it is granted again or not."""
        curriculum = granting.curriculum
        if curriculum is None or self.stage.disk_failed:
            return
        changes = len(curriculum._changes)
        if self._changes.get(self._here) != changes:
            self._changes[self._here] = changes
            moved = [lease for lease, level in self._levels.items() if curriculum.level_of(lease) != level]
            if moved:
                self.stage.broken("a lease is one task", f"the leases {moved} are of another level than they were")
        for lease in leases:
            if lease.purpose == "train":
                self._levels.setdefault(lease.lease_id, curriculum.level_of(lease.lease_id))

    def heard(self, outcome: Any, args: Arguments, kwargs: Named) -> None:
        """A running lease of a former life is taken over once, and goes on while it counts as running."""
        incarnations, here = args[0], self._here
        for lease in outcome.unwanted:
            attempt = self.adopted.get((here, lease.incarnation, lease.lease_id, lease.attempt))
            if attempt is not None and incarnations._ledger.runs(attempt):
                what = f"lease {lease.lease_id} of a former life was taken over, and is not wanted now"
                self.stage.broken("no work twice", what)
        for attempt in outcome.adopted:
            lease = incarnations.on_the_wire(attempt)
            key = here, lease.incarnation, lease.lease_id, lease.attempt
            if key in self.adopted and not kwargs.get("is_back"):
                self.stage.broken("no work twice", f"lease {lease.lease_id} of a former life is taken over again")
            self.adopted[key] = attempt

    def message_came(self, result: object, args: Arguments, kwargs: Named) -> None:
        """A group is sent once while nothing goes wrong: it is answered, if only late."""
        message, stage = args[2], self.stage
        unkind = stage.faults or stage.network.vanished or stage.network.doubled or stage.network.lost
        if unkind or type(message).__name__ != "FinishedLease" or stage.disk.sync_s or stage.cluster.thread_s:
            return
        group = message.group
        key = self._here, (group.purpose, group.incarnation, group.lease_id, group.attempt)
        if key in self.arrived:
            stage.broken("no work twice", f"the group of lease {group.lease_id} was sent, and nobody answered")
        self.arrived.add(key)

    def checkpoint_begun(self, result: object, args: Arguments, kwargs: Named) -> None:
        """A checkpoint is written."""
        self.guards.setdefault(kwargs["version"], []).append(kwargs.get("guard"))

    def checkpoint_written(self, result: object, args: Arguments, kwargs: Named) -> None:
        """A checkpoint is on the disk, with its name: older ones may go."""
        names = [path.name for path in args[0]._folder.glob("checkpoint-*") if path.is_dir()]
        numbers = [name.removeprefix("checkpoint-") for name in names]
        self.written = max([self.written, *(int(number) for number in numbers if number.isdecimal())])

    def taken_up(self, result: Any) -> None:
        """A run is taken up as its files have it: no group twice, and the guard as it was."""
        used = {lease for batch in result.batches for lease in batch.lease_ids}
        spare = [place.read() for place in result.spare]
        again = sorted(used & {group.lease_id for group in spare})
        if again:
            self.stage.broken("trained twice", f"groups of the leases {again}, which batches have used, are spare")
        guards = [] if result.checkpoint is None else self.guards.get(result.version, [])
        if guards and result.guard not in guards:
            self.stage.broken("the guard's bound", f"the guard goes on as {result.guard}, and was {guards[-1]}")
        if self.stage.damaged:
            return
        if result.version < self.written:
            what = f"a checkpoint of version {self.written} was written, and the learner goes on from {result.version}"
            self.stage.broken("nothing is lost", what)
        named = [path.name for path in self.stage.cluster.run_folder.rglob("*.damaged*")]
        if named:
            self.stage.broken("nothing is damaged", f"the disk lost only what was not synced, and there are {named}")

    def locked(self, result: object, args: Arguments, kwargs: Named) -> None:
        """A process has a folder for itself: none of this machine has it beside."""
        here, folder = self._here, args[0]._claim.folder
        for other, lock in self.locks.items():
            if other.alive and other is not here and other.host == here.host and lock._claim.folder == folder:
                self.stage.broken("one learner", f"{here.name} has the folder of {other.name}, which is there")
        self.locks[here] = args[0]

    def unlocked(self, result: object, args: Arguments, kwargs: Named) -> None:
        """A process gives its folder back."""
        self.locks = {process: lock for process, lock in self.locks.items() if lock is not args[0]}

    def was_expelled(self, result: object, args: Arguments, kwargs: Named) -> None:
        """Whoever fails to catch up is expelled where another one serves: the fault may be one that all share."""
        fleet, name = args[0], args[1]
        for instance, process in self.instances.items():
            # Not the process that has the name now: it may be a later one, of which the learner has not heard yet.
            if fleet.expelled(name, instance) is not None:
                self.expelled[process] = self._here, self.stage.world.now
        others = [member for member in fleet.members() if member.serving is not None]
        if _CAUGHT_UP in kwargs.get("reason", "") and not others:
            self.stage.broken("nobody is blamed for nothing", f"{name} is expelled, and nobody else serves")

    def asked_to_join(self, result: object, args: Arguments, kwargs: Named) -> None:
        """A generator is asked into a group."""
        self.joined.setdefault(self._here, set()).add(args[1].epoch)

    def asked_to_prepare(self, result: object, args: Arguments, kwargs: Named) -> None:
        """Nobody who has come anew, and is known for it, is broadcast to in the group of his predecessor."""
        sync, request = args[0], args[1]
        from protocol.fleet import PULLED_EPOCH  # the product is imported after its clock is replaced

        known = sync._epoch == PULLED_EPOCH and sync._serving.version is not None
        if known and not request.files and request.epoch not in self.joined.get(self._here, ()):
            what = f"{self._here.name} is broadcast to in group {request.epoch}, and never was asked into it"
            self.stage.broken("groups of the living", what)

    # What is looked at every few seconds

    def look(self) -> None:
        """Compares what everybody says."""
        stage = self.stage
        self._looked_at.clear()
        if any(getattr(fault, "kind", "") in _APART for fault in stage.active):
            self.apart_at = stage.world.now
        for script in stage.engines:
            self._look_at(script)
        for process, fleet in self.fleets.items():
            if process.alive and not process.stopped:
                self._look_for_silent_ones(process)
                self._look_at_fleet(process, fleet)
        # What nobody looked at meanwhile may have ended and begun again.
        looked_at, since = self._looked_at, self._since
        self._since = {what: at for what, at in since.items() if what in looked_at or _SERVED in what}

    def _has_heard(self, *processes: Process) -> bool:
        """True if these live and can tell each other since a while."""
        now = self.stage.world.now
        since = max(self.apart_at, *(max(each.started_at, each.awake_since) for each in processes))
        return all(each.alive and not each.stopped for each in processes) and now - since > _HEARD_S

    def _look_at(self, script: EngineScript) -> None:
        worker = script.worker
        process = None if worker is None else worker._process
        if worker is None or process is None or not process.alive or process.stopped:
            return
        serving, llm = self.serving.get(process), script.llm
        empty = worker.half_loaded and not worker.loading and not script.hanging
        says = None if serving is None else serving.version
        if self._lasts_s(("says", process), holds=empty and says is not None) > 0.0:
            what = f"{process.name} says it serves {says}, and holds no whole weights"
            self.stage.broken("who serves", what)
        if llm is not None and not llm._closed and any(not each.done() for each in llm._waiters):
            self.stage.broken("a pause ends", f"a request waits at the gate of {process.name}, which is open")
        by, at = self.expelled.get(process, (process, 0.0))
        goes_on = by is not process and says is not None and self._has_heard(by, process)
        if goes_on and self.stage.world.now - at > _HEARD_S:
            self.stage.broken("who serves", f"{process.name} was expelled at {at:.0f} s, and serves {says}")

    def _look_at_fleet(self, learner: Process, fleet: Any) -> None:
        """A process that counts as serving says so itself, and answers where others serve newer weights."""
        members = [member for member in fleet.members() if member.serving is not None]
        newest = max((member.serving.number for member in members), default=0)
        now = self.stage.world.now
        for member in members:
            process = self.instances.get(member.instance)
            if process is None or process not in self.serving:
                continue
            serving, script = self.serving[process], self.stage.world.part(EngineScripts).of(process)
            unable = process.alive and (serving.version is None or serving.condition != "able")
            if self._lasts_s(("able", learner, process), holds=unable) > _HEARD_S and self._has_heard(learner, process):
                what = f"{process.name} says that it serves nothing, and counts as serving {member.serving}"
                self.stage.broken("who serves", what)
            paused = None if script.worker is None else script.worker.paused_since
            late = paused is not None and now - paused > _HEARD_S and member.serving.number < newest
            late = late and self._has_heard(learner)
            if self._lasts_s(("late", learner, process), holds=late) > 0.0:
                what = f"{process.name} is paused since {paused:.0f} s, others serve {newest}, and it counts as serving"
                self.stage.broken("who serves", what)

    def _look_for_silent_ones(self, learner: Process) -> None:
        """An env_service that fell silent is in no books."""
        intake, now = self.intakes.get(learner), self.stage.world.now
        if intake is None or now - max(learner.started_at, learner.awake_since) < _SILENT_S:
            return
        for holder in intake.env_services():
            silent_s = intake._clock() - holder.last_seen
            if silent_s > _SILENT_S:
                what = f"{holder.name} was not heard for {silent_s:.0f} s, and counts as there"
                self.stage.broken("who is silent is gone", what)
