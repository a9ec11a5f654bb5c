"""The reference policy: what a KL penalty or a preference loss compares the policy with. It is never differentiated.

    training.reference.mode   weights                                    after each step
    initial                   the initial model's                        stay
    ema                       a moving average, begun at the initial     reference = d * reference + (1 - d) * policy
    refresh                   a copy of the policy, begun at the initial = policy after every n-th step

With LoRA and `initial` it is the policy's own model with the adapters off, and costs no memory. Otherwise each rank
holds a whole second model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from learner.training.adapters import adapters_off
from learner.training.config import ReferenceConfig, TrainingConfig
from learner.training.engine import TrainingEngine
from learner.training.packing import Microbatch
from learner.training.policy import PolicyModel, whole_weights

REFERENCE_FILE = "reference.safetensors"
STEPS = "steps"


class Reference(Protocol):
    """A policy that is only evaluated. All ranks must call each method at the same time."""

    def logprobs(self, microbatch: Microbatch) -> Tensor:
        """Logprobs [N] of the microbatch's targets, in nats, without gradient, at the policy's temperature.

        Call it before the policy's own forward pass, not between that and the backward pass.
        """
        ...

    def after_step(self) -> None:
        """Follows the policy, if the mode says so; to be called once after each step."""
        ...

    def save(self, directory: Path, *, leads: bool) -> None:
        """Writes what a checkpoint needs, which is nothing if the weights never move; only the rank that leads does."""
        ...

    def load(self, directory: Path) -> None:
        """Takes up what `save` wrote with the same mode. Raises FileNotFoundError."""
        ...


def open_reference(
    policy: PolicyModel, *, engine: TrainingEngine[object], config: TrainingConfig, load: Callable[[], PolicyModel]
) -> Reference:
    """The reference that `config` asks for. `load` reads the initial model afresh, without adapters, to this device."""
    if config.lora.enabled and config.reference.mode == "initial":
        return AdaptersOff(policy, engine=engine)
    return ReferenceCopy(load(), engine=engine, config=config.reference)


class AdaptersOff:
    """The initial model inside of an adapted one."""

    def __init__(self, policy: PolicyModel, *, engine: TrainingEngine[object]) -> None:
        self._policy = policy
        self._engine = engine

    def logprobs(self, microbatch: Microbatch) -> Tensor:
        """Logprobs [N] by the frozen weights alone."""
        with torch.no_grad(), adapters_off(self._policy), _no_entropy(self._policy):
            return first_of(self._engine.forward(microbatch))

    def after_step(self) -> None:
        """The frozen weights never move."""

    def save(self, directory: Path, *, leads: bool) -> None:
        """The initial model is read from where it was."""

    def load(self, directory: Path) -> None:
        """Nothing was written."""


class ReferenceCopy:
    """A second model, whole on every rank."""

    def __init__(self, model: PolicyModel, *, engine: TrainingEngine[object], config: ReferenceConfig) -> None:
        self._model = model.requires_grad_(False).eval()
        self._engine = engine
        self._config = config
        self._steps = 0
        self._weights = dict(model.named_parameters())
        # In bfloat16 an average would lose every step that is small against it: 1 - decay of a weight's change.
        self._averages = {name: weight.detach().float() for name, weight in self._weights.items()}
        if config.mode != "ema":
            self._averages = {}

    def logprobs(self, microbatch: Microbatch) -> Tensor:
        """Logprobs [N] by the copy."""
        with torch.no_grad(), _no_entropy(self._model):
            return first_of(self._model(microbatch))

    def after_step(self) -> None:
        """Averages the policy in, or copies it when its time has come."""
        self._steps += 1
        if self._config.mode == "ema":
            self._average()
        elif self._config.mode == "refresh" and self._steps % self._config.every_steps == 0:
            self._refresh()

    def save(self, directory: Path, *, leads: bool) -> None:
        """Writes the averages or the copy, and how many steps there were."""
        if leads and self._config.mode != "initial":
            tensors = self._averages or {name: weight.detach() for name, weight in self._weights.items()}
            save_file(tensors, directory / REFERENCE_FILE, metadata={STEPS: str(self._steps)})

    def load(self, directory: Path) -> None:
        """Raises FileNotFoundError for a checkpoint of another mode."""
        if self._config.mode == "initial":
            return
        path = directory / REFERENCE_FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"no reference policy in {directory}: expected {path}, since training.reference.mode is "
                f"{self._config.mode}; continue with the mode that the checkpoint was written with"
            )
        with safe_open(path, framework="pt") as file:
            self._steps = int(file.metadata()[STEPS])
        for name, value in load_file(path).items():
            if self._averages:
                self._averages[name].copy_(value)
            self._weights[name].data.copy_(value)

    def _average(self) -> None:
        for weight in whole_weights(self._engine, dtype=torch.float32):
            average = self._averages[weight.name]
            average.lerp_(weight.value().to(average), 1.0 - self._config.decay)
            self._weights[weight.name].data.copy_(average)

    def _refresh(self) -> None:
        dtype = next(iter(self._weights.values())).dtype
        for weight in whole_weights(self._engine, dtype=dtype):
            self._weights[weight.name].data.copy_(weight.value())


@contextmanager
def _no_entropy(policy: PolicyModel) -> Iterator[None]:
    usual, policy.settings = policy.settings, replace(policy.settings, with_entropy=False)
    try:
        yield
    finally:
        policy.settings = usual


def first_of(output: object) -> Tensor:
    """The logprobs of what a policy returned."""
    assert isinstance(output, tuple), "a policy returns logprobs and more"
    logprobs = output[0]
    assert isinstance(logprobs, Tensor), "the first are the logprobs"
    return logprobs
