"""Rates of a recorded run, for `headway plan --calibrate`: what its steps, publishes and generators took.

metrics.jsonl: step ──▶ what each has in common, and seconds of a token; publish ──▶ its times
trajectories/: turns ──▶ what an engine's step takes, with few sequences and with many (else the load lines); rewards
both, of a run on the cores of one machine ──▶ computed seconds in place of durations
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from headway.fitted_costs import fitted_costs
from headway.recorded_texts import GroupTexts, LearningPasses, group_texts
from headway.recorded_turns import SampledTurns, computed_share, engine_curve, sampled_turns, scoring_times
from headway.report import ReportedRun, read_run
from headway.shared_machine import SharedMachine, cost_sums, engine_costs, samples_greedily, shared_machine
from learner.reports.history import is_number
from services.config.sources import ConfigError

_LEAST_BUSY = 0.05
"""Share of the time: loads of generators that worked less say little of how fast they work."""
_SPREAD = 1.3
"""Factor between the most and the fewest sequences from which on a line can be fitted through the loads."""
_ALONE = 2.0
"""An engine that runs fewer sequences than this has mostly one."""

_LEAST_TIMED = 2
_MAX_PAUSED = 0.9
_UNHINDERED = 0.02
"""Quantile of the times of scoring that stands for one with free cores."""

T = TypeVar("T")
Steps = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class LearnedCosts:
    """Computed seconds of a training step beside what all steps have in common: of each pass, of each token of a pass,
    and of each trajectory outside of passes. A step had `passes`, as `counted` beside the `texts` of the run.
    """

    pass_s: float
    token_s: float
    trajectory_s: float
    passes: float
    counted: LearningPasses
    texts: GroupTexts

    def of_step(self, texts: GroupTexts, *, groups: int, group_size: int) -> float:
        """Seconds of a step with groups of these texts."""
        tokens = self.counted.tokens(texts, groups=groups, group_size=group_size)
        return self.passes * self.pass_s + tokens * self.token_s + groups * group_size * self.trajectory_s


@dataclass(frozen=True)
class MeasuredRates:
    """Rates of a run with the same model on the same devices; None where it does not tell.

    An engine's step with n sequences takes `token_s` + n * `sequence_s`, and `begin_s` for each that begins in it.
    `step_s`: of each training step, whatever its tokens: optimizer, weight copy, records; `train_s`: rank-seconds per
    token beside, prompts of `prompt` tokens included, or per sampled one where that is None. `publish_s`, `pause_s`:
    means per publish. `reward_s`: of a group. `greedy`: each group had a greedy answer, too. `alignment`:
    consecutive gradients were compared.

    With a `machine`, whose cores all processes shared, those of engines and of training are computed seconds; what is
    `learned` then stands for `train_s`, if the records tell it.
    """

    run: str
    token_s: float | None = None
    sequence_s: float | None = None
    begin_s: float = 0.0
    train_s: float | None = None
    publish_s: float | None = None
    pause_s: float | None = None
    step_s: float = 0.0
    prompt: float | None = None
    reward_s: float | None = None
    machine: SharedMachine | None = None
    optimizer: str = "adamw"
    alignment: bool = False
    greedy: bool = False
    learned: LearnedCosts | None = None


def warm(records: Sequence[T]) -> Sequence[T]:
    """The records after the first quarter, in which nothing was ahead of the learner yet."""
    return records[len(records) // 4 :]


def measured_rates(folder: Path, *, on_cores: bool = False) -> MeasuredRates:
    """Rates of the run in a folder, of the records that have their numbers. `on_cores`: its engines compute on cores.

    Raises ConfigError for a folder that is none of a run, or of one that has not trained a step.
    """
    run = read_run(folder)
    trained = _with_numbers(run.steps, "train_s", "copy_s", "sampled_tokens")
    steps = warm([step for step in trained if step.get("kind") == "step" and step["sampled_tokens"]])
    if not steps:
        expected = "expected a run that has trained some, such as runs/addition"
        raise ConfigError([f"{folder} holds no step that sampled tokens: {expected}"])
    machine = shared_machine(run, steps, paused=_paused_share(run, steps)) if on_cores else None
    costs = None if machine is None else engine_costs(run, steps)
    if costs is None:
        token_s, sequence_s, machine = _sampling(run, folder, steps, machine)
        begin_s = 0.0
    else:
        token_s, sequence_s, begin_s = fitted_costs(costs)
    step_s, train_s = _training(run, steps, machine)
    publishes = warm(_with_numbers(run.publishes, "total_s", "pause_s"))
    scoring = scoring_times(folder, after_step=int(steps[0].get("step", 1)) - 1)
    return MeasuredRates(
        run=run.name,
        token_s=token_s,
        sequence_s=sequence_s,
        begin_s=begin_s,
        train_s=train_s,
        publish_s=statistics.fmean(publish["total_s"] for publish in publishes) if publishes else None,
        pause_s=statistics.fmean(publish["pause_s"] for publish in publishes) if publishes else None,
        step_s=step_s,
        prompt=_prompt(steps),
        reward_s=None if not scoring.size else _reward_s(scoring, waits_for_cores=machine is not None),
        machine=machine,
        optimizer=str(run.made.get("settings", {}).get("training.optimizer.type", "adamw")),
        alignment=run.made.get("settings", {}).get("training.alignment.mode", "off") != "off",
        greedy=samples_greedily(run),
        learned=None if machine is None else _learned(run, folder, steps, step_s=step_s, trainer_s=machine.trainer_s),
    )


def _learned(run: ReportedRun, folder: Path, steps: Steps, *, step_s: float, trainer_s: float) -> LearnedCosts | None:
    """Costs of passes, fitted over all of them; the rest of what the trainer's thread computed is the trajectories'."""
    sums = [costs for step in steps if (costs := cost_sums(step.get("pass_costs"))) is not None]
    texts = group_texts(folder, after_step=int(steps[0].get("step", 1)) - 1)
    if len(sums) < len(steps) or texts is None:
        return None
    total = sum(sums[1:], start=sums[0])
    pass_s, token_s = fitted_costs(total)
    passes, tokens = (total.products[0][index] / len(steps) for index in range(2))
    beside_s = trainer_s - step_s - passes * pass_s - tokens * token_s
    settings = run.made.get("settings", {})
    return LearnedCosts(
        pass_s=pass_s, token_s=token_s, passes=passes, texts=texts,
        trajectory_s=max(0.0, beside_s) / statistics.fmean(step["trajectories"] for step in steps),
        counted=LearningPasses(
            updates=int(_number(settings, "training.updates_per_step", 1)),
            epochs=int(_number(settings, "training.epochs_per_step", 1)),
        ),
    )  # fmt: skip


def _sampling(
    run: ReportedRun, folder: Path, steps: Steps, machine: SharedMachine | None
) -> tuple[float | None, float | None, SharedMachine | None]:
    """Seconds of an engine's step, and of each sequence in it: computed ones where the machine is given back."""
    turns = sampled_turns(folder, after_step=int(steps[0].get("step", 1)) - 1)
    paused = _paused_share(run, steps)
    open_for_one = 1.0 if turns is None else _open_for_one(run, turns)
    curve = None if turns is None else engine_curve(turns, open_for_one=open_for_one, paused=paused)
    token_s, sequence_s = curve or _engine_step(run, paused=paused)
    if machine is None or token_s is None or sequence_s is None:
        return token_s, sequence_s, None
    if turns is not None and curve is not None:
        share = computed_share(curve, turns, open_for_one=open_for_one, engine_s=machine.engine_s)
    else:
        share = _computed_share(run, steps, (token_s, sequence_s), engine_s=machine.engine_s)
    return share * token_s, share * sequence_s, machine


