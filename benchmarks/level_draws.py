"""Tasks by what they teach beside levels of a curriculum and the plain order: mazes and arithmetic of three
difficulties.

    .venv/bin/python -m benchmarks.level_draws [--seeds 5] [--only maze | arithmetic] [--steps N] [--resume] [--report]

A few hundred training tasks, a third of each difficulty, of which the warm start was shown one alone. They come in
their order, by `[learner.rollouts.tasks] by = "signal"`, or as `source = "levels"` with the curriculum's defaults but
that the next level is taken at half solved. All else is alike, the services stay up, and the sides take turns. Held-out
tasks are of all difficulties. Results go to benchmarks/results/level_draws.{json,md}, each run as it ends.
"""

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import mixed_tasks
from benchmarks.env_learning import warm_up
from benchmarks.machine import described_machine, machines_of
from benchmarks.warm_system import Options, warm_system
from benchmarks.whole_runs import RunFiles, files_of, median_told, tokens_to, tokens_told, with_steps

RESULTS = Path(__file__).with_name("results")
EVALUATION = 400
_LIMIT_S = 1_800.0
SIDES: Mapping[str, Options] = {
    "order": {"rollouts.environment": "mixed"},
    "levels": {"rollouts.environment": "levels", "rollouts.curriculum.raise-at": 0.5},
    "signal": {"rollouts.environment": "mixed", "rollouts.tasks.by": "signal"},
}


@dataclass(frozen=True)
class LevelledTask:
    """An example, its options by difficulty, and how far a run goes."""

    parts: Sequence[Mapping[str, float]]
    shared: Mapping[str, object]
    tasks: int
    steps: int
    targets: tuple[float, ...]
    told: str

    def environments(self, kind: str) -> str:
        """Of the run file: all difficulties in one, each by itself, and as levels."""
        parts = [{**self.shared, **part} for part in self.parts]
        counts = f"evaluation_tasks = {EVALUATION}"
        whole = ", ".join(map(_toml, parts))
        texts = [
            f'name = "mixed"\nsource = "mixed_tasks:MixedEnvironment"\ntrain_tasks = {self.tasks}\n{counts}\n'
            f'options = {{ kind = "{kind}", parts = [{whole}] }}',
            *(
                f'name = "level-{number}"\nsource = "{kind}"\ntrain_tasks = {self.tasks // len(parts)}\n{counts}\n'
                f"options = {_toml(part)}"
                for number, part in enumerate(parts)
            ),
            f'name = "levels"\nsource = "levels"\nlevels = {[f"level-{number}" for number in range(len(parts))]}',
        ]
        turns = "" if kind == "arithmetic" else "\nrules = { turn_tokens = 2 }"
        own = [text + ("" if text.startswith('name = "levels"') else turns) for text in texts]
        return "".join(f"\n[[env-service.environments]]\n{text}\n" for text in own)


TASKS: Mapping[str, LevelledTask] = {
    "maze": LevelledTask(
        parts=({"holes": 0.1}, {"holes": 0.25}, {"holes": 0.45}),
        shared={"system_prompt": "", "invalid_text": ""},
        tasks=300,
        steps=60,
        targets=(0.3, 0.4),
        told="4 by 4 cells, of which a tenth, a quarter or nearly half are holes",
    ),
    "arithmetic": LevelledTask(
        parts=({"operands": 2}, {"operands": 3}, {"operands": 4}),
        shared={"form": "text", "largest": 9},
        tasks=300,
        steps=60,
        targets=(0.5, 0.6),
        told="two, three and four numbers",
    ),
}


@dataclass(frozen=True)
class LevelledRun:
    """Numbers of a run that has ended. `accuracies` are held out, by step; `sampled` the tokens up to each of these;
    `spread` is the mean share of the trained groups whose rewards differ.
    """

    task: str
    by: str
    seed: int
    machine: str
    accuracies: dict[int, float]
    sampled: dict[int, int]
    spread: float
    seconds: float

    def reached(self, target: float) -> int | None:
        """Tokens sampled up to the first evaluation of at least `target`; None if there was none."""
        return tokens_to(target, self.accuracies, self.sampled)

    @property
    def after(self) -> float:
        """Accuracy at the end."""
        return self.accuracies[max(self.accuracies)]


