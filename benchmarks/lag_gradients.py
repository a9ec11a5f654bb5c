"""Gradients by lag of a corrected loss beside an uncorrected one, and the cost of measuring them.

    .venv/bin/python -m benchmarks.lag_gradients [--steps 80] [--every 8] [--groups 64] [--lag 8] [--seed 0]

The addition task with the real trainer, and a plain sampler of the same weights in place of vLLM and the services, as
in `benchmarks.lag_cost`: batches wait in a queue, so that every token is exactly `lag` versions old when it is trained
on. Each batch makes four updates. Every few steps the queue holds groups of every lag up to that, and those of lag 0
are sampled anyway; their gradients are compared by the code that a run uses. Nothing is measured at a step's cost but
what the comparison adds: sampling groups of lag 0 is the work of the next steps, done earlier. One process for each
loss, one after the other, one thread each. Results go to benchmarks/results/lag_gradients.md.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.lag_cost import COMPLETIONS, EPOCHS, GROUP_SIZE, UPDATES
from benchmarks.machine import described_machine
from benchmarks.plain_sampler import MODEL, PlainSampler, aged
from benchmarks.result_files import print_and_write
from learner.lag_measurements import ComparedGroups
from learner.training.lag_gradients import WINDOW, Moments, bucket_of, label_of, largest_lag, moments_of, reading_of
from services.process import parent_death_signal

if TYPE_CHECKING:
    from learner.training.batch import TrainSequence
    from learner.training.trainer import Trainer

RESULT = Path(__file__).with_name("results") / "lag_gradients.md"
LOSSES: Mapping[str, Mapping[str, object]] = {"corrected": {}, "uncorrected": {"correction": "none"}}
_LAST = 10
"""Steps whose mean reward is told."""


def measure(trainer: "Trainer", waiting: "Sequence[Sequence[TrainSequence]]", *, groups: int) -> Moments:
    """Moments of so many groups of each bucket, as many of each of its lags as of the others; the batches that wait
    are of rising version, the last one of lag 0.
    """
    chosen, owners, buckets = [], list[int](), list[int]()
    for lag, batch in enumerate(reversed(waiting)):
        lags = max(1, largest_lag(bucket_of(lag)) // 2)
        for group in range(min(groups // lags, len(batch) // GROUP_SIZE)):
            members = batch[group * GROUP_SIZE : (group + 1) * GROUP_SIZE]
            chosen += [replace(each, group=len(buckets)) for each in aged(members, lag=lag)]
            owners += [len(buckets)] * len(members)
            buckets.append(bucket_of(lag))
    compared = ComparedGroups(groups=(), buckets=tuple(buckets))
    units, parts = compared.units, compared.unit_buckets
    sketches = trainer.sketches(chosen, units=[units[owner] for owner in owners], parts=parts)
    return moments_of(sketches, parts, sizes=compared.sizes)


def run(loss: str, *, steps: int, every: int, groups: int, lag: int, seed: int) -> dict[str, Any]:
    """Readings of the measurements, mean rewards, seconds of steps and comparisons, and held-out accuracy."""
    import torch

    from learner.algorithms.presets.grpo import GrpoConfig
    from learner.training.config import OptimizerConfig, TrainingConfig
    from learner.training.ranks import Ranks, open_process_group
    from learner.training.trainer import Trainer

    torch.set_num_threads(1)
    ranks = Ranks()
    optimizer = OptimizerConfig(learning_rate=5e-4, warmup_updates=5, beta2=0.999)
    trainer = Trainer(
        MODEL,
        algorithm=GrpoConfig.model_validate(LOSSES[loss]),
        config=TrainingConfig(updates_per_step=UPDATES, epochs_per_step=EPOCHS, optimizer=optimizer),
        ranks=ranks,
        commands=open_process_group(ranks, timeout_s=600),
    )
    sampler, waiting, history = PlainSampler(seed=seed), deque[Any](), list[Moments]()
    rewards, told, step_s, pass_s = list[float](), [], list[float](), list[float]()
    for step in range(steps):
        sampler.load(trainer)
        waiting.append(sampler.batch(groups=COMPLETIONS // GROUP_SIZE, group_size=GROUP_SIZE))
        rewards.append(float(np.mean([each.reward for each in waiting[-1]])))
        if len(waiting) <= lag:
            continue
        if (step + 1) % every == 0:
            began = time.process_time()
            history = [*history, measure(trainer, tuple(waiting), groups=groups)][-WINDOW:]
            pass_s.append(time.process_time() - began)
            told.append(_told(history, step=step, reward=float(np.mean(rewards[-_LAST:]))))
        began = time.process_time()
        trainer.train_step(aged(waiting.popleft(), lag=lag), version=step)
        step_s.append(time.process_time() - began)
    sampler.load(trainer)
    return {"told": told, "step_s": float(np.median(step_s)), "pass_s": float(np.median(pass_s)),
            "accuracy": sampler.accuracy()}  # fmt: skip


def _told(history: Sequence[Moments], *, step: int, reward: float) -> dict[str, Any]:
    reading = reading_of(history, version=step)
    cosines = {each.label: (each.cosine, each.error, each.norm_ratio) for each in reading.buckets}
    return {"step": step + 1, "reward": reward, "halves": reading.halves, "cosines": cosines}


def _in_a_process(loss: str, arguments: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.lag_gradients", *arguments, "--one", loss]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=parent_death_signal)
    if done.returncode != 0:
        raise SystemExit(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _cell(found: Mapping[str, Any], label: str) -> str:
    cosine, error, ratio = found["cosines"].get(label, (None, None, None))
    if cosine is None:
        return "hidden by noise"
    return f"{cosine:.2f}{'' if error is None else f' ± {error:.2f}'}, norm {ratio:.2f}"


def report(found: Mapping[str, Mapping[str, Any]], *, lag: int, every: int, groups: int) -> str:
    """Table of all measurements, and what one of them costs."""
    labels = [label_of(bucket) for bucket in range(1, bucket_of(lag) + 1)]
    lines = [
        "# Gradients by lag, with and without correction",
        "",
        f"`{shlex.join(['python', '-m', 'benchmarks.lag_gradients', *sys.argv[1:]])}`, which says what it is:",
        f"addition, trained on tokens of lag {lag}, {UPDATES * EPOCHS} updates a step, learning rate 5e-4. A "
        f"measurement compares {groups} groups of each lag.",
        f"Cosine to the gradient of lag 0, without noise, ± its standard error, over the last {WINDOW} measurements; "
        f"norm over that of lag 0. Machine: {described_machine()}.",
        "",
        f"| loss | step | mean reward of {_LAST} steps | halves of lag 0 | "
        + " | ".join(f"lag {label}" for label in labels)
        + " |",
        "|---|" + "---|" * (3 + len(labels)),
    ]
    for loss, one in found.items():
        for each in one["told"]:
            halves = "" if each["halves"] is None else f"{each['halves']:.2f}"
            cells = " | ".join(_cell(each, label) for label in labels)
            lines.append(f"| {loss} | {each['step']} | {each['reward']:.3f} | {halves} | {cells} |")
    lines += [
        "",
        "| loss | held-out accuracy at the end | CPU s of a step | of a comparison | of all, every 100 steps |",
    ]
    lines.append("|---|---|---|---|---|")
    for loss, one in found.items():
        share = one["pass_s"] / (100 * one["step_s"])
        lines.append(
            f"| {loss} | {one['accuracy']:.3f} | {one['step_s']:.2f} | {one['pass_s']:.2f} | {100 * share:.1f} % |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    """Runs both losses, and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--lag", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--one", choices=LOSSES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        settings = {name: getattr(given, name) for name in ("steps", "every", "groups", "lag", "seed")}
        print(json.dumps(run(given.one, **settings)))
        return
    found = {loss: _in_a_process(loss, sys.argv[1:]) for loss in LOSSES}
    print_and_write(report(found, lag=given.lag, every=given.every, groups=given.groups), given.output)


if __name__ == "__main__":
    main()
