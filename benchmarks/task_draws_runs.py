"""Tasks by what they teach, in whole runs: addition of mixed widths, of which two thirds are beyond the policy.

    .venv/bin/python -m benchmarks.task_draws_runs [--seeds 5] [--steps 200] [--resume] [--report]

A thousand training tasks: a third are sums of two digits, of which `models/addition` solves some four in ten, and the
others sums of three digits, which it was never shown and does not solve. Tasks come by `[learner.rollouts.tasks] by =
"order"` or `"signal"`; all else is alike, and the sides take turns. What counts is accuracy on a thousand held-out sums
of two digits, by the tokens that were sampled to train on. Results go to benchmarks/results/task_draws_runs.{json,md};
runs that were measured before stay in them until they are made again.
"""

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.machine import described_machine, machines_of
from benchmarks.whole_runs import RunFiles, median_told, run_headway, tokens_to, tokens_told, with_steps
from env_service.environments.jsonl import split

CONFIG = Path("examples/addition/run.toml")
RESULTS = Path(__file__).with_name("results")
SIDES = ("order", "signal")
TASKS = 1_000
LEARNABLE = 1 / 3
EVALUATION = 1_000
TARGETS = (0.5, 0.6, 0.7)


@dataclass(frozen=True)
class DrawnRun:
    """Numbers of a run that has ended. `accuracies` are held out, by step; `sampled` the tokens up to each of these;
    `spread` is the mean share of the trained groups whose rewards differ.
    """

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
    def middle(self) -> float:
        """Accuracy at the evaluation nearest to the middle."""
        middle = max(self.accuracies) / 2
        return self.accuracies[min(self.accuracies, key=lambda step: abs(step - middle))]


def main() -> None:
    """Makes the runs, and rewrites the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each side; default: %(default)s")
    parser.add_argument("--steps", type=int, default=200, help="of a run; default: %(default)s")
    parser.add_argument("--resume", action="store_true", help="without the runs that the results have")
    parser.add_argument("--report", action="store_true", help="only rewrite the table")
    given = parser.parse_args()
    store = RESULTS / "task_draws_runs.json"
    runs = {(run.by, run.seed): run for run in _read(store)}
    for seed in range(0 if given.report else given.seeds):
        for by in SIDES:
            if given.resume and (by, seed) in runs:
                continue
            runs[by, seed] = _run(by, seed, steps=given.steps)
            store.write_text(json.dumps([asdict(run) for run in runs.values()], indent=1) + "\n", encoding="utf-8")
    text = table([runs[key] for key in sorted(runs)])
    (RESULTS / "task_draws_runs.md").write_text(text, encoding="utf-8")
    print(text)


def _run(by: str, seed: int, *, steps: int) -> DrawnRun:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        training, evaluation = split()
        narrow = [divmod(pair, 100) for pair in random.Random(seed).sample(training, round(TASKS * LEARNABLE))]
        wide = _wide_sums(TASKS - len(narrow), seed)
        held_out = [divmod(pair, 100) for pair in random.Random(5).sample(evaluation, EVALUATION)]
        _write(folder / "train.jsonl", [*(_line(*pair, 2) for pair in narrow), *(_line(*pair, 3) for pair in wide)])
        _write(folder / "held_out.jsonl", [_line(*pair, 2) for pair in held_out])
        config = folder / "run.toml"
        config.write_text(_run_file(by, steps=steps), encoding="utf-8")
        return _run_of(by, seed, run_headway(config, folder=folder, options={"run.seed": seed}))


def _wide_sums(count: int, seed: int) -> list[tuple[int, int]]:
    dice = random.Random(seed)
    return [(dice.randrange(100, 1000), dice.randrange(100, 1000)) for _ in range(count)]


def _line(left: int, right: int, width: int) -> str:
    prompt = f"{left:0{width}d}+{right:0{width}d}="
    return json.dumps({"prompt": prompt, "verifier": "exact_match", "arguments": {"answer": f"{left + right:03d}"}})


def _write(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _run_file(by: str, *, steps: int) -> str:
    """The example's file with these tasks, the draw, and one update a step at a constant rate."""
    text = CONFIG.read_text(encoding="utf-8")
    own = f"""
[learner.rollouts]
group_size = 8
max_tokens = 5
tasks = {{ by = "{by}" }}

[learner.algo]
type = "grpo"

[learner.training.optimizer]
learning_rate = 3e-4
beta2 = 0.999

[learner.evaluation]
tasks = {EVALUATION}
every_steps = {max(1, steps // 20)}
final_tasks = {EVALUATION}
"""
    before, _, rest = text.partition("\n[learner.rollouts]")
    _, found, engine = rest.partition("\n[generator]")
    assert found, f"{CONFIG} has another shape than expected: [learner.rollouts] and later [generator]"
    services, _, _ = engine.partition("\n[[env-service.environments]]")
    head = before.replace("steps = 500", f"steps = {steps}").replace("groups_per_step = 64", "groups_per_step = 32")
    environment = (
        '\n[[env-service.environments]]\nname = "sums"\nsource = "jsonl"\nchat = false\n'
        'train_file = "train.jsonl"\nevaluation_file = "held_out.jsonl"\n'
    )
    return f"{head}\n{own}\n[generator]{services}{environment}"


