"""The diagnosis of the doctor, without I/O: who is to blame, found by what processes say and whom they wait for.

A process that does not answer is a culprit, and so is one that knows of a problem of its own. If all answer, each wait
that lasts too long is followed: to the process that is waited for, to whom that one waits for, and so on. The last one
is the culprit, unless it is seen to work.

"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from protocol.model import PolicyVersion
from protocol.status import Kind, PeerStatus, Status, WaitStatus
from services.diagnosis.asked import AskedProcess, Condition

_OWN = ("its own start", "its last requests")
_HOST = "the host of environment"
_ENVIRONMENTS = (_HOST, "the environment")
_WORDS: tuple[tuple[str, Kind], ...] = (
    ("learner", "learner"),
    ("generator", "generator"),
    ("reward", "reward-service"),
    ("env_service", "env-service"),
    ("env-service", "env-service"),
    ("groups", "env-service"),
    ("lease", "env-service"),
)


@dataclass(frozen=True)
class Patience:
    """Limits in seconds beyond which a wait is too long. Waits of normal work, as for groups that long answers make
    late, last longer.
    """

    blocking_s: float = 15.0
    working_s: float = 120.0
    start_s: float = 300.0
    silence_s: float = 15.0
    publish_s: float = 60.0
    step_s: float = 900.0


@dataclass(frozen=True)
class Culprit:
    """Culprit of a run that hangs: who, what is wrong with it, what is to be done, and how it was found."""

    who: str
    what: str
    remedy: str
    because: tuple[str, ...] = ()


@dataclass(frozen=True)
class Diagnosis:
    """Healthy without culprits; `by_waiting` if they were found by following waits, which work in progress can refute.

    `remarks` are what is worth knowing and is nobody's fault.
    """

    culprits: tuple[Culprit, ...] = ()
    remarks: tuple[str, ...] = ()
    by_waiting: bool = False


def diagnose(
    procs: Sequence[AskedProcess], *, at_work: frozenset[str] = frozenset(), patience: Patience | None = None
) -> Diagnosis:
    """The verdict. `at_work` are the names of processes that were seen to make progress meanwhile."""
    evidence = _Evidence(procs=tuple(procs), at_work=at_work, patience=patience or Patience())
    remarks = (*evidence.starting(), *evidence.gone(), *evidence.notes())
    for found in (evidence.not_answering(), evidence.knowing_of_a_problem(), evidence.of_another_protocol()):
        if found:
            return Diagnosis(culprits=tuple(found), remarks=remarks)
    waiting = evidence.at_the_end_of_waits()
    if waiting:
        return Diagnosis(culprits=tuple(waiting), remarks=remarks, by_waiting=True)
    return Diagnosis(culprits=(*evidence.silent(), *evidence.behind(), *evidence.without_steps()), remarks=remarks)


def kind_waited_for(whom: str) -> Kind | None:
    """The kind of process that the text of a wait names first; None for a wait for the process's own doing."""
    if whom.startswith((*_OWN, *_ENVIRONMENTS)):
        return None
    found = [(whom.find(word), kind) for word, kind in _WORDS if word in whom]
    return min(found, key=lambda one: one[0])[1] if found else None


