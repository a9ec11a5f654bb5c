"""Every streamed algorithm, and every correction, on tokens of an exact age: addition without its services.

    python -m benchmarks.exact_lag [--seeds 3] [--steps 150] [--only VARIANT ...] [--resume] [--report] [--list]

The settings are those of `benchmarks.algorithms`, and so is the trainer. A plain sampler of the same weights takes the
place of vLLM, env_service and rewards, and batches wait in a queue, so that every token is exactly that many versions
old when it is trained on, however fast the machine is: 0, 4, and 8 with four updates a step instead of one. Two runs at
once, one thread each. Left out are what is grpo on a task of one turn without branches and components (gigpo, hgpo,
treerl, gdpo), and opd, which learns from a teacher. Each run appends a line to benchmarks/results/exact_lag.jsonl, a
failed one too, and exact_lag.md is made of the newest line of each.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from benchmarks.algorithm_runs import CRITIC, LEARNING_RATE, PRESETS, STALENESS, AlgorithmRun
from benchmarks.machine import described_machine, machines_of
from services.process import parent_death_signal

if TYPE_CHECKING:
    from learner.algorithms.preset import Preset
    from learner.training.batch import TrainSequence
    from learner.training.ranks import CommandChannel

CONFIG = Path(__file__).with_name("settings") / "addition.toml"
RESULTS = Path(__file__).with_name("results") / "exact_lag.jsonl"
GROUPS, GROUP_SIZE = 32, 8
STEPS, SEEDS = 150, 3
WINDOW = 20
"""Steps whose rewards are averaged: of the best such window and of the last one."""
KEPT_WITHIN = 0.02
_OTHER_CORRECTIONS: Mapping[str, Mapping[str, object]] = {
    "second moment": {"algo.second-moment-limit": 0.04},
    "binary KL": {"algo.binary-kl-limit": 0.1},
}
"""Beside those of `benchmarks.algorithms`."""
_BOUNDS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "grpo, at most 1": ("grpo", {"algo.correction-cap": 1.0}),
    "grpo, at most 5": ("grpo", {"algo.correction-cap": 5.0}),
    "grpo, 5 and 1": ("grpo", {"algo.correction-cap": 5.0, "algo.correction-cap-bad": 1.0}),
    "grpo, at most 10": ("grpo", {"algo.correction-cap": 10.0}),
    "reinforce, at most 2": ("reinforce", {"algo.ratio-cap": 2.0}),
    "reinforce, at most 5": ("reinforce", {"algo.ratio-cap": 5.0}),
    "rloo, at most 2": ("rloo", {"algo.ratio-cap": 2.0}),
    "rloo, at most 5": ("rloo", {"algo.ratio-cap": 5.0}),
    "rloo, at most 10": ("rloo", {"algo.ratio-cap": 10.0}),
    "cispo, at most 2": ("cispo", {"algo.ratio-high": 1.0}),
    "cispo, at most 5": ("cispo", {"algo.ratio-high": 4.0}),
    "opo, at most 5": ("opo", {"algo.ratio-cap": 5.0}),
    "remax, at most 5": ("remax", {"algo.ratio-cap": 5.0}),
    "rae, at most 5": ("rae", {"algo.ratio-cap": 5.0}),
    "reinforce_pp, at most 5": ("reinforce_pp", {"algo.correction-cap": 5.0}),
    "ppo, at most 5": ("ppo", {"algo.correction-cap": 5.0, **CRITIC}),
    "ppo_head, at most 5": ("ppo", {"algo.correction-cap": 5.0, **CRITIC, "training.critic.kind": "head"}),
    **{
        f"{name}, 1 and 5": (algo, {"algo.correction-cap": 1.0, "algo.correction-cap-bad": 5.0, **extra})
        for name, algo, extra in (
            ("grpo", "grpo", {}),
            ("reinforce_pp", "reinforce_pp", {}),
            ("ppo", "ppo", CRITIC),
            ("ppo_head", "ppo", {**CRITIC, "training.critic.kind": "head"}),
        )
    },
    **{
        f"{name}, 1 and 5": (name, {"algo.ratio-cap-bad": 5.0}) for name in ("reinforce", "rloo", "opo", "remax", "rae")
    },
}
"""Upper bounds of the ratio to the behavior policy, beside the algorithms' own: 2 of grpo, ppo and reinforce_pp, 1.28
of cispo, 1 of the others. "1 and 5": 1 of good tokens, 5 of bad ones, whose advantage is negative.
"""
_NOT_COMPARED = ("gigpo", "hgpo", "grpo again", "opd")


@dataclass(frozen=True)
class Setting:
    """An age of all tokens in versions, and updates of a step."""

    lag: int
    updates: int

    @property
    def told(self) -> str:
        """As a column's head."""
        return f"lag {self.lag}" if self.updates == 1 else f"lag {self.lag}, {self.updates} updates"


