"""Controls consecutive gradients on two ranks: `two_ranks_of_alignment.py MODEL OUT`.

Rank 0 forks rank 1, and writes what it found below OUT.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from learner.algorithms.presets.grpo import GrpoConfig
from learner.training.config import TrainingConfig
from learner.training.trainer import Trainer
from tests.learner.training.rank_processes import two_ranks
from tests.learner.training.tiny_model import random_sequences

# The second update is projected, the third skipped; the one after it is projected since no two are skipped in a row.
CONTROL = {"mode": "control", "project_above": 0.3, "skip_above": 0.97, "max_skips_in_row": 1}
CASES = ((0, "float32"), (1, "float32"), (2, "float32"), (1, "bfloat16"))


@dataclass(frozen=True)
class AlignmentRecord:
    """Numbers of each step, and the weights after the last one, which was begun from a checkpoint."""

    steps: list[dict[str, float | None]]
    weights: dict[str, Tensor]


def config_of(stage: int, dtype: str) -> TrainingConfig:
    # Far below epsilon a step of AdamW is the gradient itself: weights that agree mean gradients that do.
    plain = {"learning_rate": 1.0, "epsilon": 1e3, "beta1": 0.0, "beta2": 0.0, "max_grad_norm": 0.0}
    given = {"optimizer": plain, "microbatch_tokens": 64, "zero_stage": stage, "dtype": dtype, "alignment": CONTROL}
    return TrainingConfig.model_validate(given)


def train(trainer: Trainer, *, folder: Path) -> AlignmentRecord:
    first, mixed = random_sequences(20, seed=1), [*random_sequences(10, seed=1), *random_sequences(10, seed=2)]
    steps: list[dict[str, float | None]] = []
    for version, batch in enumerate([first, mixed, mixed, mixed, first]):
        if version == 4:
            trainer.save(folder)
            trainer.train_step(first, version=version)
            trainer.load(folder)
        made = trainer.train_step(batch, version=version)
        steps.append(
            {
                "cosine": made.alignment_cosine,
                "projected": made.alignment_projected_share,
                "skipped": made.alignment_skipped_share,
                "norm": made.grad_norm,
            }
        )
    return AlignmentRecord(steps, {tensor.name: tensor.value for tensor in trainer.host_copy().tensors})


def main() -> None:
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    with two_ranks() as (ranks, commands):
        for stage, dtype in CASES:
            config = config_of(stage, dtype)
            trainer = Trainer(model, algorithm=GrpoConfig(), config=config, ranks=ranks, commands=commands)
            if ranks.leads:
                name = f"{stage}-{dtype}"
                trained = train(trainer, folder=out / name)
                save_file(trained.weights, out / f"{name}.safetensors")
                (out / f"{name}.json").write_text(json.dumps(trained.steps), encoding="utf-8")
                trainer.close()
            else:
                trainer.follow()


if __name__ == "__main__":
    main()
