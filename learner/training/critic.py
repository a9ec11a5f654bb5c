"""PPO's critic: a model of scores with an optimizer of its own, which learns what the policy's states are worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from learner.algorithms.value_loss import explained_variance, value_loss
from learner.training.config import TrainingConfig
from learner.training.distribution import summed_over_ranks
from learner.training.engine import Engine
from learner.training.packing import Microbatch
from learner.training.schedule import learning_rate
from learner.training.score_model import load_score_model
from learner.training.weights import torch_dtype

FOLDER = "critic"


@dataclass(frozen=True)
class CriticTargets:
    """Of the step's N tokens, on the CPU: `old_values` and `returns` [N], and the `weights` [N] of an update's mean."""

    old_values: Tensor
    returns: Tensor
    weights: Tensor


class Critic:
    """All ranks must call each method at the same time."""

    def __init__(self, path: Path, *, config: TrainingConfig, device: torch.device, value_clip: float | None) -> None:
        self._config = config.critic
        self._clip = value_clip
        model = load_score_model(config.critic.model or path, dtype=torch_dtype(config.dtype))
        self._engine: Engine[tuple[Tensor, None, None, None]] = Engine(
            model, config=config, device=device, optimizer=config.critic.optimizer
        )

    def values(self, microbatch: Microbatch) -> Tensor:
        """The value of the state before each of the microbatch's targets, [N]."""
        return self._engine.forward(microbatch)[0]

    def update(self, microbatches: Sequence[Microbatch], targets: CriticTargets, *, number: int) -> float:
        """Moves the values towards the returns; `number` counts updates, for the schedule. Returns the loss."""
        total = torch.zeros((), dtype=torch.float64)
        for index, microbatch in enumerate(microbatches, start=1):
            loss = self._loss(microbatch, targets)
            self._engine.backward(loss, last=index == len(microbatches))
            total += loss.detach().double().cpu()
        self._engine.update(learning_rate=learning_rate(self._config.optimizer, update=number))
        return float(summed_over_ranks(total))

    def save(self, directory: Path) -> None:
        """Writes model and optimizer, each rank its part."""
        self._engine.save(directory / FOLDER)

    def load(self, directory: Path) -> None:
        """Reads what `save` wrote. Raises FileNotFoundError."""
        self._engine.load(directory / FOLDER)

    def close(self) -> None:
        """Releases the model."""
        self._engine.close()

    def _loss(self, microbatch: Microbatch, targets: CriticTargets) -> Tensor:
        values = self.values(microbatch)

        def at_tokens(numbers: Tensor) -> Tensor:
            return numbers[microbatch.places].to(values)

        made = value_loss(
            values=values,
            old_values=at_tokens(targets.old_values),
            returns=at_tokens(targets.returns),
            clip=self._clip,
        )
        return (at_tokens(targets.weights) * made.losses).sum()


def value_measures(*, values: Tensor, returns: Tensor) -> dict[str, float]:
    """What a step says of its critic, given both at all trained tokens [M]."""
    explained = explained_variance(values=values, returns=returns)
    measures = {"value_mean": float(values.mean()), "return_mean": float(returns.mean())}
    return measures if explained is None else {**measures, "value_explained_variance": explained}


def freezes_policy(config: TrainingConfig, *, first_update: int) -> bool:
    """Whether the step that begins with this update is the critic's alone."""
    return first_update < config.critic.warmup_steps * config.updates_per_step