FRESH, OLD, STALE = SETTINGS = (Setting(0, 1), Setting(4, 1), Setting(8, 4))


class AgedRun(BaseModel):
    """A run and its outcome. `rewards`: mean rewards of the best WINDOW steps and of the last; `failure`: the error
    that ended it, and then nothing is known of its end.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    variant: str
    lag: int
    updates: int
    seed: int
    steps: int
    settings: str
    machine: str
    before: float
    after: float | None = None
    rewards: tuple[float, float] | None = None
    effective_sample: float | None = None
    cpu_s: float = 0.0
    failure: str | None = None

    @property
    def key(self) -> tuple[str, int, int, int, int, str]:
        """Equal for a run and its repetition."""
        return self.variant, self.lag, self.updates, self.seed, self.steps, self.settings


def planned(*, seeds: int = SEEDS, steps: int = STEPS) -> list[AlgorithmRun]:
    """All runs: each variant of one algorithm at each setting, and the corrections of grpo where tokens are stale."""
    presets = {run.variant: run for run in PRESETS if run.variant not in _NOT_COMPARED}
    rae = replace(presets["reinforce"], variant="rae", algo="rae")
    alike = ("corrected", "synchronous")  # grpo itself, at two of the settings
    names = {run.variant for run in STALENESS if run.algo == "grpo"} - set(alike)
    corrections = {run.variant: run for run in STALENESS if run.variant in names}
    default = next(run for run in STALENESS if run.variant == "corrected")
    corrections |= {name: replace(default, variant=name, extra=extra) for name, extra in _OTHER_CORRECTIONS.items()}
    bounds = [replace(default, variant=name, algo=algo, extra=extra) for name, (algo, extra) in _BOUNDS.items()]
    kinds = (([*presets.values(), rae], SETTINGS), (bounds, (OLD, STALE)), (corrections.values(), (STALE,)))
    return [
        replace(run, seed=seed, steps=steps, max_lag=setting.lag, updates_per_step=setting.updates)
        for seed in range(seeds)
        for runs, settings in kinds
        for run in runs
        for setting in settings
    ]


def key_of(run: AlgorithmRun) -> tuple[str, int, int, int, int, str]:
    """The key of its row."""
    return run.variant, run.max_lag, run.updates_per_step, run.seed, run.steps, _told_settings(run)


def _told_settings(run: AlgorithmRun) -> str:
    extra = {name: value for name, value in run.extra.items() if name not in ("guard.enabled", "lag.pacing")}
    return ", ".join(
        [f"learning rate {run.learning_rate:g}", *(f"`{name} = {value}`" for name, value in extra.items())]
    )


def measured(run: AlgorithmRun) -> AgedRun:
    """Trains it in this process; a failure becomes a row that says so."""
    from benchmarks.plain_sampler import LagQueue, PlainSampler
    from learner.algorithms.preset import Preset
    from learner.config import LearnerConfig
    from learner.training.ranks import Ranks
    from learner.training.trainer import Trainer
    from services.config.models import load_config

    began, ranks = time.process_time(), Ranks()
    words = [word for name, value in run.options.items() for word in (f"--{name}", str(value))]
    config = load_config(LearnerConfig, process="learner", argv=["--config", str(CONFIG), *words], environ={})
    sampler, queue = PlainSampler(seed=run.seed), LagQueue(run.max_lag)
    row = _row(run, before=sampler.accuracy())
    trainer = Trainer(config.model, algorithm=config.algo, config=config.training, ranks=ranks, commands=_commands())
    preset: Preset = trainer.preset
    rewards, shares = list[float](), list[float]()
    try:
        for step in range(run.steps + run.max_lag):
            sampler.load(trainer)
            sampled = sampler.batch(
                groups=GROUPS,
                group_size=GROUP_SIZE,
                with_spread=config.algo.wants_spread,
                with_greedy=preset.greedy_baseline,
            )
            rewards.append(statistics.fmean(each.reward for each in sampled))
            if batch := queue.put(sampled):
                share = trainer.train_step(selected(batch, preset), version=step).effective_sample_share
                shares += [] if share is None else [share]
    except (RuntimeError, ValueError) as error:  # NotFinite and its like
        return row.model_copy(update={"failure": f"{type(error).__name__}: {str(error)[:200]}"})
    sampler.load(trainer)
    means = [statistics.fmean(rewards[end - WINDOW : end]) for end in range(WINDOW, len(rewards) + 1)]
    return row.model_copy(
        update={
            "after": sampler.accuracy(),
            "rewards": (max(means), means[-1]),
            "effective_sample": statistics.fmean(shares) if shares else None,
            "cpu_s": time.process_time() - began,
        }
    )


def _row(run: AlgorithmRun, *, before: float) -> AgedRun:
    return AgedRun(
        variant=run.variant,
        lag=run.max_lag,
        updates=run.updates_per_step,
        seed=run.seed,
        steps=run.steps,
        settings=_told_settings(run),
        machine=described_machine(),
        before=before,
    )


@cache
def _commands() -> "CommandChannel":
    """Of the one process group that a process may open."""
    from learner.training.ranks import Ranks, open_process_group

    return open_process_group(Ranks(), timeout_s=60)


def selected(batch: "Sequence[TrainSequence]", preset: "Preset") -> "list[TrainSequence]":
    """The trajectories of each group that the preset trains on, those of a pair numbered."""
    if preset.select is None:
        return list(batch)
    groups = [batch[start : start + GROUP_SIZE] for start in range(0, len(batch), GROUP_SIZE)]
    return [
        replace(group[place], pair=number if preset.paired else -1)
        for number, group in enumerate(groups)
        for place in preset.select([each.reward for each in group])
    ]


def _begin_worker() -> None:
    import torch

    parent_death_signal()
    torch.set_num_threads(1)


def read_rows(path: Path) -> dict[tuple[str, int, int, int, int, str], AgedRun]:
    """The newest row of each run; none if there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {row.key: row for row in map(AgedRun.model_validate_json, lines)}


