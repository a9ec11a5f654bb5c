"""The load-balancing loss of a mixture of experts on two ranks: `two_ranks_of_routers.py MODEL OUT`.

Rank 0 forks rank 1, and writes the loss and how it moved each weight, of each of CASES, below OUT; `lead` with one rank
gives what is expected.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from learner.algorithms.presets.grpo import GrpoConfig
from learner.training.config import TrainingConfig
from learner.training.ranks import CommandChannel, Ranks
from learner.training.trainer import Trainer
from tests.learner.training.rank_processes import two_ranks
from tests.learner.training.tiny_model import random_sequences

LOSS = "loss"
# AdamW as plain descent: with this epsilon and rate a weight moves by its gradient.
DESCENT = {"learning_rate": 1e3, "epsilon": 1e3, "beta1": 0.0, "beta2": 0.0, "max_grad_norm": 0.0}
# With one sequence a rank has none; the last two have several updates, rows, or both.
CASES: tuple[tuple[int, Mapping[str, object]], ...] = (
    (12, {"microbatch_tokens": 4096}),
    (12, {"microbatch_tokens": 48}),
    (1, {"microbatch_tokens": 48}),
    (12, {"microbatch_tokens": 48, "zero_stage": 3}),
    (12, {"microbatch_tokens": 48, "zero_stage": 0, "updates_per_step": 2}),
)


def open_trainer(model: Path, changes: Mapping[str, object], ranks: Ranks, commands: CommandChannel) -> Trainer:
    config = TrainingConfig.model_validate({"optimizer": DESCENT, "router": {"aux_loss_coef": 5.0}, **changes})
    return Trainer(model, algorithm=GrpoConfig(), config=config, ranks=ranks, commands=commands)


def lead(trainer: Trainer, path: Path, *, count: int) -> None:
    """A step on sequences of one reward, so that the load-balancing loss alone has a gradient."""
    before = {each.name: each.value.clone() for each in trainer.host_copy().tensors}
    step = trainer.train_step([replace(each, reward=1.0) for each in random_sequences(count, seed=4)], version=0)
    moved = {each.name: before[each.name] - each.value for each in trainer.host_copy().tensors}
    save_file({LOSS: torch.tensor(step.router_aux_loss), **moved}, path)
    trainer.close()


def main() -> None:
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    with two_ranks() as (ranks, commands):
        for number, (count, changes) in enumerate(CASES):
            trainer = open_trainer(model, changes, ranks, commands)
            if ranks.leads:
                lead(trainer, out / f"{number}.safetensors", count=count)
            else:
                trainer.follow()


if __name__ == "__main__":
    main()
