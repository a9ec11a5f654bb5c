"""Steps in parts on two ranks: `two_ranks_of_partial_steps.py MODEL OUT STAGE`.

Rank 0 forks rank 1, and writes the numbers of two steps to OUT: the first has lost a group that it had begun with, the
second begins early and ends as it began.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from learner.algorithms.presets.grpo import GrpoConfig
from learner.training.batch import TrainSequence
from learner.training.config import TrainingConfig
from learner.training.trainer import Trainer
from tests.learner.training.rank_processes import two_ranks
from tests.learner.training.tiny_model import random_sequences

SIZE, GROUPS = 4, 6


def config(*, stage: int, partial: bool) -> TrainingConfig:
    return TrainingConfig.model_validate(
        {
            "optimizer": {"learning_rate": 1e-2, "epsilon": 1e-4},
            "microbatch_tokens": 40,
            "zero_stage": stage,
            "partial_batches": partial,
        }
    )


def steps() -> list[list[TrainSequence]]:
    return [
        [replace(each, group=number // SIZE) for number, each in enumerate(random_sequences(GROUPS * SIZE, seed=seed))]
        for seed in (1, 2)
    ]


def lead(trainer: Trainer, out: Path) -> None:
    first, second = steps()
    trainer.begin_step([*second[:SIZE], *first[: 3 * SIZE]], version=0)
    made = [trainer.train_step(first, version=0)]
    for count in range(1, GROUPS):
        trainer.begin_step(second[: count * SIZE], version=1)
    made.append(trainer.train_step(second, version=1))
    out.write_text(json.dumps([{"loss": each.loss, "grad_norm": each.grad_norm} for each in made]))
    trainer.close()


def main() -> None:
    model, out, stage = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    with two_ranks() as (ranks, commands):
        training = config(stage=stage, partial=True)
        trainer = Trainer(model, algorithm=GrpoConfig(), config=training, ranks=ranks, commands=commands)
        if ranks.leads:
            lead(trainer, out)
        else:
            trainer.follow()


if __name__ == "__main__":
    main()
