"""Trains on two ranks: `two_ranks.py MODEL OUT CONFIG...`, each config a training config as JSON, one after another.

Without RANK in the environment it is rank 0, which starts rank 1 and writes what it saw below OUT.
"""

import json
import os
import sys
from pathlib import Path

import torch

from learner.algorithms.config import GrpoConfig
from learner.training.config import TrainingConfig
from learner.training.ranks import (
    close_process_group,
    die_with_parent,
    open_process_group,
    ranks_from_environment,
    start_followers,
)
from learner.training.trainer import Trainer
from tests.learner.training.tiny_model import random_sequences


def lead(trainer: Trainer, *, out: Path, stage: int) -> None:
    steps = [random_sequences(20, seed=1), random_sequences(1, seed=2)]
    first = trainer.train_step(steps[0], version=0)
    trainer.save(out / f"checkpoint_{stage}")
    second = trainer.train_step(steps[1], version=1)
    trainer.export(out / f"trained_{stage}")
    trainer.load(out / f"checkpoint_{stage}")
    trainer.train_step(steps[1], version=1)
    trainer.export(out / f"resumed_{stage}")
    assert trainer.probe_logprobs([1, 2, 3]).shape == (2,)
    seen = {"losses": [first.loss, second.loss], "grad_norms": [first.grad_norm, second.grad_norm]}
    (out / f"{stage}.json").write_text(json.dumps(seen), encoding="utf-8")
    trainer.close()


def main() -> None:
    die_with_parent()
    torch.set_num_threads(1)
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    ranks, followers = ranks_from_environment(os.environ), None
    if ranks is None:
        followers = start_followers([sys.executable, *sys.argv], count=2)
        ranks = followers.ranks
    commands = open_process_group(ranks, timeout_s=100, listener=followers.listener if followers else None)
    for text in sys.argv[3:]:
        config = TrainingConfig.model_validate_json(text)
        trainer = Trainer(model, algorithm=GrpoConfig(), config=config, ranks=ranks, commands=commands)
        if ranks.leads:
            lead(trainer, out=out, stage=config.zero_stage)
        else:
            trainer.follow()
    close_process_group()
    if followers is not None:
        followers.close(timeout_s=60)
        assert followers.failed() is None, "rank 1 failed"


if __name__ == "__main__":
    main()
