"""A policy under DeepSpeed without the trainer around it, for the tests of the parts beneath it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from learner.training.adapters import add_adapters
from learner.training.batch import TrainSequence, flatten
from learner.training.config import OptimizerConfig, TrainingConfig
from learner.training.engine import TrainingEngine, sharder
from learner.training.logprobs import Chunking
from learner.training.packing import Microbatch, pack, shared_prefixes
from learner.training.policy import LogprobSettings, PolicyModel, host_copy, load_causal_lm, torch_dtype
from learner.training.reference import FrozenPolicy

CPU = torch.device("cpu")
# A large epsilon keeps AdamW's first steps from turning rounding of a tiny gradient into a whole step.
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, epsilon=1e-4, weight_decay=0.1, max_grad_norm=0.5)
CONFIG = TrainingConfig(optimizer=OPTIMIZER)
LORA = {"rank": 4, "alpha": 8.0}


@dataclass(frozen=True)
class Parts:
    policy: PolicyModel
    engine: TrainingEngine[tuple[Tensor, ...]]


def config_with(**changes: object) -> TrainingConfig:
    return TrainingConfig.model_validate({**CONFIG.model_dump(exclude_none=True), **changes})


def load_policy(path: Path, config: TrainingConfig) -> PolicyModel:
    """With adapters, drawn from the same seed each time, if `config` has them."""
    causal_lm = load_causal_lm(path, dtype=torch_dtype(config.dtype), shard=sharder(config))
    if config.lora.enabled:
        torch.manual_seed(5)
        add_adapters(causal_lm, config.lora, sharded=config.zero_stage == 3)
    if config.gradient_checkpointing:
        enable = causal_lm.gradient_checkpointing_enable
        assert callable(enable)
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    settings = LogprobSettings(temperature=1.0, chunking=Chunking(tokens=16, vocabulary=32), with_entropy=False)
    return PolicyModel(causal_lm, settings=settings)


def frozen_policy(path: Path, config: TrainingConfig) -> FrozenPolicy:
    return FrozenPolicy(load_policy(path, config), config=config, device=CPU)


def open_parts(path: Path, config: TrainingConfig, *, optimizer: OptimizerConfig | None = None) -> Parts:
    policy = load_policy(path, config)
    return Parts(policy=policy, engine=TrainingEngine(policy, config=config, device=CPU, optimizer=optimizer))


def microbatch(sequences: Sequence[TrainSequence]) -> Microbatch:
    """All of them in one row."""
    batch = flatten(list(sequences))
    order = np.argsort(batch.lengths, kind="stable").astype(np.int64)
    return pack(batch, order, prefixes=shared_prefixes(batch))


def update(parts: Parts, sequences: Sequence[TrainSequence], *, rate: float = OPTIMIZER.learning_rate) -> float:
    """Makes an update of two microbatches by the negative sum of the logprobs; returns the norm of its gradient."""
    for part, last in halves(sequences):
        parts.engine.backward(-logprobs(parts, microbatch(part)).sum(), last=last)
    return parts.engine.update(learning_rate=rate)


def halves(sequences: Sequence[TrainSequence]) -> tuple[tuple[Sequence[TrainSequence], bool], ...]:
    """The microbatches of an update, each with whether it is the last."""
    middle = len(sequences) // 2
    return (sequences[:middle], False), (sequences[middle:], True)


def logprobs(parts: Parts, given: Microbatch) -> Tensor:
    return parts.engine.forward(given)[0]


def weights_of(parts: Parts) -> dict[str, Tensor]:
    return {tensor.name: tensor.value for tensor in host_copy(parts.engine, dtype="float32", keep=True).tensors}


def assert_close(values: dict[str, Tensor], expected: dict[str, Tensor], *, atol: float) -> None:
    assert list(values) == list(expected)
    for name, value in values.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=atol, msg=partial("{}: {}".format, name))
