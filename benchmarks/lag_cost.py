"""Cost of tokens' age in learning, and the part that corrections save: the addition task without its services.

    python -m benchmarks.lag_cost [--steps 300] [--seeds 1] [--only NAME ...]

The real trainer, and a plain sampler of the same weights in place of vLLM, env_service and rewards. The settings are
the demo's, but that the learning rate falls to a tenth where nothing else is said. Batches wait in a queue, so that
every token is exactly `lag` versions old when it is trained on: nothing here depends on how fast the machine is. Two
runs at once, one thread each. Results go to benchmarks/results/lag_cost.md.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import described_machine
from benchmarks.plain_sampler import MODEL, LagQueue, PlainSampler
from services.process import parent_death_signal

RESULT = Path(__file__).with_name("results") / "lag_cost.md"
COMPLETIONS, GROUP_SIZE = 256, 4
UPDATES, EPOCHS = 2, 2
WINDOW = 20
GOAL = 0.9
DEMO: Mapping[str, object] = {"divergence_limit": 0.1}
"""The demo's settings of its algorithm, beside the correction."""


@dataclass(frozen=True)
class LagVariant:
    """A setting of the benchmark: the tokens' lag in versions, options of grpo beside DEMO, and differences from the
    demo.
    """

    lag: int
    algo: Mapping[str, object] = field(default_factory=dict)
    epochs: int = EPOCHS
    group_size: int = GROUP_SIZE
    learning_rate: float = 5e-4
    final_fraction: float = 0.1


VARIANTS = {
    "lag 0": LagVariant(0),
    "lag 1": LagVariant(1),
    "lag 2": LagVariant(2),
    "lag 1, correction_cap 1": LagVariant(1, {"correction_cap": 1.0}),
    "lag 2, correction_cap 1": LagVariant(2, {"correction_cap": 1.0}),
    "lag 2, correction_floor 0.5": LagVariant(2, {"correction_floor": 0.5}),
    "lag 2, no correction": LagVariant(2, {"correction": "none"}),
    "lag 2, clip 0.4": LagVariant(2, {"clip_low": 0.4, "clip_high": 0.4}),
    "lag 2, three passes": LagVariant(2, epochs=3),
    "lag 1, learning rate 7e-4": LagVariant(1, learning_rate=7e-4),
    "lag 1, groups of 8": LagVariant(1, group_size=8),
    "lag 1, groups of 2": LagVariant(1, group_size=2),
    "lag 1, three passes": LagVariant(1, epochs=3),
    "lag 1, learning rate to 0": LagVariant(1, final_fraction=0.0),
}


def run(variant: LagVariant, *, steps: int, seed: int) -> dict[str, object]:
    """Mean rewards of windows of steps, when one of them first was at GOAL, and held-out accuracy at the end."""
    import torch

    from learner.algorithms.presets.grpo import GrpoConfig
    from learner.training.config import OptimizerConfig, TrainingConfig
    from learner.training.ranks import Ranks, open_process_group
    from learner.training.trainer import Trainer

    torch.set_num_threads(1)
    ranks, settings = Ranks(), {**DEMO, **variant.algo}
    optimizer = OptimizerConfig(
        learning_rate=variant.learning_rate,
        schedule="linear",
        total_updates=steps * UPDATES * variant.epochs,
        warmup_updates=5,
        beta2=0.999,
        final_fraction=variant.final_fraction,
    )
    trainer = Trainer(
        MODEL,
        algorithm=GrpoConfig.model_validate(settings),
        config=TrainingConfig(updates_per_step=UPDATES, epochs_per_step=variant.epochs, optimizer=optimizer),
        ranks=ranks,
        commands=open_process_group(ranks, timeout_s=60),
    )
    sampler, queue, rewards = PlainSampler(seed=seed), LagQueue(variant.lag), []
    for step in range(steps):
        sampler.load(trainer)
        sampled = sampler.batch(groups=COMPLETIONS // variant.group_size, group_size=variant.group_size)
        if batch := queue.put(sampled):
            rewards.append(np.mean([sequence.reward for sequence in batch]))
            trainer.train_step(batch, version=step)
    sampler.load(trainer)
    means = {end: float(np.mean(rewards[end - WINDOW : end])) for end in range(WINDOW, len(rewards) + 1)}
    return {
        "rewards": [mean for end, mean in means.items() if end % 100 == 0],
        "goal": next((end for end, mean in means.items() if mean >= GOAL), None),
        "accuracy": sampler.accuracy(),
    }


def _in_a_process(name: str, *, steps: int, seed: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.lag_cost", "--one", name, "--steps", str(steps), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=parent_death_signal)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _row(name: str, found: Sequence[dict[str, Any]]) -> str:
    curves = np.mean([one["rewards"][: min(len(each["rewards"]) for each in found)] for one in found], axis=0)
    accuracies = [one["accuracy"] for one in found]
    seeds = ", ".join(f"{accuracy:.3f}" for accuracy in accuracies)
    goals = ", ".join("never" if one["goal"] is None else str(one["goal"]) for one in found)
    curve = ", ".join(f"{reward:.3f}" for reward in curves)
    return f"| {name} | {curve} | {goals} | **{np.mean(accuracies):.3f}** | {seeds} |"


def main() -> None:
    """Runs them, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=VARIANTS)
    parser.add_argument("--one", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(run(VARIANTS[given.one], steps=given.steps, seed=given.seed)))
        return
    names = given.only or list(VARIANTS)
    with ThreadPoolExecutor(2) as pool:
        asked = {
            name: [pool.submit(_in_a_process, name, steps=given.steps, seed=seed) for seed in range(given.seeds)]
            for name in names
        }
        rows = [_row(name, [each.result() for each in some]) for name, some in asked.items()]
    head = [
        "# What the age of tokens costs in learning",
        "",
        f"`{shlex.join(['python', '-m', 'benchmarks.lag_cost', *sys.argv[1:]])}`, which says what it is: "
        f"addition, {COMPLETIONS} completions a step in groups of {GROUP_SIZE}, {UPDATES}",
        f"updates in each of {EPOCHS} passes, learning rate 5e-4 falling to a tenth. {described_machine()}.",
        "",
        f"| tokens' age, and what else differs | mean reward of {WINDOW} steps before every 100th | "
        f"steps to {GOAL} | held-out accuracy, mean | by seed |",
        "|---|---|---|---|---|",
    ]
    RESULT.write_text("\n".join([*head, *rows, ""]), encoding="utf-8")
    print(RESULT.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
