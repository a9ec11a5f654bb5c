"""Computed seconds of a run's threads, whose cores all of its processes shared, by its own records.

    load lines ── cores of each kind of process ──────┐
    step lines ── seconds that the trainer computed ──┴─▶ computed seconds of a step, and of a completion by thread

Computed seconds are the same however many threads wait for a core, and durations are not: where sides slow each other
down, a plan needs the former, and the number of cores.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.report import ReportedRun
from learner.reports.history import is_number
from protocol.costs import CostSums

BEFORE_ENGINE = 0.25
"""Share of a generator's computed seconds that its process before the engine takes, of completions of a few tokens."""
GROUP_AS_COMPLETIONS = 3.3
"""Completions that cost as much, outside of model and engine, as what is done once for their group: both numbers are
those of benchmarks/results/completion_cost.md, with groups of 4 and of 8.
"""
_MAX_LOADING = 0.5
"""Share of a generator's computed seconds that loads of weights may be: beyond that a pause was a wait."""
_ENGINE_COUNTS = 3
"""Of an engine's step: itself, its sequences, and those that begin."""
_GENERATOR, _LEARNER = "generator", "learner"
_OTHERS = ("env-service", "reward-service")
_KINDS = {_GENERATOR, _LEARNER, *_OTHERS}


@dataclass(frozen=True)
class SharedMachine:
    """So many `cores`, without those that others had at work beside the run, and the computed seconds of a completion
    in groups of `group_size`, greedy answers among them: before an engine, in an engine, and in other threads by name.
    A step costs the trainer's thread `trainer_s`. `engine_is_told`: the engines counted what their steps computed.
    """

    cores: float
    group_size: int
    before_s: float
    engine_s: float
    others_s: Mapping[str, float]
    trainer_s: float
    engine_is_told: bool = False

    def of_group(self, size: int) -> float:
        """Cost of a completion in groups of this size, for one in those of the run: a part of it is the group's."""
        return (1 + GROUP_AS_COMPLETIONS / size) / (1 + GROUP_AS_COMPLETIONS / self.group_size)


def samples_greedily(run: ReportedRun) -> bool:
    """True if each group of the run had one more answer, sampled at temperature 0."""
    from learner.algorithms.presets.registry import ALGORITHMS  # deferred: a plan without a run needs none of them

    algorithm = ALGORITHMS.get(str(run.made.get("settings", {}).get("algo.type", "")))
    return algorithm is not None and algorithm.greedy_baseline


def shared_machine(run: ReportedRun, steps: Sequence[Mapping[str, Any]], *, paused: float) -> SharedMachine | None:
    """The costs in these steps of a run; None where its records do not tell them, or tell of several machines.

    A generator that pauses for a publish, `paused` of the time, loads weights: that is computed, and not sampled.
    """
    cores = run.made.get("host", {}).get("cores")
    after = steps[0].get("unix_s", 0.0)
    loads = [load for load in run.loads if load.get("hosts") == 1 and set(load.get("cores") or ()) >= _KINDS]
    loads = [load for load in loads if load.get("unix_s", after) >= after] or loads
    computed = [step["cpu_s"] for step in steps if is_number(step.get("cpu_s"))]
    if not is_number(cores) or not loads or not computed or len(steps) < 2:
        return None
    step_s = (steps[-1]["time_s"] - steps[0]["time_s"]) / (len(steps) - 1)
    trained = statistics.fmean(step["trajectories"] for step in steps)
    group_size = steps[0]["trajectories"] // steps[0]["groups"]
    sampled_size = group_size + samples_greedily(run)
    completions = trained * sampled_size / group_size
    used_s = {kind: step_s * cores_used for kind, cores_used in _used(loads).items()}
    trainer_s = statistics.fmean(computed)
    used_s[_LEARNER] = max(0.0, used_s[_LEARNER] - trainer_s)
    if (engine_cores := _engine_cores(run, steps)) is not None:
        engine_s = min(used_s[_GENERATOR], step_s * engine_cores)
        before_s = used_s[_GENERATOR] - engine_s
    else:
        generators = max(load.get("generators", 1) for load in loads)
        loading_s = min(_MAX_LOADING * used_s[_GENERATOR], generators * paused * step_s)
        before_s = BEFORE_ENGINE * used_s[_GENERATOR]
        engine_s = used_s[_GENERATOR] - before_s - loading_s
    return SharedMachine(
        cores=_free(float(cores), loads), group_size=sampled_size,
        before_s=before_s / completions, engine_s=engine_s / completions, engine_is_told=engine_cores is not None,
        others_s={kind: used_s[kind] / completions for kind in (*_OTHERS, _LEARNER)}, trainer_s=trainer_s,
    )  # fmt: skip


def _used(loads: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Cores that each kind of process used: from the first of these loads to the last one, or on average in the seconds
    before each.
    """
    told = [load for load in loads if set(load.get("cpu_s") or ()) >= _KINDS and is_number(load.get("unix_s"))]
    spent_s = told[-1]["unix_s"] - told[0]["unix_s"] if told else 0.0
    if spent_s > 0:
        found = {kind: (told[-1]["cpu_s"][kind] - told[0]["cpu_s"][kind]) / spent_s for kind in _KINDS}
        if min(found.values()) > 0:
            return found
    return {kind: statistics.fmean(load["cores"][kind] for load in loads) for kind in _KINDS}


def cost_sums(written: object) -> CostSums | None:
    """Sums as a record has them; None if it has none."""
    try:
        return CostSums.model_validate_json(json.dumps(written))
    except ValueError:
        return None


def engine_costs(run: ReportedRun, steps: Sequence[Mapping[str, Any]]) -> CostSums | None:
    """Of the engines' steps, from the first load of these steps to the last one; None if the records lack them, or an
    engine was started anew meanwhile.
    """
    told = _told_costs(run, steps)
    if len(told) < 2:
        return None
    (_, first), (_, last) = told[0], told[-1]
    found = last - first
    return found if len(found.seconds) == _ENGINE_COUNTS and min(found.seconds) > 0 else None


def _told_costs(run: ReportedRun, steps: Sequence[Mapping[str, Any]]) -> list[tuple[float, CostSums]]:
    """When the loads of these steps were, or all if these are too few, and what they told."""
    told = [
        (float(load["unix_s"]), costs)
        for load in run.loads
        if is_number(load.get("unix_s")) and (costs := cost_sums(load.get("step_costs"))) is not None
    ]
    later = [(at, costs) for at, costs in told if at >= steps[0].get("unix_s", 0.0)]
    return later if len(later) > 1 else told


def _engine_cores(run: ReportedRun, steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Cores that steps of engines kept at work; None if the records do not tell."""
    told, costs = _told_costs(run, steps), engine_costs(run, steps)
    return None if costs is None else costs.seconds[0] / (told[-1][0] - told[0][0])


def _free(cores: float, loads: Sequence[Mapping[str, Any]]) -> float:
    """Cores that the run used or could have used: of all, those that nobody else did."""
    used = [sum(load["cores"].values()) for load in loads]
    others = [
        load["machine_cores"] - own
        for load, own in zip(loads, used, strict=True)
        if is_number(load.get("machine_cores"))
    ]
    return max(statistics.fmean(used), cores - max(0.0, statistics.fmean(others or [0.0])))
