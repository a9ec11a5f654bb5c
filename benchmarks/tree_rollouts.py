"""Groups that branch against groups that do not: reward by what was sampled for it.

    .venv/bin/python -m benchmarks.tree_rollouts [--seeds 3] [--steps 100] [--report]

Each run is `headway up` on examples/branches/run.toml, a chain of three sums: `treerl` and `grpo` on groups of eight
whose four beginnings go on in two ways each, and `grpo` on groups of eight that share their prompt only. All have the
same number of steps and of trajectories, so that the branched ones sample less: what members share was sampled once.
Results go to benchmarks/results/tree_rollouts.{json,md}; runs that were measured before stay in them until they are
made again.
"""

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.machine import described_machine, machines_of
from benchmarks.whole_runs import RunFiles, run_headway, with_steps

EXAMPLE = Path("examples/branches")
RESULTS = Path(__file__).with_name("results")
RULES = "rules = { branch_after = [1], branch_width = 2 }\n"
SIDES: Mapping[str, tuple[str, bool]] = {
    "treerl, branched": ("treerl", True),
    "grpo, branched": ("grpo", True),
    "grpo": ("grpo", False),
}
"""Algorithm, and True where groups branch."""


@dataclass(frozen=True)
class TreeRun:
    """Numbers of a run that has ended. `rewards` are held-out means by step, of 0 to 3."""

    side: str
    seed: int
    machine: str
    rewards: dict[int, float]
    tasks: int
    sampled_tokens: int
    trained_tokens: int
    trajectories: int
    seconds: float


def main() -> None:
    """Makes the runs, the sides in turns, and rewrites the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each side; default: %(default)s")
    parser.add_argument("--steps", type=int, default=100, help="of a run; default: %(default)s")
    parser.add_argument("--report", action="store_true", help="only rewrite the table")
    given = parser.parse_args()
    store = RESULTS / "tree_rollouts.json"
    runs = {(run.side, run.seed): run for run in _read(store)}
    for seed in range(0 if given.report else given.seeds):
        for side in SIDES:
            runs[side, seed] = _run(side, seed, steps=given.steps)
            store.write_text(json.dumps([asdict(run) for run in runs.values()], indent=1) + "\n", encoding="utf-8")
    text = table(sorted(runs.values(), key=lambda run: (list(SIDES).index(run.side), run.seed)))
    (RESULTS / "tree_rollouts.md").write_text(text, encoding="utf-8")
    print(text)


def _run(side: str, seed: int, *, steps: int) -> TreeRun:
    algo, branched = SIDES[side]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "run.toml"
        text = (EXAMPLE / "run.toml").read_text(encoding="utf-8")
        assert RULES in text, f"the rules of {EXAMPLE / 'run.toml'} are others: expected {RULES!r}"
        config.write_text(text if branched else text.replace(RULES, ""), encoding="utf-8")
        shutil.copy(EXAMPLE / "chain.py", folder)
        options = {
            "run.seed": seed,
            "learner.algo": algo,
            "learner.steps": steps,
            "learner.evaluation.every-steps": max(1, steps // 4),
            "learner.evaluation.tasks": 200,  # it has no more
            "learner.evaluation.final-tasks": 200,
        }
        return _run_of(side, seed, run_headway(config, folder=Path(folder), options=options))


def _run_of(side: str, seed: int, found: RunFiles) -> TreeRun:
    steps, evaluations = found.of_kind("step"), found.of_kind("evaluation")
    return TreeRun(
        side=side,
        seed=seed,
        machine=described_machine(),
        rewards={entry["version"]: entry["reward"] for entry in evaluations},
        tasks=max(entry["tasks"] for entry in evaluations),
        sampled_tokens=sum(entry["sampled_tokens"] for entry in steps),
        trained_tokens=sum(entry["trained_tokens"] for entry in steps),
        trajectories=sum(entry["trajectories"] for entry in steps),
        seconds=steps[-1]["time_s"],
    )


def _read(store: Path) -> list[TreeRun]:
    known = json.loads(store.read_text(encoding="utf-8")) if store.exists() else []
    return [TreeRun(**with_steps(each, "rewards")) for each in known]


def table(runs: Sequence[TreeRun]) -> str:
    """The results as Markdown."""
    sides = dict.fromkeys(run.side for run in runs)
    rows = [
        f"| {run.side} | {run.seed} | {run.rewards[0]:.3f} | {_middle(run)} | **{run.rewards[max(run.rewards)]:.3f}** "
        f"| {run.trajectories:,} | {run.sampled_tokens:,} | {run.trained_tokens:,} | {run.seconds:.0f} |"
        for run in runs
    ]
    return "\n".join(
        [
            "# Groups that branch",
            "",
            "`python -m benchmarks.tree_rollouts`, which says what is compared. Reward of three sums, 0 to 3, on",
            f"{runs[0].tasks:,} held-out chains, sampled at temperature 1, of a model that knew single sums.",
            "Tokens that branches share were sampled once, and trained in each of them.",
            "",
            "| side | seed | before | on the way | after | trajectories | tokens sampled | tokens trained | seconds |",
            "|---|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            *(_mean(side, [run for run in runs if run.side == side]) for side in sides),
            "",
            *machines_of(run.machine for run in runs),
            "",
        ]
    )


def _middle(run: TreeRun) -> str:
    return ", ".join(f"{run.rewards[step]:.3f} at {step}" for step in sorted(run.rewards)[1:-1])


def _mean(side: str, runs: Sequence[TreeRun]) -> str:
    ends = [run.rewards[max(run.rewards)] for run in runs]
    tokens = statistics.fmean(run.sampled_tokens for run in runs)
    return (
        f"- {side}: {statistics.fmean(ends):.3f} in the mean of {len(ends)} seeds, {min(ends):.3f} to {max(ends):.3f}, "
        f"for {tokens:,.0f} tokens sampled"
    )


if __name__ == "__main__":
    main()
