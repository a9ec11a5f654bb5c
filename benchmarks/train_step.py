"""What a training step costs, and what it saves to compute a group's prompt once for all of its completions.

    .venv/bin/python -m benchmarks.train_step [--model DIR] [--groups N] [--prompt N] [--completion N] [--dtype float32]

Steps on groups that share their prompts, and on sequences of the same lengths whose prompts all differ, in alternation;
one thread. Times are CPU seconds of this process, which other load on the machine disturbs little.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import cast

import numpy as np
import torch

from learner.algorithms.config import GrpoConfig
from learner.training.batch import TrainSequence
from learner.training.config import Dtype, OptimizerConfig, TrainingConfig
from learner.training.ranks import Ranks, open_process_group
from learner.training.trainer import Trainer
from protocol.fleet import vocabulary_size


def main() -> None:
    """Prints the medians and their ratio."""
    arguments = _arguments()
    torch.set_num_threads(1)
    ranks = Ranks()
    trainer = Trainer(
        arguments.model,
        algorithm=GrpoConfig(),
        config=TrainingConfig(
            dtype=cast("Dtype", arguments.dtype), optimizer=OptimizerConfig(learning_rate=1e-6), microbatch_tokens=2048
        ),
        ranks=ranks,
        commands=open_process_group(ranks, timeout_s=60),
    )
    draw = np.random.default_rng(0)
    times: dict[bool, list[float]] = {True: [], False: []}
    for step in range(2 * (arguments.steps + 1)):
        shared = step % 2 == 0
        batch = _batch(arguments, draw, vocabulary=vocabulary_size(arguments.model), shared=shared)
        began = time.process_time()
        trainer.train_step(batch, version=step)
        times[shared].append(time.process_time() - began)
    once, each = (statistics.median(times[shared][1:]) for shared in (True, False))
    tokens = arguments.groups * arguments.group_size * (arguments.prompt + arguments.completion)
    print(
        f"{arguments.model}, {arguments.dtype}, {tokens} tokens in {arguments.groups} groups of {arguments.group_size}:"
    )
    print(f"  prompts computed once a group  {once * 1e3:8.0f} ms of CPU a step, {tokens / once:8.0f} tokens/s")
    print(f"  prompts all different          {each * 1e3:8.0f} ms of CPU a step, {tokens / each:8.0f} tokens/s")
    print(f"  ratio                          {each / once:8.2f}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/addition"))
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=6, help="tokens")
    parser.add_argument("--completion", type=int, default=4, help="tokens")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, default=20)
    return parser.parse_args()


def _batch(
    arguments: argparse.Namespace, draw: np.random.Generator, *, vocabulary: int, shared: bool
) -> list[TrainSequence]:
    length = arguments.prompt + arguments.completion
    mask = np.arange(length) >= arguments.prompt
    sequences = []
    for _ in range(arguments.groups):
        prompt = draw.integers(3, vocabulary, arguments.prompt)
        for _ in range(arguments.group_size):
            if not shared:
                prompt = draw.integers(3, vocabulary, arguments.prompt)
            completion = draw.integers(3, vocabulary, arguments.completion)
            sequences.append(
                TrainSequence(
                    token_ids=np.concatenate([prompt, completion]).astype(np.int32),
                    loss_mask=mask,
                    behavior_logprobs=np.where(mask, -2.0, 0.0).astype(np.float32),
                    reward=float(draw.normal()),
                    lags=np.zeros(length, dtype=np.int32),
                )
            )
    return sequences


if __name__ == "__main__":
    main()
