"""PPO's critic, which learns what the policy's states are worth: a model of its own, or a linear head on the policy.

states of the policy ─ detached ─▶ head ─▶ values ─▶ value loss ─▶ the head's optimizer
        ▲                                               │
        └──── gradient, times critic.trunk_gradient ◀───┘   none by default: the policy then learns as without the head

The head is no part of the policy: what is published and exported is a plain causal language model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from learner.algorithms.policy_loss import explained_variance, value_loss
from learner.training.config import TrainingConfig, learning_rate
from learner.training.engine import Engine
from learner.training.packing import Microbatch
from learner.training.ranks import summed_over_ranks
from learner.training.score_model import ScoreHead, load_score_model
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
        self.engine: Engine[tuple[Tensor, None, None, None]] = Engine(
            model, config=config, device=device, optimizer=config.critic.optimizer
        )

    def values(self, microbatch: Microbatch) -> Tensor:
        """The value of the state before each of the microbatch's targets, [N]."""
        return self.engine.forward(microbatch)[0]

    def update(self, microbatches: Sequence[Microbatch], targets: CriticTargets, *, number: int) -> float:
        """Moves the values towards the returns; `number` counts updates, for the schedule. Returns the loss."""
        total = torch.zeros((), dtype=torch.float64)
        for index, microbatch in enumerate(microbatches, start=1):
            loss = self._loss(microbatch, targets)
            self.engine.backward(loss, last=index == len(microbatches))
            total += loss.detach().double().cpu()
        self.engine.update(learning_rate=learning_rate(self._config.optimizer, update=number))
        return float(summed_over_ranks(total))

    def save(self, directory: Path) -> None:
        """Writes model and optimizer, each rank its part."""
        self.engine.save(directory / FOLDER)

    def load(self, directory: Path) -> None:
        """Reads what `save` wrote. Raises FileNotFoundError."""
        self.engine.load(directory / FOLDER)

    def close(self) -> None:
        """Releases the model."""
        self.engine.close()

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
    """True if the step that begins with this update is the critic's alone."""
    return first_update < config.critic.warmup_steps * config.updates_per_step


class CriticHead:
    """Starts from values of 0. All ranks must call each method at the same time.

    `states` runs the policy: from a microbatch to the states [N, `width`] that its N targets are predicted from.
    """

    def __init__(
        self,
        *,
        width: int,
        states: Callable[[Microbatch], Tensor],
        config: TrainingConfig,
        device: torch.device,
        value_clip: float | None,
    ) -> None:
        head = ScoreHead(width, 1, bias=False, dtype=torch_dtype(config.dtype))
        torch.nn.init.zeros_(head.weight)
        self._states = states
        self._config = config.critic
        self._clip = value_clip
        self.engine: Engine[Tensor] = Engine(head, config=config, device=device, optimizer=config.critic.optimizer)
        self._loss = torch.zeros((), dtype=torch.float64)

    def values(self, microbatch: Microbatch) -> Tensor:
        """The value of the state before each of the microbatch's targets, [N]."""
        return self.engine.forward(self._states(microbatch))[:, 0]

    def learn(self, states: Tensor, microbatch: Microbatch, targets: CriticTargets, *, last: bool) -> Tensor:
        """Adds the microbatch to the head's gradient. `states` [N, width] come from the pass that trains the policy.

        Returns a scalar for the policy's loss, whose gradient is that of the value loss times `trunk_gradient`; its
        value means nothing. `last`: no other microbatch follows before `update`.
        """
        below = states.detach().requires_grad_(self._config.trunk_gradient > 0)
        values = self.engine.forward(below)[:, 0]
        made = value_loss(
            values=values,
            old_values=targets.old_values[microbatch.places].to(values),
            returns=targets.returns[microbatch.places].to(values),
            clip=self._clip,
        )
        loss = (targets.weights[microbatch.places].to(values) * made.losses).sum()
        self.engine.backward(loss, last=last)
        self._loss += loss.detach().double().cpu()
        if below.grad is None:
            return states.new_zeros(())
        # `backward` multiplies by the number of ranks, which the engine's own averaging undoes for parameters alone.
        downwards = below.grad / torch.distributed.get_world_size()
        return self._config.trunk_gradient * (states * downwards).sum()

    def update(self, *, number: int) -> float:
        """Moves the head; `number` counts updates, for the schedule. Returns the loss over all ranks."""
        self.engine.update(learning_rate=learning_rate(self._config.optimizer, update=number))
        loss, self._loss = self._loss, torch.zeros((), dtype=torch.float64)
        return float(summed_over_ranks(loss))

    def discard_gradients(self) -> None:
        """Forgets gradients of an update that is abandoned."""
        self.engine.discard_gradients()
        self._loss = torch.zeros((), dtype=torch.float64)

    def save(self, directory: Path) -> None:
        """Writes head and optimizer, each rank its part."""
        self.engine.save(directory / FOLDER)

    def load(self, directory: Path) -> None:
        """Reads what `save` wrote. Raises FileNotFoundError."""
        self.engine.load(directory / FOLDER)

    def close(self) -> None:
        """Releases the head."""
        self.engine.close()
