"""Learning rate, batch and group size for the addition demo: held-out accuracy after the same number of completions.

    .venv/bin/python -m benchmarks.addition_sweep [--completions N] [--only NAME ...]

Every variant is a whole run of the demo's four processes from the same initial model. Results go to
benchmarks/results/addition_sweep.md; variants that were measured before stay in the table until they are run again.
"""

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.whole_runs import run_headway

RESULTS = Path(__file__).with_name("results")
CONFIG = Path(__file__).with_name("settings") / "addition.toml"


@dataclass(frozen=True)
class SweepVariant:
    """A setting of the sweep: learning rate, groups in a step, trajectories in a group, and if uniform groups are left
    out.
    """

    learning_rate: float
    groups: int
    group_size: int
    drop_uniform: bool = False
    beta2: float = 0.95
    capacity: int = 64
    max_lag: int = 4
    epochs: int = 1
    updates: int = 1
    divergence: float | None = None

    @property
    def name(self) -> str:
        uniform = "-drop" if self.drop_uniform else ""
        beta2 = "" if self.beta2 == 0.95 else f"-beta2_{self.beta2:g}"
        capacity = "" if self.capacity == 64 else f"-capacity{self.capacity}"
        epochs = "" if self.epochs == 1 else f"-epochs{self.epochs}"
        updates = "" if self.updates == 1 else f"-updates{self.updates}"
        divergence = "" if self.divergence is None else f"-divergence{self.divergence:g}"
        shape = f"lr{self.learning_rate:g}-{self.groups}x{self.group_size}-lag{self.max_lag}"
        return f"{shape}{uniform}{beta2}{capacity}{epochs}{updates}{divergence}"


VARIANTS = (
    SweepVariant(learning_rate=3e-4, groups=32, group_size=8),
    SweepVariant(learning_rate=5e-4, groups=32, group_size=8),
    SweepVariant(learning_rate=8e-4, groups=32, group_size=8),
    SweepVariant(learning_rate=5e-4, groups=32, group_size=8, max_lag=0),
    SweepVariant(learning_rate=5e-4, groups=32, group_size=8, beta2=0.999),
    SweepVariant(learning_rate=8e-4, groups=32, group_size=8, beta2=0.999),
    SweepVariant(learning_rate=5e-4, groups=32, group_size=8, beta2=0.999, drop_uniform=True),
    SweepVariant(learning_rate=5e-4, groups=16, group_size=16, beta2=0.999, capacity=16),
    SweepVariant(learning_rate=5e-4, groups=32, group_size=8, beta2=0.999, capacity=16),
    SweepVariant(learning_rate=5e-4, groups=32, group_size=8, beta2=0.999, capacity=16, epochs=2),
    *(
        SweepVariant(
            rate,
            groups,
            256 // groups,
            beta2=0.999,
            capacity=groups // 2,
            epochs=epochs,
            updates=updates,
            divergence=divergence,
        )
        for rate, groups, epochs, updates, divergence in (
            (5e-4, 32, 1, 4, None),
            (5e-4, 32, 2, 2, None),
            (5e-4, 32, 2, 4, None),
            (5e-4, 32, 4, 2, None),
            (8e-4, 32, 2, 2, None),
            (3.5e-4, 32, 2, 2, None),
            (5e-4, 32, 2, 2, 0.1),
            (5e-4, 64, 2, 2, None),
            (5e-4, 64, 2, 2, 0.1),
            (5e-4, 64, 3, 2, 0.1),
        )
    ),
    SweepVariant(learning_rate=5e-4, groups=64, group_size=4, beta2=0.999, capacity=16),
    SweepVariant(learning_rate=5e-4, groups=16, group_size=8, beta2=0.999, capacity=16),
    SweepVariant(learning_rate=3e-4, groups=32, group_size=8, max_lag=1),
    SweepVariant(learning_rate=3e-4, groups=32, group_size=8, drop_uniform=True),
    SweepVariant(learning_rate=5e-4, groups=32, group_size=8, drop_uniform=True),
    SweepVariant(learning_rate=8e-4, groups=32, group_size=8, drop_uniform=True),
    SweepVariant(learning_rate=5e-4, groups=16, group_size=16, drop_uniform=True),
    SweepVariant(learning_rate=5e-4, groups=16, group_size=8, drop_uniform=True),
    SweepVariant(learning_rate=1e-3, groups=32, group_size=16, drop_uniform=True),
)