@dataclass(frozen=True)
class _Evidence:
    procs: tuple[AskedProcess, ...]
    at_work: frozenset[str]
    patience: Patience
    statuses: tuple[tuple[AskedProcess, Status], ...] = field(init=False)

    def __post_init__(self) -> None:
        answered = tuple((proc, proc.status) for proc in self.procs if proc.status is not None)
        object.__setattr__(self, "statuses", answered)

    def not_answering(self) -> list[Culprit]:
        return [
            Culprit(
                who=proc.name,
                what=_what_is_wrong(proc),
                remedy=_remedy(proc),
                because=tuple(self._who_waits_for(proc.kind)),
            )
            for proc in self.procs
            if proc.condition is not Condition.ANSWERS
        ]

    def notes(self) -> list[str]:
        return [f"{proc.name}: {note}" for proc, status in self.statuses for note in status.notes]

    def knowing_of_a_problem(self) -> list[Culprit]:
        return [
            Culprit(who=proc.name, what=problem, remedy="do as it says", because=tuple(_newest_failure(status)))
            for proc, status in self.statuses
            for problem in status.problems
        ]

    def of_another_protocol(self) -> list[Culprit]:
        spoken = {status.protocol_version for _, status in self.statuses}
        if len(spoken) < 2:
            return []
        return [
            Culprit(
                who=proc.name,
                what=f"speaks protocol version {status.protocol_version}, another one {max(spoken)}",
                remedy="run the same release everywhere",
            )
            for proc, status in self.statuses
            if status.protocol_version != max(spoken)
        ]

    def starting(self) -> list[str]:
        return [
            f"{proc.name} is starting since {wait.since_s:.0f} s"
            for proc, status in self.statuses
            for wait in status.waits
            if wait.whom.startswith(_OWN[0]) and wait.since_s < self.patience.start_s
        ]

    def at_the_end_of_waits(self) -> list[Culprit]:
        """At most one culprit for each wait that is too long, the learner's first."""
        found: dict[str, Culprit] = {}
        for proc, status in sorted(self.statuses, key=lambda one: one[0].kind != "learner"):
            for wait in status.waits:
                if self._is_too_long(wait):
                    culprit = self._follow(proc, wait, path=())
                    if culprit is not None:
                        found.setdefault(culprit.who, culprit)
        return list(found.values())

    def silent(self) -> list[Culprit]:
        """The learner's peers of a kind of which it hears none."""
        return [
            Culprit(
                who=peer.name,
                what=f"the learner has heard nothing of it since {peer.last_heard_s:.0f} s",
                remedy="look into its log, and see whether it reaches the learner at its address",
            )
            for peer in self._silent_peers()
            if not self._hears_of(peer.kind)
        ]

    def gone(self) -> list[str]:
        """Peers that are silent while others of their kind are not: one of a former start, in most cases."""
        return [
            f"the learner has heard nothing of the {peer.kind} {peer.name} since {peer.last_heard_s:.0f} s; "
            "others do its work"
            for peer in self._silent_peers()
            if self._hears_of(peer.kind)
        ]

    def _silent_peers(self) -> list[PeerStatus]:
        return [peer for peer in self._learners_peers() if (peer.last_heard_s or 0.0) > self.patience.silence_s]

    def _hears_of(self, kind: Kind) -> bool:
        return any(
            peer.kind == kind and peer.last_heard_s is not None and peer.last_heard_s <= self.patience.silence_s
            for peer in self._learners_peers()
        )

    def _learners_peers(self) -> list[PeerStatus]:
        """Peers of a run: a server of training loops hears of generators only while somebody samples."""
        learners = (status for proc, status in self.statuses if proc.kind == "learner" and status.tenants is None)
        return [peer for status in learners for peer in status.peers]

    def behind(self) -> list[Culprit]:
        found = []
        for _, status in self.statuses:
            published = next((event.age_s for event in status.events if event.name == "publish"), None)
            if status.policy_version is None or published is None or published < self.patience.publish_s:
                continue
            newest = PolicyVersion.parse(status.policy_version).number
            found += [
                Culprit(
                    who=peer.name,
                    what=f"serves {peer.serving_version}, the learner holds {status.policy_version}, "
                    f"and the last publish was {published:.0f} s ago",
                    remedy="restart this generator if its log shows no progress",
                    because=tuple(_newest_failure(status)),
                )
                for peer in status.peers
                if _is_behind(peer, newest)
            ]
        return found

    def without_steps(self) -> list[Culprit]:
        return [
            Culprit(
                who=proc.name,
                what=f"its last step ended {event.age_s:.0f} s ago, and it waits for nobody",
                remedy="see with py-spy or its log whether it still trains; if not, restart it with --resume",
            )
            for proc, status in self.statuses
            for event in status.events
            if event.name == "step" and event.age_s > self.patience.step_s and not status.waits
        ]

    def _follow(self, proc: AskedProcess, wait: WaitStatus, path: tuple[str, ...]) -> Culprit | None:
        """Culprit at the end of a wait; None if that one is at work, or starts."""
        path = (*path, f"{proc.name} waits for {wait.whom} since {wait.since_s:.0f} s")
        kind = kind_waited_for(wait.whom)
        if kind is None:
            return _alone(proc, wait, path)
        awaited = [one for one in self.statuses if one[0].kind == kind]
        named = [one for one in awaited if one[1].id in wait.whom or one[0].target.url in wait.whom]
        for other, status in named or awaited:
            return self._go_on(other, status, path)
        return Culprit(
            who=kind,
            what=f"no {kind} is known to the doctor",
            remedy=f"start one; if it runs elsewhere, name it: --url {kind}=http://HOST:PORT",
            because=path,
        )

    def _go_on(self, proc: AskedProcess, status: Status, path: tuple[str, ...]) -> Culprit | None:
        if proc.name in self.at_work or any(wait.whom.startswith(_OWN[0]) for wait in status.waits):
            return None
        if any(step.startswith(f"{proc.name} ") for step in path):
            return _circle(proc, status, path)
        for wait in status.waits:
            return self._follow(proc, wait, path)
        if proc.kind == "env-service":
            for other, load in self.statuses:
                if other.kind == "generator" and any(queue.depth for queue in load.queues):
                    busy = f"{proc.name} rolls out leases, and {other.name} has their requests"
                    return self._go_on(other, load, (*path, busy))
        return Culprit(
            who=proc.name,
            what="answers and waits for nobody, but what others wait for does not come",
            remedy="look into its log; if that shows nothing, restart it",
            because=(*path, *_newest_failure(status)),
        )

    def _is_too_long(self, wait: WaitStatus) -> bool:
        if wait.whom.startswith(_OWN[0]):
            return wait.since_s >= self.patience.start_s
        return wait.since_s >= (self.patience.blocking_s if wait.blocks_readiness else self.patience.working_s)

    def _who_waits_for(self, kind: Kind) -> list[str]:
        return [
            f"{proc.name} waits for {wait.whom} since {wait.since_s:.0f} s"
            for proc, status in self.statuses
            for wait in status.waits
            if kind_waited_for(wait.whom) == kind
        ]


