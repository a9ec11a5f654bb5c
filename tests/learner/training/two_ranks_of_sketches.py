"""Sketches gradients on two ranks: `two_ranks_of_sketches.py MODEL OUT`.

Rank 0 forks rank 1, and writes what it found below OUT.
"""

import json
import sys
from pathlib import Path

import numpy as np

from learner.algorithms.presets.grpo import GrpoConfig
from learner.training.batch import flatten, sequences_of
from learner.training.config import OptimizerConfig, TrainingConfig
from learner.training.packing import shared_out
from learner.training.trainer import Trainer
from tests.learner.training.rank_processes import two_ranks
from tests.learner.training.tiny_model import random_group


def lead(trainer: Trainer, *, out: Path) -> None:
    groups = [random_group(number, version=4 - number % 3) for number in range(6)]
    sequences = sequences_of(groups, version=4, max_lag=2, preset=trainer.preset)
    units = [one.origin.group for one in sequences if one.origin is not None]
    found = trainer.sketches(sequences, units=units, parts=[number % 3 for number in range(6)])
    np.save(out / "sketches.npy", found)
    lengths = flatten(sequences).lengths
    sizes = [int(lengths[np.array(units) == unit].sum()) for unit in range(6)]
    seen = {"own": [len(share) for share in shared_out(sizes, ranks=2)]}
    (out / "seen.json").write_text(json.dumps(seen), encoding="utf-8")
    trainer.close()


def main() -> None:
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    config = TrainingConfig(optimizer=OptimizerConfig(learning_rate=1e-2), microbatch_tokens=16)
    with two_ranks() as (ranks, commands):
        trainer = Trainer(model, algorithm=GrpoConfig(), config=config, ranks=ranks, commands=commands)
        if ranks.leads:
            lead(trainer, out=out)
        else:
            trainer.follow()


if __name__ == "__main__":
    main()