@dataclass(frozen=True)
class SweepResult:
    """Accuracies, time and throughput of a variant's run."""

    name: str
    steps: int
    accuracy_before: float
    accuracy_after: float
    accuracies: dict[int, float]
    train_wall_s: float
    completions_per_s: float
    lag_mean: float


def main() -> None:
    """Runs the variants and rewrites the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=102_400)
    parser.add_argument("--only", nargs="*", default=[variant.name for variant in VARIANTS])
    arguments = parser.parse_args()
    store = RESULTS / "addition_sweep.json"
    known = json.loads(store.read_text(encoding="utf-8")) if store.exists() else []
    results = {item["name"]: item for item in known}
    for variant in VARIANTS:
        if variant.name in arguments.only:
            result = _run(variant, completions=arguments.completions)
            print(result, flush=True)
            results[variant.name] = asdict(result)
            RESULTS.mkdir(exist_ok=True)
            store.write_text(json.dumps(list(results.values()), indent=1) + "\n", encoding="utf-8")
            (RESULTS / "addition_sweep.md").write_text(_table(list(results.values())), encoding="utf-8")


def _run(variant: SweepVariant, *, completions: int) -> SweepResult:
    steps = completions // (variant.groups * variant.group_size)
    options = {
        "learner.steps": steps,
        "learner.max-lag": variant.max_lag,
        "learner.groups-per-step": variant.groups,
        "learner.rollouts.group-size": variant.group_size,
        "learner.rollouts.drop-uniform-groups": str(variant.drop_uniform).lower(),
        "learner.training.optimizer.learning-rate": variant.learning_rate,
        "learner.training.epochs-per-step": variant.epochs,
        "learner.training.updates-per-step": variant.updates,
        "learner.training.optimizer.total-updates": steps * variant.epochs * variant.updates,
        "learner.training.optimizer.beta2": variant.beta2,
        "env-service.capacity": variant.capacity,
        "learner.evaluation.every-steps": max(1, steps // 5),
    }
    if variant.divergence is not None:
        options["learner.algo.divergence-limit"] = variant.divergence
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_headway(CONFIG, folder=Path(folder), options=options)
    summary = outcome.summary
    lags = {int(lag): count for lag, count in summary["lag_histogram"].items()}
    return SweepResult(
        name=variant.name,
        steps=summary["steps"],
        accuracy_before=summary["accuracy_before"],
        accuracy_after=summary["accuracy_after"],
        accuracies={entry["version"]: entry["accuracy"] for entry in outcome.of_kind("evaluation")},
        train_wall_s=summary["train_wall_s"],
        completions_per_s=summary["completions_per_s"],
        lag_mean=sum(lag * count for lag, count in lags.items()) / sum(lags.values()),
    )


def _table(results: list[dict[str, float]]) -> str:
    rows = [
        f"| {item['name']} | {item['steps']} | {item['accuracy_before']:.3f} | **{item['accuracy_after']:.3f}** "
        f"| {item['train_wall_s']:.0f} | {item['completions_per_s']:.0f} | {item['lag_mean']:.1f} |"
        for item in results
    ]
    return "\n".join(
        [
            "# Settings of the addition demo",
            "",
            "`benchmarks/addition_sweep.py [--completions N]`, from benchmarks/settings/addition.toml; accuracy on",
            "2,000 held-out tasks, sampled. The learning rate falls linearly to a tenth. Wall times are",
            "of a shared machine. Names: learning rate, groups x group size, max_lag; drop: groups of equal rewards",
            "are left out; capacity: groups in flight, 64 if not said; epochs: times that a batch is gone through,",
            "each in so many updates; divergence: divergence_limit. Models of other warm-ups begin elsewhere.",
            "",
            "| variant | steps | before | after | training, s | completions/s | mean lag |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    main()
