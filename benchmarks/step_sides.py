"""A side of benchmarks/train_step.py: a process that makes one training step for each line that it reads.

    python -m benchmarks.step_sides SIDE '{"model": ..., ...}'

It answers each line with one of JSON: seconds on the clock, and CPU seconds of the process with all of its threads.
Ours runs as in the learner: in a thread, with the learner's settings of malloc.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from learner.command import keep_freed_memory

if TYPE_CHECKING:
    from learner.training.batch import TrainSequence
    from learner.training.config import Dtype

Step = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Given:
    """A model, and the shape of a batch: tokens of each prompt, and least and most of each completion."""

    model: str
    dtype: str
    groups: int
    group_size: int
    prompt: int
    shortest: int
    longest: int
    microbatch_tokens: int
    threads: int

    def lengths(self) -> Sequence[int]:
        """Tokens of each completion, the same at each call."""
        count = self.groups * self.group_size
        return cast("list[int]", np.random.default_rng(1).integers(self.shortest, self.longest + 1, count).tolist())


def main() -> None:
    """Makes steps until its input ends."""
    side, given = sys.argv[1], Given(**json.loads(sys.argv[2]))
    if side == "trl":
        from benchmarks.trl_side import steps_on_given_tokens

        steps_on_given_tokens(given, wait=lambda: bool(sys.stdin.readline()), tell=tell)
        return
    if side != "transformers":
        keep_freed_memory()
    with ThreadPoolExecutor(1) as thread:
        step = thread.submit(_padded if side == "transformers" else _ours, given, side == "ours").result()
        while sys.stdin.readline():
            began, cpu = time.perf_counter(), time.process_time()
            thread.submit(step).result()
            tell(time.perf_counter() - began, time.process_time() - cpu)


def tell(wall: float, cpu: float) -> None:
    """Answers one line."""
    sys.stdout.write(json.dumps({"wall": wall, "cpu": cpu}) + "\n")
    sys.stdout.flush()


def _ours(given: Given, shared: bool) -> Step:
    import torch

    from learner.algorithms.presets.grpo import GrpoConfig
    from learner.training.config import OptimizerConfig, TrainingConfig
    from learner.training.ranks import Ranks, open_process_group
    from learner.training.trainer import Trainer

    torch.set_num_threads(given.threads)
    ranks = Ranks()
    trainer = Trainer(
        Path(given.model),
        algorithm=GrpoConfig(),
        config=TrainingConfig(
            dtype=cast("Dtype", given.dtype),
            optimizer=OptimizerConfig(learning_rate=1e-6),
            microbatch_tokens=given.microbatch_tokens,
        ),
        ranks=ranks,
        commands=open_process_group(ranks, timeout_s=60),
    )
    batch = batch_of(given, shared=shared)
    return lambda: trainer.train_step(batch, version=0)


def _padded(given: Given, _: bool) -> Step:
    import torch

    from benchmarks.padded_training import PaddedTraining

    torch.set_num_threads(given.threads)
    plain = PaddedTraining(
        Path(given.model),
        device=torch.device("cpu"),
        dtype=getattr(torch, given.dtype),
        learning_rate=1e-6,
        microbatch_tokens=given.microbatch_tokens,
        attention="eager",
        fused=True,
    )
    batch = batch_of(given, shared=True)
    return lambda: plain.step(batch)


def batch_of(given: Given, *, shared: bool) -> "list[TrainSequence]":
    """Random tokens; all completions of a group have its prompt if `shared`."""
    from learner.training.batch import TrainSequence
    from services.model_folder import vocabulary_size

    draw, vocabulary = np.random.default_rng(0), vocabulary_size(Path(given.model))
    sequences = []
    for number, own in enumerate(given.lengths()):
        if not shared or number % given.group_size == 0:
            prompt = draw.integers(3, vocabulary, given.prompt)
        mask = np.arange(given.prompt + own) >= given.prompt
        sequences.append(
            TrainSequence(
                token_ids=np.concatenate([prompt, draw.integers(3, vocabulary, own)]).astype(np.int32),
                loss_mask=mask,
                behavior_logprobs=np.where(mask, -2.0, 0.0).astype(np.float32),
                reward=float(draw.normal()),
                lags=np.zeros(len(mask), dtype=np.int32),
            )
        )
    return sequences


if __name__ == "__main__":
    main()
