"""The learner's look at all processes of its run, and the verdict on it.

    own status ───────────────────────────────┐
    generators: GET /v1/status, by the fleet ─┼─▶ diagnosis ─▶ verdict ─▶ page, metrics.jsonl, log, webhook
    env_services: their notes, with rewards ──┘

A verdict other than the last one holds once it was found twice in a row: a process of a busy machine may answer late.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import SecretStr

from learner.weights.fleet import FleetMembers
from protocol.messages import StatusNote
from protocol.status import Status, UsageStatus
from services.cores import has_whole_machine
from services.diagnosis.asked import AskedProcess, Condition, Target
from services.diagnosis.asking import ask
from services.diagnosis.culprits import diagnose
from services.diagnosis.pace import standing_s
from services.diagnosis.verdict import RunVerdict, verdict_on
from services.http.tls import TlsFiles
from services.local_processes import machine_cpu_s

logger = logging.getLogger(__name__)
_EVERY_S = 3.0
_ASKED_A_SECOND = 20
_REMEMBERED_S = 600.0


@dataclass
class _LostGenerator:
    target: Target
    since: float


@dataclass(frozen=True)
class GeneratorsLoad:
    """Sums over all generators: sequences that run, of `limit` at most, and tokens a second; of `busy` the mean.

    `cores` are those that all processes of a kind had at work then, on `hosts` machines, as far as they tell, and
    `cpu_s` what these have computed so far;
    `machine_cores` those that anybody had at work on the learner's machine since the load before; None in a container
    with a part of its cores, as what is at work on the others takes none of these. `step_costs` are CPU seconds of all
    engines so far (CostSums), by 1, sequences, and those that began, over their steps; None if one does not count them.
    """

    generators: int
    running: float
    limit: int
    tokens_per_s: float
    busy: float
    cores: Mapping[str, float] = field(default_factory=dict)
    cpu_s: Mapping[str, float] = field(default_factory=dict)
    hosts: int = 0
    machine_cores: float | None = None
    step_costs: Mapping[str, object] | None = None


def _all_steps(generators: Sequence[Status]) -> dict[str, object] | None:
    costs = [status.step_costs for status in generators]
    known = [each for each in costs if each is not None]
    return sum(known[1:], start=known[0]).model_dump() if known and len(known) == len(costs) else None


class RunMonitor:
    """Looks every few seconds. `own` is the learner's status at `url`, `notes` those of env_services; `changed` is told
    each verdict that is not like the one before. `token` and `tls` are for generators.
    """

    def __init__(
        self,
        *,
        own: Callable[[], Status],
        url: str,
        fleet: FleetMembers,
        notes: Callable[[], Iterable[StatusNote]],
        changed: Callable[[RunVerdict], None],
        token: SecretStr | None,
        tls: TlsFiles,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own = own
        self._url = url
        self._fleet = fleet
        self._notes = notes
        self._changed = changed
        self._token = token
        self._tls = tls
        self._clock = clock
        self._progress: dict[str, int] = {}
        self._known: dict[str, Target] = {}
        self._leaving: set[str] = set()
        self._lost: dict[str, _LostGenerator] = {}
        self._found: RunVerdict | None = None
        self._failed = False
        self._machine: tuple[float, float] | None = None
        self.verdict: RunVerdict | None = None
        """The one that holds, with its newest numbers."""
        self.procs: tuple[AskedProcess, ...] = ()
        self.standing_s: float | None = None
        """Seconds for which no step has ended, if that is far longer than usual."""

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            await asyncio.sleep(max(_EVERY_S, len(self._known) / _ASKED_A_SECOND))
            try:
                await self.look()
            except Exception as error:  # noqa: BLE001 - no run ends of being watched
                if not self._failed:
                    logger.warning("there is no verdict on this run: judging what its processes tell fails: %r", error)
                self._failed = True
            else:
                self._failed = False

    async def look(self) -> None:
        """Asks all of them, and judges."""
        targets = self._generators()
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(ask(target)) for target in targets]
        status = self._own()
        self.standing_s = standing_s(status)
        own = AskedProcess(Target(kind="learner", url=self._url), Condition.ANSWERS, status=status)
        generators = [proc for proc in (task.result() for task in asked) if not self._is_of_others(proc)]
        self.procs = (own, *generators, *self._told())
        self._judge(verdict_on(self.procs, diagnose(self.procs, at_work=self._at_work())))

    def generators_load(self) -> GeneratorsLoad | None:
        """The load of all generators together in the last seconds; None if none tells."""
        statuses = [proc.status for proc in self.procs if proc.kind == "generator"]
        loads = [status.load for status in statuses if status is not None and status.load is not None]
        if not loads:
            return None
        return GeneratorsLoad(
            generators=len(loads),
            running=round(sum(load.running for load in loads), 3),
            limit=sum(load.limit or 0 for load in loads),
            tokens_per_s=round(sum(load.per_s for load in loads), 3),
            busy=round(sum(load.busy_share for load in loads) / len(loads), 4),
            cores=self._used(lambda usage: usage.cores),
            cpu_s=self._used(lambda usage: usage.cpu_s),
            hosts=len({proc.status.host for proc in self.procs if proc.status is not None}),
            machine_cores=self._machine_cores(),
            step_costs=_all_steps([status for status in statuses if status is not None]),
        )

    def _machine_cores(self) -> float | None:
        now, cpu_s = self._clock(), machine_cpu_s()
        if cpu_s is not None and not has_whole_machine():
            cpu_s = None
        before, self._machine = self._machine, None if cpu_s is None else (now, cpu_s)
        if before is None or cpu_s is None or now <= before[0]:
            return None
        return round(max(0.0, (cpu_s - before[1]) / (now - before[0])), 4)

    def _used(self, part: Callable[[UsageStatus], float | None]) -> dict[str, float]:
        """By kind of process, of those that tell."""
        found: defaultdict[str, float] = defaultdict(float)
        for proc in self.procs:
            usage = None if proc.status is None else proc.status.usage
            if usage is not None and (value := part(usage)) is not None:
                found[proc.kind] += value
        return {kind: round(cores, 4) for kind, cores in sorted(found.items())}

    def _judge(self, found: RunVerdict) -> None:
        if found.is_like(self.verdict):
            self.verdict = found
        elif found.is_like(self._found):
            self.verdict = found
            self._changed(found)
        self._found = found

    def _generators(self) -> list[Target]:
        """Members of the fleet, and those that it has lost and that did not take their leave: they may hang."""
        now, members = self._clock(), {member.generator_id: member for member in self._fleet.members()}
        for name in self._known.keys() - members.keys():
            target = self._known.pop(name)
            if name not in self._leaving:
                self._lost[name] = _LostGenerator(target, now)
        self._leaving = {name for name, member in members.items() if member.announcement.condition == "leaving"}
        self._known = {
            name: Target(kind="generator", url=member.url, token=self._token, tls=self._tls)
            for name, member in members.items()
        }
        self._lost = {
            name: one for name, one in self._lost.items() if name not in members and now - one.since < _REMEMBERED_S
        }
        return [*self._known.values(), *(one.target for one in self._lost.values())]

    def _is_of_others(self, proc: AskedProcess) -> bool:
        """True for a lost generator that answers, which will join again, or is gone while others do its work."""
        lost = next((name for name, one in self._lost.items() if one.target is proc.target), None)
        if lost is None:
            return False
        if proc.condition is Condition.DEAD and self._known:
            del self._lost[lost]
            return True
        return proc.condition is Condition.ANSWERS

    def _told(self) -> list[AskedProcess]:
        """Env_services and reward services, each once."""
        found: dict[str, AskedProcess] = {}
        for note in self._notes():
            env = Target(kind="env-service", url=note.url)
            told = [AskedProcess(env, Condition.ANSWERS, status=note.status), *map(AskedProcess.told, note.rewards)]
            for proc in told:
                found.setdefault(proc.name, proc)
        return list(found.values())

    def _at_work(self) -> frozenset[str]:
        """Names of processes that have got on since the last look."""
        statuses = {proc.name: proc.status for proc in self.procs}
        now = {name: one.progress.done for name, one in statuses.items() if one is not None and one.progress}
        before, self._progress = self._progress, now
        return frozenset(name for name, done in now.items() if name in before and done != before[name])