def report(rows: Mapping[Any, AgedRun], runs: Sequence[AlgorithmRun]) -> str:
    """Both tables, of the runs that were planned and are there."""
    there = [rows[key_of(run)] for run in runs if key_of(run) in rows]
    missing = len(runs) - len(there)
    presets = list(dict.fromkeys(row.variant for row in there if row.lag == FRESH.lag))
    bounded = [name for name in _BOUNDS if any(row.variant == name for row in there)]
    of_grpo = list(dict.fromkeys(row.variant for row in there if row.variant not in (*presets, *bounded)))
    fresh = _mean([row for row in there if _is(row, "grpo", FRESH)])
    lines = [
        "# Algorithms and corrections on tokens of an exact age",
        "",
        f"`python -m benchmarks.exact_lag`, which says what is compared: addition, {runs[0].steps} steps of {GROUPS} "
        f"groups of {GROUP_SIZE},",
        f"accuracy of 2,000 held-out sums, sampled at temperature 1, from {there[0].before:.3f}. Mean of the seeds, "
        "lowest and highest.",
        f"A run fell if its last {WINDOW} steps earned less than half of what its best {WINDOW} did. The learning rate",
        f"is {LEARNING_RATE:g}, falling linearly to a tenth, where nothing else is said.",
        *([f"**Partial**: {missing} of {len(runs)} runs are missing."] if missing else []),
        "",
        f"| algorithm | {' | '.join(each.told for each in SETTINGS)} | lag 4 loses | lag 8 loses | set |",
        "|---|---|---|---|---|---|---|",
        *(_preset_line(name, there) for name in presets),
        "",
        "## Upper bounds of the ratio to the behavior policy",
        "",
        "Beside the algorithms' own, which the table above has: 2 of grpo, ppo and reinforce_pp, 1.28 of cispo, 1 of",
        "the others. 1 and 5: 1 of good tokens, 5 of bad ones, whose advantage is negative. Fresh tokens have a ratio",
        "of 1, which no bound cuts.",
        "",
        f"| bound | {OLD.told} | {STALE.told} | lag 4 loses | lag 8 loses | set |",
        "|---|---|---|---|---|---|",
        *(_bound_line(name, there) for name in bounded),
        "",
        "## Corrections of grpo, where tokens are stale",
        "",
        f"Eight versions old, four updates a step; fresh is grpo at lag 0{'' if fresh is None else f', {fresh:.3f}'}.",
        "",
        "| correction | accuracy | less than fresh by | effective sample | fell | set |",
        "|---|---|---|---|---|---|",
        _correction_line("default", [row for row in there if _is(row, "grpo", STALE)], fresh),
        *(_correction_line(name, [row for row in there if _is(row, name, STALE)], fresh) for name in of_grpo),
        "",
        *machines_of(row.machine for row in there),
        f"- {sum(row.cpu_s for row in there) / 3600:.1f} hours of one core in all",
        "",
    ]
    return "\n".join(lines)


def _is(row: AgedRun, variant: str, setting: Setting) -> bool:
    return (row.variant, row.lag, row.updates) == (variant, setting.lag, setting.updates)


