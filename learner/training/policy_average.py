"""The moving average of the policy's versions, as a teacher of the policy.

    begins as the policy does; after each step   average = a * average + (1 - a) * policy

It is of what is trained alone: with adapters, of their factors. There is no second model: while the average is asked,
its weights stand in the policy's place, and no other pass runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from learner.training.deferred import DeferredFiles
from learner.training.engine import TrainingEngine

AVERAGE_FILE = "policy_average.safetensors"


class PolicyAverage:
    """Float32 on every rank, whole. All ranks must call each method at the same time."""

    def __init__(self, engine: TrainingEngine[object], *, decay: float) -> None:
        """`decay` is the average's own part in the next one, within 0 and 1."""
        assert engine.zero_stage < 3, "weights in parts: refused by LearnerConfig"
        self._engine = engine
        self._decay = decay
        self._weights = {name: each for name, each in engine.model.named_parameters() if each.requires_grad}
        self._averages = {name: self._master(each).clone() for name, each in self._weights.items()}

    def after_step(self) -> None:
        """Averages the policy in."""
        for name, weight in self._weights.items():
            self._averages[name].lerp_(self._master(weight), 1.0 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it the policy's model is the average, without gradient; then it is the policy again, to the bit."""
        own = {name: weight.detach().clone() for name, weight in self._weights.items()}
        with torch.no_grad():
            self._put(self._averages)
            try:
                yield
            finally:
                self._put(own)

    def save(self, directory: Path, *, leads: bool, later: DeferredFiles | None = None) -> None:
        """Writes the average, by the rank that leads, at once or `later`."""
        if not leads:
            return
        path, decay = directory / AVERAGE_FILE, {"decay": json.dumps(self._decay)}
        if later is None:
            save_file(self._averages, path, metadata=decay)
        else:
            later.put(save_file, self._averages, path, metadata=decay)

    def load(self, directory: Path) -> None:
        """Takes up what `save` wrote. Raises FileNotFoundError for a checkpoint of a run that had none."""
        path = directory / AVERAGE_FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"no average of the policy in {directory}: expected {path}, since a teacher has an average; continue "
                "with the teachers that the checkpoint was written with"
            )
        with safe_open(path, framework="pt") as file:
            for name, average in self._averages.items():
                average.copy_(file.get_tensor(name))

    def _master(self, weight: nn.Parameter) -> Tensor:
        return self._engine.master_weight(weight).detach().float()

    def _put(self, values: dict[str, Tensor]) -> None:
        for name, weight in self._weights.items():
            weight.copy_(values[name])