def _open_for_one(run: ReportedRun, turns: SampledTurns) -> float:
    """Open turns for each that an engine runs: of all generators, with those that wait before it or on their way."""
    began, ended = float(np.min(turns.began)), float(np.max(turns.ended))
    generators = max((_number(load, "generators", 1.0) for load in run.loads), default=1.0)
    running = [
        load["running"] for load in _with_numbers(run.loads, "running", "unix_s") if began <= load["unix_s"] <= ended
    ]
    in_engines = statistics.fmean(running) if running else turns.open
    return generators * max(1.0, turns.open / max(in_engines, 1e-9))


def _computed_share(run: ReportedRun, steps: Steps, curve: tuple[float, float], *, engine_s: float) -> float:
    """See `computed_share`: by the sequences that the engines ran on average, of a run whose loads gave the curve."""
    points = [point for load in run.loads if (point := _point(load, 0.0)) is not None]
    length = sum(step["sampled_tokens"] for step in steps) / sum(step["trajectories"] for step in steps)
    running = max(1.0, statistics.fmean(sequences for sequences, _ in points))
    return float(engine_s / (length * (curve[0] / running + curve[1])))


def _training(run: ReportedRun, steps: Steps, machine: SharedMachine | None) -> tuple[float, float]:
    """Seconds of each step whatever its tokens, and rank-seconds of a token beside: computed ones of a machine."""
    # An earlier release wrote the setting alone, which is 1 under torchrun.
    ranks = _number(run.made, "rank_count", _number(run.made.get("settings", {}), "ranks", 1))
    updates_s = statistics.fmean(_number(step, "optimizer_s", 0.0) for step in steps)
    step_s = updates_s + statistics.fmean(step["copy_s"] for step in steps) + _between_s(steps)
    train_s = max(0.0, statistics.fmean(step["train_s"] for step in steps) - updates_s)
    tokens = statistics.fmean(step["sampled_tokens"] if _prompt(steps) is None else step["tokens"] for step in steps)
    computed = 1.0 if machine is None else machine.trainer_s / (step_s + train_s)
    return computed * step_s, computed * ranks * train_s / tokens


