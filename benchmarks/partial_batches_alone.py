"""A step that begins early against one that waits for its batch, where nothing but the trainer uses the cores.

    .venv/bin/python -m benchmarks.partial_batches_alone [--rounds N] [--write]

The real trainer on batches of the addition task, whose groups come by the clock, as from generators on other devices:
one after the other, in the time in which the trainer computes the whole batch. Both ways in alternation, in one
process.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.machine import described_machine
from benchmarks.plain_sampler import MODEL, PlainSampler

if TYPE_CHECKING:
    from learner.training.batch import TrainSequence
    from learner.training.trainer import Trainer

RESULT = Path(__file__).with_name("results") / "partial_batches_alone.md"
ROW, GROUPS, GROUP_SIZE = 256, 32, 8
WARM_ROUNDS = 3


def main() -> None:
    """Trains by both ways in turn, prints the comparison, and writes it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    trainer, sampler = _trainer(), PlainSampler(seed=0)
    batch = sampler.batch(groups=GROUPS, group_size=GROUP_SIZE)
    whole = [_step(trainer, batch, every_s=0.0, early=False) for _ in range(WARM_ROUNDS + 5)]
    compute_s = statistics.median(whole[WARM_ROUNDS:])
    pairs = []
    for number in range(arguments.rounds):
        batch = sampler.batch(groups=GROUPS, group_size=GROUP_SIZE)
        ways = (False, True) if number % 2 == 0 else (True, False)
        took = {early: _step(trainer, batch, every_s=compute_s / GROUPS, early=early) for early in ways}
        pairs.append((took[False], took[True]))
    report = _report(pairs, compute_s=compute_s)
    print(report)
    if arguments.write:
        RESULT.write_text(report, encoding="utf-8")


def _trainer() -> "Trainer":
    import torch

    from learner.algorithms.presets.grpo import GrpoConfig
    from learner.training.config import OptimizerConfig, TrainingConfig
    from learner.training.ranks import Ranks, open_process_group
    from learner.training.trainer import Trainer

    torch.set_num_threads(1)
    optimizer = OptimizerConfig(learning_rate=5e-4)
    config = TrainingConfig(partial_batches=True, microbatch_tokens=ROW, optimizer=optimizer)
    commands = open_process_group(Ranks(), timeout_s=60)
    return Trainer(MODEL, algorithm=GrpoConfig(), config=config, ranks=Ranks(), commands=commands)


def _step(trainer: "Trainer", batch: "Sequence[TrainSequence]", *, every_s: float, early: bool) -> float:
    """Seconds from the time at which the first group is begun to be sampled to the end of the step."""
    began = time.perf_counter()
    for count in range(1, GROUPS + 1):
        time.sleep(max(0.0, began + count * every_s - time.perf_counter()))
        if early and count < GROUPS and time.perf_counter() < began + (count + 1) * every_s:
            trainer.begin_step(batch[: count * GROUP_SIZE], version=trainer.updates)
    trainer.train_step(batch, version=trainer.updates)
    return time.perf_counter() - began


def _report(pairs: Sequence[tuple[float, float]], *, compute_s: float) -> str:
    late, early = ([pair[place] for pair in pairs] for place in range(2))
    low, middle, high = statistics.quantiles([one / other for other, one in pairs], n=4)
    lines = [
        "# A step that begins early, on cores of its own",
        "",
        f"`benchmarks/partial_batches_alone.py`: {len(pairs)} steps each way in alternation, {GROUPS} groups of "
        f"{GROUP_SIZE} that come within {compute_s:.3f} s, in which the trainer computes them; rows of {ROW} tokens.",
        f"{described_machine()}.",
        "",
        "| | from the first group's beginning to the end of the step, s (median) |",
        "|---|---|",
        f"| waits for the whole batch | {statistics.median(late):.3f} |",
        f"| begins early | {statistics.median(early):.3f} |",
        "",
        f"A step that begins early takes **{middle:.2f} times** as long (median of the pairs; quartiles {low:.2f} and "
        f"{high:.2f}). 0.5 would be all of the computing hidden.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
