"""PPO with a critic on the policy's own layers, on two ranks: `two_ranks_of_a_head.py MODEL OUT CONFIG...`.

Each config is a training config as JSON. Rank 0 forks rank 1, and writes the weights after three steps below OUT, by
the config's number; `lead` with one rank gives what is expected.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from learner.algorithms.presets.ppo import PpoConfig
from learner.training.config import TrainingConfig
from learner.training.trainer import Trainer
from tests.learner.training.rank_processes import two_ranks
from tests.learner.training.tiny_model import random_sequences


def lead(trainer: Trainer, path: Path) -> None:
    """Two steps of many sequences, and one of a single one, in which the other rank has nothing to do."""
    values = []
    for version, count in enumerate((16, 16, 1)):
        means = trainer.train_step(random_sequences(count, seed=version), version=version).means
        values += [means["value_loss"], means["value_mean"]]
    weights = {tensor.name: tensor.value for tensor in trainer.host_copy().tensors}
    save_file({**weights, "values": torch.tensor(values)}, path)
    trainer.close()


def main() -> None:
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    with two_ranks() as (ranks, commands):
        for number, text in enumerate(sys.argv[3:]):
            config = TrainingConfig.model_validate_json(text)
            trainer = Trainer(model, algorithm=PpoConfig(), config=config, ranks=ranks, commands=commands)
            if ranks.leads:
                lead(trainer, out / f"{number}.safetensors")
            else:
                trainer.follow()


if __name__ == "__main__":
    main()
