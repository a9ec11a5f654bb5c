"""The bottleneck of a run in which all processes answer: which side waits, for whom, and which limit is reached.

    the learner waits a lot
      ├ one generator does far less than the others ──────────────▶ that machine
      ├ running groups wait for rewards, or the environment ──────▶ reward workers, the environment's code
      ├ env_services are full, generators nearly empty ───────────▶ capacity
      ├ generators are full, and more requests wait ──────────────▶ max_num_seqs
      ├ the lag bound leaves no room for leases ──────────────────▶ max_lag
      └ generators work all the time ─────────────────────────────▶ more generators
    the learner hardly waits, generators do ──────────────────────▶ more ranks, or fewer generators; nothing, where both
                                                                    share cores that are all at work

All of it from the loads of the last seconds; without the learner's load there is none.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.status import Kind, LoadStatus, Status

_WAITS_A_LOT = 0.5
_WAITS_MOST = 0.7
_HARDLY_WAITS = 0.1
_MOST = 0.5
_FULL = 0.85
_NEARLY_EMPTY = 0.25
_BUSY = 0.7
_IDLE = 0.55
"""Share of their time from which on generators are idle: fewer would do, or the learner could have some of theirs."""
_AT_WORK = 0.85
"""Share of the cores from which on none is left over: what idle generators do not use, the trainer has."""
_SHORT_S = 0.5
_SHORTEST_S = 6.0
"""Before, a load tells more of the start than of the run."""
_SLOW = 1 / 3
_AS_MUCH = 0.9
_LESS = 0.75
_ROOM_TO_SAMPLE = 0.75
_MOST_GENERATORS = 8
"""Times as many as there are: no measurement of a starved learner says more."""


@dataclass(frozen=True)
class Bottleneck:
    """The limit of a run: `cause` in a word or two, what is seen, and what to do."""

    cause: str
    what: str
    remedy: str
    who: str = ""


@dataclass(frozen=True)
class _Side:
    """Processes of a kind that tell their load."""

    statuses: Sequence[Status]
    loads: Sequence[LoadStatus]

    @property
    def running(self) -> float:
        return sum(load.running for load in self.loads)

    @property
    def limit(self) -> int:
        return sum(load.limit or 0 for load in self.loads)

    @property
    def fullness(self) -> float:
        return self.running / self.limit if self.limit else 0.0

    @property
    def busy(self) -> float:
        return statistics.fmean(load.busy_share for load in self.loads) if self.loads else 0.0

    @property
    def long_busy(self) -> float | None:
        """The mean share of a longer time, in which long steps are seen whole; None if one does not know it yet."""
        shares = [load.long_busy_share for load in self.loads if load.long_busy_share is not None]
        return statistics.fmean(shares) if shares and len(shares) == len(self.loads) else None

    def waiting(self, *whom: str) -> float:
        return sum(wait.running for load in self.loads for wait in load.waits if wait.whom in whom)


def bottleneck_of(statuses: Sequence[Status]) -> Bottleneck | None:
    """The bottleneck if it costs much; None for a run whose sides are about even."""
    learner, generators = _side(statuses, "learner"), _side(statuses, "generator")
    slow = _slow_generator(generators)
    if slow is not None or not any(load.over_s >= _SHORTEST_S for load in learner.loads):
        return slow
    at_evaluation = learner.waiting("evaluation")
    waits = 1 - learner.busy if any(load.per_s for load in learner.loads) else max(1 - learner.busy, at_evaluation)
    if waits >= _WAITS_A_LOT:
        return _of_sampling(statuses, learner=learner, generators=generators, waits=waits)
    long_learner, long_generators = learner.long_busy, generators.long_busy
    if long_learner is None or long_generators is None or at_evaluation + learner.waiting("others") >= _HARDLY_WAITS:
        return None
    trains_only = max(waits, 1 - long_learner) <= _HARDLY_WAITS
    idle = 1 - max(generators.busy, long_generators) >= _IDLE
    if trains_only and idle and not shares_full_cores(statuses):
        return _of_training(long_learner, long_generators, count=len(generators.loads))
    return None


def _side(statuses: Sequence[Status], kind: Kind) -> _Side:
    found = [(status, status.load) for status in statuses if status.service == kind]
    known = [(status, load) for status, load in found if load is not None]
    return _Side(statuses=[status for status, _ in known], loads=[load for _, load in known])


def _of_sampling(statuses: Sequence[Status], *, learner: _Side, generators: _Side, waits: float) -> Bottleneck | None:
    env_services = _side(statuses, "env-service")
    for found in (
        _of_rewards(env_services, _side(statuses, "reward-service"), step_s=_step_s(learner)),
        _of_environment(env_services),
        _of_capacity(env_services, learner, generators),
        _of_sequences(generators),
        _of_lag(learner, generators),
    ):
        if found is not None:
            return found
    return _of_generators(generators, waits=waits)


def _slow_generator(generators: _Side) -> Bottleneck | None:
    """A generator that has as many sequences as others, and takes several times as long for a token of one."""
    pairs = list(zip(generators.statuses, generators.loads, strict=True))
    for status, load in pairs:
        others = [other for known, other in pairs if known is not status and other.running]
        if not others or load.running < 1:
            continue
        usual, running = (statistics.median(each) for each in zip(*((o.per_s, o.running) for o in others), strict=True))
        has_as_much = load.running >= _AS_MUCH * running
        takes_longer = load.per_s / load.running < _SLOW * statistics.median(o.per_s / o.running for o in others)
        if has_as_much and takes_longer and load.per_s < _LESS * usual:
            return Bottleneck(
                cause="slow generator",
                who=status.id,
                what=f"Generator {status.id} is slow: {load.per_s:,.0f} tokens/s for {load.running:.0f} sequences, "
                f"while {_of_others(len(others))} {usual:,.0f} for {running:.0f}",
                remedy=f"see on {status.host} what else runs there (process {status.pid}); restart it, or leave it out",
            )
    return None


def _of_others(count: int) -> str:
    return "the other one does" if count == 1 else f"the {count} others do"


def _step_s(learner: _Side) -> float:
    return max((status.progress.usual_s or 0.0 for status in learner.statuses if status.progress), default=0.0)


def _of_rewards(env_services: _Side, rewards: _Side, *, step_s: float) -> Bottleneck | None:
    """Most groups wait for rewards, and each for as long as counts beside a step."""
    at_rewards = env_services.waiting("rewards")
    if not at_rewards or at_rewards < _MOST * env_services.running:
        return None
    if at_rewards < max(_SHORT_S, _MOST * step_s) * sum(load.per_s for load in env_services.loads):
        return None
    seen = f"{at_rewards:.0f} of {env_services.running:.0f} running groups wait for rewards"
    done, queues = sum(load.per_s for load in rewards.loads), [one for each in rewards.statuses for one in each.queues]
    items, busy = (sum(one.depth for one in queues if one.name == name) for name in ("items", "busy workers"))
    if rewards.loads:
        takes = f"one takes {rewards.running / done:.2g} s" if done else "none was given of late"
        seen += f"; {takes}, {items} completions are to be judged" + (f", {busy} workers are busy" if busy else "")
    return Bottleneck(
        cause="rewards",
        what=f"Rewards bound: {seen}",
        remedy="make the verifier faster, raise reward-service.workers.count, or start one more reward-service",
    )


def _of_environment(env_services: _Side) -> Bottleneck | None:
    waiting = env_services.waiting("environment", "host")
    if not waiting or waiting < _MOST * env_services.running:
        return None
    return Bottleneck(
        cause="environment",
        what=f"Environments bound: {waiting:.1f} of {env_services.running:.1f} running groups wait for their code",
        remedy="make its steps faster, raise env-service.workers, or start one more env-service",
    )


def _of_capacity(env_services: _Side, learner: _Side, generators: _Side) -> Bottleneck | None:
    """Env_services are full by their own account, or by the learner's: short groups are sooner over than renewed."""
    full = env_services.fullness >= _FULL or learner.waiting("capacity") >= _FULL
    if not full or not env_services.limit or not generators.limit or generators.fullness > _NEARLY_EMPTY:
        return None
    capacity, running = env_services.limit, max(generators.running, 0.5)
    enough = math.ceil(capacity * _ROOM_TO_SAMPLE * generators.limit / running / max(1, len(env_services.loads)))
    return Bottleneck(
        cause="capacity",
        what=f"Sampling bounds: env-service.capacity {capacity} is full while {_generators(generators)} "
        f"{generators.running:.0f} of {generators.limit} sequences",
        remedy=f"raise env-service.capacity, to {enough} say",
    )


