"""The same training in the plainest way, which the trainer must equal: unpacked, whole logits, torch's AdamW, or such
optimizers as a test gives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from learner.training.batch import TrainSequence
from learner.training.config import OptimizerConfig


@dataclass(frozen=True)
class PlainResult:
    weights: dict[str, torch.Tensor]
    losses: list[float]
    grad_norms: list[float]


def plain_adamw(parameters: Sequence[torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay,
    )


def adamw_of_all(model: torch.nn.Module, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    return [plain_adamw(list(model.parameters()), config)]


def nothing_beside(model: torch.nn.Module, step: int) -> torch.Tensor:
    return torch.zeros(())


def mean_cross_entropy(model: torch.nn.Module, sequences: Sequence[TrainSequence]) -> torch.Tensor:
    """Over all of their trained tokens, in nats."""
    logprobs = []
    for each in sequences:
        ids, trained = torch.from_numpy(each.token_ids).long(), torch.from_numpy(np.flatnonzero(each.loss_mask))
        logprobs.append(torch.log_softmax(model(input_ids=ids[None]).logits[0], dim=1)[trained - 1, ids[trained]])
    return -torch.cat(logprobs).mean()


def plain_training(
    path: Path,
    steps: list[list[TrainSequence]],
    *,
    optimizer: OptimizerConfig,
    made: Callable[[torch.nn.Module, OptimizerConfig], Sequence[torch.optim.Optimizer]] = adamw_of_all,
    beside: Callable[[torch.nn.Module, int], torch.Tensor] = nothing_beside,
) -> PlainResult:
    """`grpo` with its defaults and one update per step: the gradient of -w A logprob, w the capped ratio.

    `beside` gives what the loss of a step has besides; `losses` are without it.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizers = made(model, optimizer)
    losses, norms = [], []
    for number, step in enumerate(steps):
        tokens = sum(int(sequence.loss_mask.sum()) for sequence in step)
        model.zero_grad()
        rewards = torch.tensor([sequence.reward for sequence in step], dtype=torch.float64)
        spread = rewards.std() + 1e-6 if len(rewards) > 1 else 1.0
        advantages = ((rewards - rewards.mean()) / spread).float()  # the step is one group
        parts = (_sequence_loss(model, each, advantage) for each, advantage in zip(step, advantages, strict=True))
        loss = sum(parts, torch.zeros(())) / tokens
        (loss + beside(model, number)).backward()  # type: ignore[no-untyped-call]
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.max_grad_norm)))
        for each in optimizers:
            each.step()
        losses.append(loss.item())
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return PlainResult(weights=weights, losses=losses, grad_norms=norms)


def _sequence_loss(model: torch.nn.Module, sequence: TrainSequence, advantage: torch.Tensor) -> torch.Tensor:
    ids = torch.from_numpy(sequence.token_ids).long()
    trained = torch.from_numpy(np.flatnonzero(sequence.loss_mask))
    logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0], dim=1)[trained - 1, ids[trained]]
    weight = (logprobs.detach() - torch.from_numpy(sequence.behavior_logprobs)[trained]).exp().clamp(max=2.0)
    ratio = (logprobs - logprobs.detach()).exp()
    return -(weight * advantage * ratio).sum()
