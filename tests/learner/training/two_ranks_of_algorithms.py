"""Algorithms that look at a whole step, on two ranks: `two_ranks_of_algorithms.py MODEL OUT`.

Rank 0 forks rank 1, and writes losses, gradient norms and metrics of each of CASES below OUT; `lead` with one rank
gives what is expected.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter

from learner.algorithms.presets.registry import AlgorithmConfig
from learner.training.batch import TrainSequence
from learner.training.config import TrainingConfig
from learner.training.step import StepMetrics
from learner.training.trainer import Trainer
from tests.learner.training.rank_processes import two_ranks
from tests.learner.training.tiny_model import conversing, random_sequences

ADAPTER: TypeAdapter[AlgorithmConfig] = TypeAdapter(AlgorithmConfig)
CONFIG = TrainingConfig.model_validate(
    {
        "optimizer": {"learning_rate": 1e-2, "epsilon": 1e-4},
        "updates_per_step": 2,
        "epochs_per_step": 2,
        "microbatch_tokens": 60,
    }
)


def grouped(count: int) -> list[TrainSequence]:
    return [replace(sequence, group=index // 4) for index, sequence in enumerate(random_sequences(count))]


def two_players(count: int) -> list[TrainSequence]:
    """They play in turn."""
    return [replace(sequence, role=(-1) ** index * 2**62) for index, sequence in enumerate(grouped(count))]


def mostly_equal(count: int) -> list[TrainSequence]:
    """In groups of four, of which only the first has different rewards: no update but one has anything to learn."""
    return [
        replace(sequence, reward=sequence.reward if index < 4 else 0.5) for index, sequence in enumerate(grouped(count))
    ]


def paired(count: int) -> list[TrainSequence]:
    return [
        replace(sequence, pair=index // 2, margin=0.1 * (index // 2))
        for index, sequence in enumerate(random_sequences(count))
    ]


def half_mismatched(count: int) -> list[TrainSequence]:
    """Every other sequence is only measured; the labels of the others alternate."""
    return [
        replace(sequence, mismatched=index % 2 == 1, label=index % 4 == 0)
        for index, sequence in enumerate(random_sequences(count))
    ]


PENALISED = {"kl_coefficient": 0.1, "kl_in": "loss", "kl_ratio": True}
CASES: tuple[tuple[dict[str, object], Callable[[int], list[TrainSequence]]], ...] = (
    ({"type": "grpo", "self_normalise": True, "token_veto": 0.2, "advantage_scale": "batch"}, grouped),
    ({"type": "reinforce_pp", "divergence_limit": 0.01, **PENALISED}, grouped),
    ({"type": "rloo", "policy_loss": "sequence_clip", "correction": "geometric"}, grouped),
    ({"type": "grpo"}, mostly_equal),
    ({"type": "grpo", "observation_weight": 0.5}, lambda count: conversing(mostly_equal(count))),
    ({"type": "gmpo"}, grouped),
    ({"type": "sapo"}, grouped),
    ({"type": "dro"}, grouped),
    ({"type": "rae"}, two_players),
    ({"type": "otb"}, grouped),
    ({"type": "kl_cov", "covariance_share": 0.1, "second_moment_limit": 2.0}, grouped),
    ({"type": "dpo", "loss": "bco"}, paired),
    ({"type": "dpo", "loss": "length_normalised"}, paired),
    ({"type": "dpo", "loss": "kto"}, half_mismatched),
)


DEMONSTRATION_WEIGHT, AVERAGE = 0.5, 0.75


def demonstrated(algo: AlgorithmConfig) -> list[TrainSequence]:
    """Three demonstrations beside samples, so that the two ranks have unlike shares; none for pairs, of files."""
    return [] if algo.learns_from_files else random_sequences(3, seed=5)


def numbers_of(step: StepMetrics) -> dict[str, float]:
    """The numbers that do not depend on the ranks."""
    shown = {} if step.demonstration_loss is None else {"demonstration_loss": step.demonstration_loss}
    return {"loss": step.loss, "grad_norm": step.grad_norm, **step.means, **shown}


def lead(trainer: Trainer, path: Path, algo: AlgorithmConfig, sequences: Callable[[int], list[TrainSequence]]) -> None:
    """Two steps of two updates each."""
    given = demonstrated(algo)
    steps = [trainer.train_step(sequences(16), version=version, demonstrations=given) for version in range(2)]
    path.write_text(json.dumps([*map(numbers_of, steps), said_by_average(trainer)]))
    trainer.close()


def said_by_average(trainer: Trainer) -> dict[str, float]:
    """Sums over three texts, of which the ranks have unlike shares, by the average of the policy's versions."""
    scores = trainer.average_scores(random_sequences(3, seed=6), top=2)
    tops = [each.top.logprobs.sum() for each in scores if each.top is not None]
    return {"grad_norm": 1.0, "logprobs": float(sum(each.logprobs.sum() for each in scores)), "top": float(sum(tops))}


def main() -> None:
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    with two_ranks() as (ranks, commands):
        for number, (given, sequences) in enumerate(CASES):
            algo = ADAPTER.validate_python(given)
            trainer = Trainer(
                model,
                algorithm=algo,
                config=CONFIG,
                ranks=ranks,
                commands=commands,
                demonstration_weight=DEMONSTRATION_WEIGHT,
                average=AVERAGE,
            )
            if ranks.leads:
                lead(trainer, out / f"{number}.json", algo, sequences)
            else:
                trainer.follow()


if __name__ == "__main__":
    main()
