"""The addition demo as it ships, from several seeds: does it reach its accuracy, and within its time?

    python -m benchmarks.demo_seeds [--seeds 5]

Each seed is a whole run of `examples/addition/run.toml` in which only `run.seed` differs, from the model that
`make demo` warmed up. Results go to benchmarks/results/demo_seeds.md.
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks.machine import described_machine
from benchmarks.whole_runs import run_headway

CONFIG = Path("examples/addition/run.toml")
RESULT = Path(__file__).with_name("results") / "demo_seeds.md"
ACCURACY, TRAINING_S = 0.93, 180


def row(seed: int) -> str:
    """Trains with the seed; returns the run's row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        found = run_headway(CONFIG, folder=Path(folder), options={"run.seed": seed}).summary
    lags = {int(lag): count for lag, count in found["lag_histogram"].items()}
    mean_lag = sum(lag * count for lag, count in lags.items()) / sum(lags.values())
    reached = found["accuracy_after"] >= ACCURACY and found["train_wall_s"] <= TRAINING_S
    return (
        f"| {seed} | {found['steps']} | {found['accuracy_before']:.3f} | **{found['accuracy_after']:.3f}** "
        f"| {found['train_wall_s']:.0f} | {found['completions_per_s']:.0f} | {mean_lag:.1f} "
        f"| {'yes' if reached else 'no'} |"
    )


def main() -> None:
    """Rewrites the table after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="runs; %(default)s")
    arguments = parser.parse_args()
    lines = [
        "# The addition demo from several seeds",
        "",
        f"`python -m benchmarks.demo_seeds --seeds {arguments.seeds}`; {described_machine()}.",
        f"Accuracy on 2,000 held-out tasks. Reached: at least {ACCURACY} in at most {TRAINING_S} s of training.",
        "",
        "| seed | steps | before | after | training, s | completions/s | mean lag | reached |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for seed in range(arguments.seeds):
        lines.append(row(seed))
        print(lines[-1], flush=True)
        RESULT.write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