def _preset_line(name: str, there: Sequence[AgedRun]) -> str:
    cells, means = [], []
    for setting in SETTINGS:
        some = [row for row in there if _is(row, name, setting)]
        cells.append(_accuracy(some))
        means.append(_mean(some))
    settings = _set(next(row for row in there if row.variant == name))
    return f"| {name} | {' | '.join(cells)} | {_less(means[1], means[0])} | {_less(means[2], means[0])} | {settings} |"


def _bound_line(name: str, there: Sequence[AgedRun]) -> str:
    fresh = _mean([row for row in there if _is(row, name.partition(",")[0], FRESH)])
    rows = [[row for row in there if _is(row, name, setting)] for setting in (OLD, STALE)]
    losses = " | ".join(_less(_mean(some), fresh) for some in rows)
    settings = _set(next(row for some in rows for row in some))
    return f"| {name} | {' | '.join(map(_accuracy, rows))} | {losses} | {settings} |"


def _correction_line(name: str, rows: Sequence[AgedRun], fresh: float | None) -> str:
    shares = [row.effective_sample for row in rows if row.effective_sample is not None]
    fell = sum(_fell(row) for row in rows)
    share = f"{statistics.fmean(shares):.2f}" if shares else ""
    settings = _set(rows[0]) if rows else ""
    return (
        f"| {name} | {_accuracy(rows)} | {_less(_mean(rows), fresh)} | {share} | {fell} of {len(rows)} | {settings} |"
    )


def _set(row: AgedRun) -> str:
    """The settings of a row that are not those of all."""
    return row.settings.removeprefix(f"learning rate {LEARNING_RATE:g}").removeprefix(", ")


def _fell(row: AgedRun) -> bool:
    return row.rewards is None or row.rewards[1] < row.rewards[0] / 2


def _mean(rows: Sequence[AgedRun]) -> float | None:
    known = [row.after for row in rows if row.after is not None]
    return statistics.fmean(known) if known else None


def _accuracy(rows: Sequence[AgedRun]) -> str:
    known = [row.after for row in rows if row.after is not None]
    failed = f"; {len(rows) - len(known)} failed" if len(known) < len(rows) else ""
    fell = sum(_fell(row) for row in rows)
    told = f"; {fell} of {len(rows)} fell" if fell else ""
    if not known:
        return failed.removeprefix("; ") or "not run"
    return f"**{statistics.fmean(known):.3f}** ({min(known):.3f} to {max(known):.3f}{failed}{told})"


def _less(value: float | None, fresh: float | None) -> str:
    if value is None or fresh is None:
        return ""
    return f"{fresh - value:+.3f}" if fresh - value <= KEPT_WITHIN else f"**{fresh - value:+.3f}**"


def main() -> None:
    """Makes the runs, two at a time, and rewrites the report after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", nargs="+", metavar="VARIANT", default=[], help="these alone")
    parser.add_argument("--at-once", type=int, default=2, help="processes; default: %(default)s")
    parser.add_argument("--results", type=Path, default=RESULTS, help="lines; the report is beside them; %(default)s")
    parser.add_argument("--resume", action="store_true", help="without the runs that the results have")
    parser.add_argument("--report", action="store_true", help="only rewrite the tables")
    parser.add_argument("--list", action="store_true", help="show the runs, and end")
    given = parser.parse_args()
    runs = planned(seeds=given.seeds, steps=given.steps)
    if unknown := sorted(set(given.only) - {run.variant for run in runs}):
        raise SystemExit(f"no variant is named {', '.join(unknown)}; there are {sorted({run.variant for run in runs})}")
    rows = read_rows(given.results)
    chosen = [run for run in runs if not given.only or run.variant in given.only]
    left = [] if given.report else [run for run in chosen if not (given.resume and key_of(run) in rows)]
    if given.list:
        print("\n".join(f"{run.variant}, lag {run.max_lag}, seed {run.seed}" for run in left))
        return
    spawn = multiprocessing.get_context("spawn")  # a process group and its threads do not survive a fork
    with ProcessPoolExecutor(given.at_once, mp_context=spawn, initializer=_begin_worker) as pool:
        for number, done in enumerate(as_completed([pool.submit(measured, run) for run in left]), start=1):
            row = done.result()
            with given.results.open("a", encoding="utf-8") as file:
                file.write(row.model_dump_json() + "\n")
            rows[row.key] = row
            ended = row.failure or f"{row.before:.3f} to {row.after:.3f}"
            print(f"{number}/{len(left)} {row.variant}, lag {row.lag}, seed {row.seed}: {ended}", flush=True)
            given.results.with_suffix(".md").write_text(report(rows, runs), encoding="utf-8")
    given.results.with_suffix(".md").write_text(report(rows, runs), encoding="utf-8")


if __name__ == "__main__":
    main()
