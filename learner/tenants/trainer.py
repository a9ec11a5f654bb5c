"""The trainer of adapters, as the service of tenants sees it; `learner.training.adapter_trainer` has the real one."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from learner.training.client_operations import (
    AdamStep,
    AdapterShape,
    ForwardBackward,
    OperationError,
    OperationResult,
)

Arrays = Mapping[str, NDArray[Any]]


class TenantTrainer(Protocol):
    """Adapters on one base model. All calls but `check` come from one thread."""

    def create(self, model_id: str, shape: AdapterShape) -> None:
        """Make a new adapter; the same seed gives the same one."""

    def remove(self, model_id: str) -> None:
        """Give the adapter's memory back."""

    def check(self, operation: ForwardBackward) -> None:
        """Raises OperationError for an operation that cannot be done; cheap, from any thread."""

    def run_round(self, operations: Sequence[ForwardBackward]) -> list[OperationResult | OperationError]:
        """Do them in shared passes; the failure of one changes nothing for others. An exception leaves all as it was.

        One that is alone comes out the same bit by bit each time; company may change how its numbers are rounded.
        """

    def step(self, step: AdamStep) -> dict[str, float]:
        """Spend the model's gradients. Raises OperationError, and then has changed nothing."""

    def state(self, model_id: str) -> dict[str, NDArray[np.generic]]:
        """All that a resume needs, copied."""

    def restore(
        self, model_id: str, shape: AdapterShape, state: Mapping[str, NDArray[Any]], *, optimizer: bool = True
    ) -> None:
        """Make the adapter of a `state`, or replace it; without its optimizer, moments and gradients are zero."""

    def peft(self, model_id: str) -> tuple[dict[str, NDArray[np.generic]], dict[str, object]]:
        """The adapter by peft's names, and its `adapter_config.json`."""
