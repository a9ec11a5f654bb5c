"""PPO's critic as a linear head on the policy's own layers, with an optimizer of its own.

states of the policy ─ detached ─▶ head ─▶ values ─▶ value loss ─▶ the head's optimizer
        ▲                                               │
        └──── gradient, times critic.trunk_gradient ◀───┘   none by default: the policy then learns as without the head

The head is no part of the policy: what is published and exported is a plain causal language model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from learner.algorithms.value_loss import value_loss
from learner.training.config import TrainingConfig
from learner.training.critic import FOLDER, CriticTargets
from learner.training.distribution import summed_over_ranks
from learner.training.engine import Engine
from learner.training.packing import Microbatch
from learner.training.schedule import learning_rate
from learner.training.score_model import ScoreHead
from learner.training.weights import torch_dtype


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
        self._engine: Engine[Tensor] = Engine(head, config=config, device=device, optimizer=config.critic.optimizer)
        self._loss = torch.zeros((), dtype=torch.float64)

    def values(self, microbatch: Microbatch) -> Tensor:
        """The value of the state before each of the microbatch's targets, [N]."""
        return self._engine.forward(self._states(microbatch))[:, 0]

    def learn(self, states: Tensor, microbatch: Microbatch, targets: CriticTargets, *, last: bool) -> Tensor:
        """Adds the microbatch to the head's gradient. `states` [N, width] come from the pass that trains the policy.

        Returns a scalar for the policy's loss, whose gradient is that of the value loss times `trunk_gradient`; its
        value means nothing. `last`: no other microbatch follows before `update`.
        """
        below = states.detach().requires_grad_(self._config.trunk_gradient > 0)
        values = self._engine.forward(below)[:, 0]
        made = value_loss(
            values=values,
            old_values=targets.old_values[microbatch.places].to(values),
            returns=targets.returns[microbatch.places].to(values),
            clip=self._clip,
        )
        loss = (targets.weights[microbatch.places].to(values) * made.losses).sum()
        self._engine.backward(loss, last=last)
        self._loss += loss.detach().double().cpu()
        if below.grad is None:
            return states.new_zeros(())
        # `backward` multiplies by the number of ranks, which the engine's own averaging undoes for parameters alone.
        downwards = below.grad / torch.distributed.get_world_size()
        return self._config.trunk_gradient * (states * downwards).sum()

    def update(self, *, number: int) -> float:
        """Moves the head; `number` counts updates, for the schedule. Returns the loss over all ranks."""
        self._engine.update(learning_rate=learning_rate(self._config.optimizer, update=number))
        loss, self._loss = self._loss, torch.zeros((), dtype=torch.float64)
        return float(summed_over_ranks(loss))

    def discard_gradients(self) -> None:
        """Forgets gradients of an update that is abandoned."""
        self._engine.discard_gradients()
        self._loss = torch.zeros((), dtype=torch.float64)

    def save(self, directory: Path) -> None:
        """Writes head and optimizer, each rank its part."""
        self._engine.save(directory / FOLDER)

    def load(self, directory: Path) -> None:
        """Reads what `save` wrote. Raises FileNotFoundError."""
        self._engine.load(directory / FOLDER)

    def close(self) -> None:
        """Releases the head."""
        self._engine.close()