def _run_of(by: str, seed: int, found: RunFiles) -> DrawnRun:
    steps = found.of_kind("step")
    return DrawnRun(
        by=by,
        seed=seed,
        machine=described_machine(),
        accuracies=found.accuracies,
        sampled=found.sampled_until(found.accuracies),
        spread=statistics.fmean(1 - entry["uniform_groups_share"] for entry in steps),
        seconds=steps[-1]["time_s"],
    )


def _read(store: Path) -> list[DrawnRun]:
    known = json.loads(store.read_text(encoding="utf-8")) if store.exists() else []
    return [DrawnRun(**with_steps(each, "accuracies", "sampled")) for each in known]


def table(runs: Sequence[DrawnRun]) -> str:
    """The results as Markdown."""
    steps = max(runs[0].accuracies)
    rows = [
        f"| {run.by} | {run.seed} | {run.spread:.2f} | {run.accuracies[0]:.3f} | {run.middle:.3f} "
        f"| **{run.accuracies[steps]:.3f}** | {' | '.join(tokens_told(run.reached(each)) for each in TARGETS)} "
        f"| {run.seconds:.0f} |"
        for run in runs
    ]
    targets = " | ".join(f"tokens to {target:.0%}" for target in TARGETS)
    return "\n".join(
        [
            "# Tasks by what they teach: addition of mixed widths",
            "",
            f"`python -m benchmarks.task_draws_runs`, which says what is compared; {steps} steps of 32 groups of 8 by",
            f"grpo. Accuracy of {EVALUATION:,} held-out sums of two digits, sampled at temperature 1, before,",
            "in the middle and after. Groups with spread: of those that are trained on.",
            "",
            f"| by | seed | groups with spread | before | middle | after | {targets} | seconds |",
            f"|---|---|---|---|---|---|{'---|' * len(TARGETS)}---|",
            *rows,
            "",
            *(_mean(by, [run for run in runs if run.by == by]) for by in SIDES),
            "",
            *machines_of(run.machine for run in runs),
            "",
        ]
    )


def _mean(by: str, runs: Sequence[DrawnRun]) -> str:
    ends = [run.accuracies[max(run.accuracies)] for run in runs]
    medians = [f"{median_told([run.reached(target) for run in runs])} to {target:.0%}" for target in TARGETS]
    return f"- {by}: {statistics.fmean(ends):.3f} at the end in the mean; tokens, medians: {', '.join(medians)}"


if __name__ == "__main__":
    main()