def _alone(proc: AskedProcess, wait: WaitStatus, path: tuple[str, ...]) -> Culprit:
    if wait.whom.startswith(_HOST):
        return Culprit(
            who=wait.whom.partition(" (")[0],
            what=f"{proc.name} has waited for it for {wait.since_s:.0f} s, and goes on when it is there",
            remedy="start it where it runs (as by `env-service host`), or correct its address in its entry here",
            because=path,
        )
    return Culprit(
        who=proc.name,
        what=f"waits for {wait.whom} since {wait.since_s:.0f} s",
        remedy="look into its log; restart it if that shows no progress",
        because=path,
    )


def _circle(proc: AskedProcess, status: Status, path: tuple[str, ...]) -> Culprit:
    return Culprit(
        who=proc.name,
        what="waits, in the end, for itself",
        remedy="look for the failure below; restart the generator if it is in the middle of a weight sync",
        because=(*path, *_newest_failure(status)),
    )


def _newest_failure(status: Status) -> list[str]:
    return [f"its newest warning, {one.age_s:.0f} s ago: {one.text}" for one in status.failures[:1]]


def _is_behind(peer: PeerStatus, newest: int) -> bool:
    version = peer.serving_version
    if peer.kind != "generator":
        return False
    if version is None:  # teachers are generators, too, and hold no version of the policy
        return peer.state == "joining"
    return PolicyVersion.parse(version).number < newest


def _what_is_wrong(proc: AskedProcess) -> str:
    stopped = " (a signal has stopped it)" if proc.process is not None and proc.process.is_stopped else ""
    who = "" if proc.process is None else f"; it is {proc.process}{stopped}"
    return f"{proc.condition}: {proc.complaint}{who}"


def _remedy(proc: AskedProcess) -> str:
    match proc.condition:
        case Condition.DEAD:
            return f"start it: {proc.kind} --config RUN.toml; headway up starts it again by itself"
        case Condition.HANGS if proc.process is not None and proc.process.is_stopped:
            return f"kill -CONT {proc.process.pid} lets it go on; kill -KILL {proc.process.pid} ends it"
        case Condition.HANGS if proc.process is not None:
            return f"kill -KILL {proc.process.pid} ends it; headway up then starts it again by itself"
        case Condition.HANGS:
            return "log in to its machine, and restart it there"
    return "see that address, token and release are the same everywhere"
