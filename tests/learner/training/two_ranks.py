"""Trains on two ranks: `two_ranks.py MODEL OUT CONFIG...`, each config a training config as JSON, one after another.

Without RANK in the environment it is rank 0, which starts rank 1 and writes what it saw below OUT.
"""

import json
import sys
from pathlib import Path

from learner.algorithms.presets.grpo import GrpoConfig
from learner.training.config import TrainingConfig
from learner.training.trainer import Trainer
from tests.learner.training.rank_processes import two_started_ranks
from tests.learner.training.tiny_model import random_sequences, with_a_bad_reward


def lead(trainer: Trainer, *, out: Path, stage: int) -> None:
    steps = [random_sequences(20, seed=1), random_sequences(1, seed=2)]
    spoiled = trainer.train_step(with_a_bad_reward(random_sequences(20, seed=3)), version=0)
    first = trainer.train_step(steps[0], version=0)
    trainer.save(out / f"checkpoint_{stage}")
    trainer.export(out / f"saved_{stage}")
    second = trainer.train_step(steps[1], version=1)
    trainer.export(out / f"trained_{stage}")
    trainer.load(out / f"checkpoint_{stage}")
    trainer.train_step(steps[1], version=1)
    trainer.export(out / f"resumed_{stage}")
    assert len(trainer.probe_logprobs([[1, 2, 3], [4, 5]])) == 3
    seen: dict[str, list[float]] = {
        "losses": [first.loss, second.loss],
        "grad_norms": [first.grad_norm, second.grad_norm],
    }
    seen |= {"skipped": [made.skipped_updates for made in (spoiled, first, second)]}
    (out / f"{stage}.json").write_text(json.dumps(seen), encoding="utf-8")
    trainer.close()


def main() -> None:
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    with two_started_ranks() as (ranks, commands):
        for text in sys.argv[3:]:
            config = TrainingConfig.model_validate_json(text)
            trainer = Trainer(model, algorithm=GrpoConfig(), config=config, ranks=ranks, commands=commands)
            if ranks.leads:
                lead(trainer, out=out, stage=config.zero_stage)
            else:
                trainer.follow()


if __name__ == "__main__":
    main()
