"""Algorithms on ranks that share rows: `ranks_of_rows.py OUT COUNT TEACHER [NUMBER...]`.

Runs those of CASES with these numbers, each of which names its model; rank 0 writes what it saw below OUT, `seen_of`
gives what is expected of one rank. Rank 0 forks the others, COUNT in all.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import TypeAdapter
from safetensors.torch import save_file
from torch import Tensor

from learner.algorithms.presets.registry import AlgorithmConfig
from learner.training.batch import TrainSequence
from learner.training.config import TrainingConfig
from learner.training.ranks import CommandChannel, Ranks
from learner.training.trainer import Trainer
from tests.learner.training.algorithm_cases import ALGORITHM_CASES, OPTIMIZER, scored
from tests.learner.training.rank_processes import forked_ranks
from tests.learner.training.tiny_model import branched
from tests.learner.training.two_ranks_of_algorithms import grouped, half_mismatched, paired

ADAPTER: TypeAdapter[AlgorithmConfig] = TypeAdapter(AlgorithmConfig)
CRITIC = {"critic": {"optimizer": OPTIMIZER}}
TRAINING: dict[str, object] = {"optimizer": OPTIMIZER, "microbatch_tokens": 40}


@dataclass(frozen=True)
class SharedRows:
    """Two steps of `algo`, by ranks that share rows by `shared`, as `training` says it."""

    algo: Mapping[str, object]
    sequences: Callable[[int], list[TrainSequence]] = grouped
    training: Mapping[str, object] = field(default_factory=dict)
    shared: int = 2
    teaches: bool = False
    model: str = ""
    """Of `tiny_models`, in a folder of this name beside the results; the given one if there is none."""


HEAD = {"kind": "head", "trunk_gradient": 0.5, "optimizer": TRAINING["optimizer"]}
KEPT = {"gradient_checkpointing": True, "recompute_attention": False}
CASES = (
    SharedRows({"type": "grpo"}),
    SharedRows({"type": "ppo", "kl_coefficient": 0.1}, training={"zero_stage": 2, "updates_per_step": 2, **CRITIC}),
    SharedRows({"type": "ppo", "entropy_coefficient": 0.05}, training={"zero_stage": 1, "critic": HEAD}),
    SharedRows({"type": "gspo"}, training={"zero_stage": 3, "lora": {"rank": 4}, "offload_activations": True, **KEPT}),
    SharedRows(
        {"type": "reinforce_pp", "kl_coefficient": 0.1}, training={"zero_stage": 3, "reference": {"mode": "ema"}}
    ),
    SharedRows({"type": "dpo", "sft_weight": 0.1}, paired, {"gradient_checkpointing": True}),
    SharedRows({"type": "dpo", "loss": "kto"}, half_mismatched),
    SharedRows({"type": "rm", "center_coefficient": 0.01}, scored),
    SharedRows({"type": "distill", "teacher_tokens": 5}, grouped, teaches=True),
    SharedRows({"type": "opd"}, grouped, {"zero_stage": 3}, teaches=True),
    SharedRows({"type": "otb"}, grouped),
    SharedRows({"type": "grpo"}, training={"updates_per_step": 2, "epochs_per_step": 2}, shared=4),
    SharedRows({"type": "ppo"}, training={"zero_stage": 2, "updates_per_step": 2, "critic": HEAD}, shared=2),
    SharedRows({"type": "dpo"}, paired, {"zero_stage": 3, "lora": {"rank": 4}}, shared=4),
    SharedRows({"type": "grpo"}, model="gemma3"),
    SharedRows({"type": "grpo"}, model="gpt-oss"),
    SharedRows({"type": "grpo"}, model="deepseek v3"),
    SharedRows({"type": "grpo"}, training={"router": {"aux_loss_coef": 0.01}}, model="qwen3 moe"),
    SharedRows({"type": "opd", "divergence": "jsd", "teacher_tokens": 5}, grouped, {"zero_stage": 3}, teaches=True),
    *(
        SharedRows(algo, sequences, training, teaches=ADAPTER.validate_python(algo).uses_teacher)
        for algo, sequences, training in ALGORITHM_CASES
    ),
)
OF_TWO, OF_FOUR = (0, 1, 2, 3, 7, 9), (11, 13)
"""Numbers of the cases of the suite."""
EVERY_ALGORITHM = tuple(range(len(CASES) - len(ALGORITHM_CASES), len(CASES)))


def seen_of(trainer: Trainer, case: SharedRows) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Losses, norms and means of each step, and the weights at the end."""
    steps = [trainer.train_step(branched(case.sequences(16)), version=version) for version in range(2)]
    weights = {tensor.name: tensor.value for tensor in trainer.host_copy().tensors}
    named = [
        {"loss": step.loss, "grad_norm": step.grad_norm, "entropy": step.entropy or 0.0, **step.means} for step in steps
    ]
    return named, weights


def opened(
    model: Path, case: SharedRows, *, ranks: Ranks, commands: CommandChannel, shared: int, teacher: Path
) -> Trainer:
    config = {**TRAINING, **case.training, "sequence_parallel": shared}
    if shared == 1:
        plain = {"zero_stage": 0, "gradient_checkpointing": False, "recompute_attention": True}
        config |= {**plain, "offload_activations": False}
    torch.manual_seed(5)
    return Trainer(
        model,
        algorithm=ADAPTER.validate_python(case.algo),
        config=TrainingConfig.model_validate(config),
        ranks=ranks,
        commands=commands,
        teachers=[teacher] if case.teaches else [],
    )


def main() -> None:
    model, out, count, teacher, *numbers = sys.argv[1:]
    with forked_ranks(int(count)) as (ranks, commands):
        for number in map(int, numbers):
            case = CASES[number]
            path = Path(out) / case.model if case.model else Path(model)
            trainer = opened(path, case, ranks=ranks, commands=commands, shared=case.shared, teacher=Path(teacher))
            if ranks.leads:
                steps, weights = seen_of(trainer, case)
                (Path(out) / f"{number}.json").write_text(json.dumps(steps))
                save_file(weights, Path(out) / f"{number}.safetensors")
                trainer.close()
            else:
                trainer.follow()


if __name__ == "__main__":
    main()