def _between_s(steps: Steps) -> float:
    """Seconds between one step and the wait of the next, for records and the like; in the middle of all."""
    timed = _with_numbers(steps, "time_s", "wait_s")
    between = [
        later["time_s"] - earlier["time_s"] - sum(later[name] for name in ("wait_s", "train_s", "copy_s"))
        for earlier, later in itertools.pairwise(timed)
    ]
    return max(0.0, statistics.median(between)) if between else 0.0


def _prompt(steps: Steps) -> float | None:
    """Tokens of a prompt; None where a step does not tell."""
    told = _with_numbers(steps, "tokens", "trajectories")
    if len(told) < len(steps):
        return None
    given = sum(step["tokens"] - step["sampled_tokens"] for step in told)
    return max(0.0, float(given / sum(step["trajectories"] for step in told)))


def _reward_s(scoring: NDArray[np.float64], *, waits_for_cores: bool) -> float:
    """Mean; where it waited for cores, which are simulated, too, the time of those that hardly did."""
    return float(np.quantile(scoring, _UNHINDERED) if waits_for_cores else np.mean(scoring))


def _paused_share(run: ReportedRun, steps: Steps) -> float:
    """Share of the time in which generators paused for a publish. Pauses are simulated: no rate may hold them, too."""
    publishes, timed = _with_numbers(run.publishes, "pause_s"), _with_numbers(steps, "time_s")
    if not publishes or len(timed) < _LEAST_TIMED:
        return 0.0
    step_s = (timed[-1]["time_s"] - timed[0]["time_s"]) / (len(timed) - 1)
    a_step = min(1.0, len(publishes) / len(run.steps))
    paused_s = a_step * statistics.fmean(publish["pause_s"] for publish in warm(publishes))
    return min(_MAX_PAUSED, paused_s / step_s) if step_s > 0 else 0.0


def _engine_step(run: ReportedRun, *, paused: float) -> tuple[float | None, float | None]:
    """Seconds of an engine's step without a sequence, and of each sequence, by least squares over the run's loads.

    Where all have about as many sequences, all of the time is theirs if they are many, and none if it is one. The
    first loads count, too: a step takes no longer before the generators are ahead, and has few sequences then.
    """
    points = [point for load in run.loads if (point := _point(load, paused)) is not None]
    if not points:
        return None, None
    running, steps_s = [sequences for sequences, _ in points], [step_s for _, step_s in points]
    mean, mean_s = statistics.fmean(running), statistics.fmean(steps_s)
    if max(running) < _ALONE:
        return mean_s, 0.0
    if max(running) < _SPREAD * min(running) or len(points) < 3:
        return 0.0, mean_s / mean
    # A line that falls, or that begins below 0, comes of noise: the nearest one that does neither.
    slope = max(0.0, statistics.linear_regression(running, steps_s).slope)
    return max(0.0, mean_s - slope * mean), min(slope, mean_s / mean)


def _point(load: Mapping[str, Any], paused: float) -> tuple[float, float] | None:
    """Sequences that an engine runs while it works, and the seconds of its step then: a paused one with requests at
    hand counts as busy.
    """
    count, running, per_s, busy = (
        _number(load, name, 0.0) for name in ("generators", "running", "tokens_per_s", "busy")
    )
    if not count or not running or per_s <= 0 or busy < _LEAST_BUSY:
        return None
    sampling = 1 - min(_MAX_PAUSED, paused / busy)
    return running / count / busy, sampling * running / per_s  # each step makes one token per sequence


def _with_numbers(records: Sequence[Mapping[str, Any]], *names: str) -> list[Mapping[str, Any]]:
    return [record for record in records if all(is_number(record.get(name)) for name in names)]


def _number(record: Mapping[str, Any], name: str, default: float) -> float:
    value: Any = record.get(name)
    return float(value) if is_number(value) else default