def _of_sequences(generators: _Side) -> Bottleneck | None:
    if not generators.limit or generators.fullness <= 1:
        return None
    return Bottleneck(
        cause="max_num_seqs",
        what=f"Sampling bounds: {_generators(generators)} {generators.limit} of {generators.limit} sequences, and "
        f"{generators.running - generators.limit:.0f} more wait",
        remedy="raise generator.engine.max_num_seqs as far as memory permits, then add a generator",
    )


def _of_lag(learner: _Side, generators: _Side) -> Bottleneck | None:
    if learner.waiting("max_lag") < _MOST or 1 - generators.busy < 1 - _BUSY:
        return None
    return Bottleneck(
        cause="max_lag",
        what=f"The lag bound holds sampling back: generators are idle {1 - generators.busy:.0%} of the time, and no "
        "group may be begun before the next step",
        remedy="raise learner.max_lag",
    )


def _of_generators(generators: _Side, *, waits: float) -> Bottleneck | None:
    count = len(generators.loads)
    if waits < _WAITS_MOST or not count or generators.busy < _BUSY:
        return None
    enough = min(_MOST_GENERATORS * count, math.ceil(count / max(0.05, 1 - waits)))
    return Bottleneck(
        cause="split",
        what=f"Sampling bounds: the learner waits {waits:.0%} of the time, and {_generators(generators)} "
        f"{generators.running:.0f} of {generators.limit} sequences",
        remedy=f"add generators, up to {enough} in all, or take faster ones",
    )


def shares_full_cores(statuses: Sequence[Status]) -> bool:
    """True if learner and generators compute on the cores of one machine, and these are all at work for the run."""
    usages = [status.usage for status in statuses if status.usage is not None]
    sides = [status for status in statuses if status.service in ("learner", "generator")]
    if len({status.host for status in sides}) != 1 or any(usage.gpus for usage in usages):
        return False
    here = [status.usage for status in statuses if status.usage is not None and status.host == sides[0].host]
    usable = max((usage.usable_cores or 0.0 for usage in here), default=0.0)
    return usable > 0 and sum(usage.cores for usage in here) >= _AT_WORK * usable


def _of_training(learner_busy: float, generators_busy: float, *, count: int) -> Bottleneck:
    enough = max(1, math.ceil(count * generators_busy / 0.9))
    fewer = f", or take {enough} instead of {count} generators" if enough < count else ""
    return Bottleneck(
        cause="training",
        what=f"Training bounds: the learner trains {learner_busy:.0%} of the time, generators are idle "
        f"{1 - generators_busy:.0%}",
        remedy=f"raise learner.ranks or lower the work of a step (learner.training.epochs_per_step){fewer}",
    )


def _generators(generators: _Side) -> str:
    count = len(generators.loads)
    return "the generator runs" if count == 1 else f"{count} generators run"