def main() -> None:
    """Makes the runs, and rewrites the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each side; default: %(default)s")
    parser.add_argument("--only", nargs="+", choices=list(TASKS), default=list(TASKS), help="these tasks alone")
    parser.add_argument("--steps", type=int, help="of a run, if not the task's own")
    parser.add_argument("--resume", action="store_true", help="without the runs that the results have")
    parser.add_argument("--report", action="store_true", help="only rewrite the tables")
    given = parser.parse_args()
    store = RESULTS / "level_draws.json"
    known = json.loads(store.read_text(encoding="utf-8")) if store.exists() else []
    runs = {
        (run.task, run.by, run.seed): run
        for run in (LevelledRun(**with_steps(each, "accuracies", "sampled")) for each in known)
    }
    for name in () if given.report else given.only:
        warm_up(name)
        with (
            tempfile.TemporaryDirectory() as place,
            warm_system(write_run(name, Path(place)), folder=Path(place), options={}) as system,
        ):
            for seed in range(given.seeds):
                for by in SIDES:
                    if given.resume and (name, by, seed) in runs:
                        continue
                    options = options_of(TASKS[name], by=by, seed=seed, steps=given.steps)
                    ended = system.learn(f"{by}-{seed}", options=options, limit_s=_LIMIT_S)
                    runs[name, by, seed] = run = _run_of(name, by, seed, files_of(ended.folder))
                    store.write_text(json.dumps([asdict(each) for each in runs.values()], indent=1) + "\n")
                    print(f"{name} by {by}, seed {seed}: {run.accuracies[0]:.3f} to {run.after:.3f}", flush=True)
    (RESULTS / "level_draws.md").write_text(table(list(runs.values())), encoding="utf-8")


def write_run(name: str, folder: Path) -> Path:
    """The example's run file with environments of three difficulties, and the code of the mixed one beside it."""
    shutil.copy(mixed_tasks.__file__, folder / "mixed_tasks.py")
    text = Path("examples", name, "run.toml").read_text(encoding="utf-8")
    head, found, _ = text.partition("\n[[env-service.environments]]")
    assert found, f"the run file of {name} has another shape than expected: its environments at the end"
    head = head.replace(f'"models/{name}"', f'"{Path("models", name).resolve()}"')
    config = folder / "run.toml"
    config.write_text(head + TASKS[name].environments(name), encoding="utf-8")
    return config


def _toml(values: Mapping[str, object]) -> str:
    return "{ " + ", ".join(f"{name} = {json.dumps(value)}" for name, value in values.items()) + " }"


def options_of(task: LevelledTask, *, by: str, seed: int, steps: int | None) -> Options:
    steps = steps or task.steps
    return {
        "steps": steps,
        "seed": seed,
        "rollouts.seed": seed,
        "evaluation.tasks": EVALUATION,
        "evaluation.every-steps": max(1, steps // 12),
        "evaluation.final-tasks": EVALUATION,
        **SIDES[by],
    }


def _run_of(name: str, by: str, seed: int, found: RunFiles) -> LevelledRun:
    steps = found.of_kind("step")
    return LevelledRun(
        task=name,
        by=by,
        seed=seed,
        machine=described_machine(),
        accuracies=found.accuracies,
        sampled=found.sampled_until(found.accuracies),
        spread=statistics.fmean(1 - entry["uniform_groups_share"] for entry in steps),
        seconds=steps[-1]["time_s"],
    )


def table(runs: Sequence[LevelledRun]) -> str:
    """The results as Markdown."""
    names = [name for name in TASKS if any(run.task == name for run in runs)]
    return "\n".join(
        [
            "# Tasks by what they teach, beside levels",
            "",
            "`python -m benchmarks.level_draws`, which says what is compared: grpo, 16 groups of 8 a step. Accuracy of",
            f"{EVALUATION} held-out tasks of all difficulties, sampled at temperature 1. Groups with spread: of those "
            "that are trained on.",
            *(line for name in names for line in _section(name, [run for run in runs if run.task == name])),
            "",
            *machines_of(run.machine for run in runs),
            "",
        ]
    )


def _section(name: str, runs: Sequence[LevelledRun]) -> list[str]:
    task = TASKS[name]
    targets = " | ".join(f"tokens to {target:.0%}" for target in task.targets)
    return [
        "", f"## {name}: {task.told}; {task.tasks} training tasks, {max(runs[0].accuracies)} steps", "",
        f"| by | seed | groups with spread | before | after | {targets} | seconds |",
        f"|---|---|---|---|---|{'---|' * len(task.targets)}---|",
        *(_row(run) for by in SIDES for run in runs if run.by == by),
        "",
        *(_mean(by, [run for run in runs if run.by == by]) for by in SIDES),
    ]  # fmt: skip


def _row(run: LevelledRun) -> str:
    tokens = " | ".join(tokens_told(run.reached(target)) for target in TASKS[run.task].targets)
    return (
        f"| {run.by} | {run.seed} | {run.spread:.2f} | {run.accuracies[0]:.3f} | **{run.after:.3f}** | {tokens} "
        f"| {run.seconds:.0f} |"
    )


def _mean(by: str, runs: Sequence[LevelledRun]) -> str:
    if not runs:
        return f"- {by}: not run"
    targets = TASKS[runs[0].task].targets
    told = [f"{median_told([run.reached(target) for run in runs])} to {target:.0%}" for target in targets]
    after = [run.after for run in runs]
    return (
        f"- {by}: {statistics.fmean(after):.3f} at the end in the mean, {min(after):.3f} to {max(after):.3f}; tokens, "
        f"medians: {', '.join(told)}"
    )


if __name__ == "__main__":
    main()
