"""Experts that a mixture's tokens are sent to, from the engine's layers to the parts of an answer.

    worker     `RoutingCapture`: the rows of a step, by request
    scheduler  `RoutedRows`: those of a request until an output of it is sent (`packing`)
    client     `UntoldRows`: those of a completion until a part tells them

The rows of a request follow one another from the first token of its prompt on, each once: of tokens that are computed
again, after a preemption, the first ones count. A token has one once it was an input; the last one sampled never was.

vLLM has a capture of its own, for its second model runner, which there is on GPUs only; its rows go the same way.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from generator.weights.routing_capture import asks_for_experts
from protocol.routed_experts import ExpertRows


class RoutedRows:
    """Of a scheduler: the rows of requests that ask for them, until an output is sent."""

    def __init__(self) -> None:
        self._rows: dict[str, list[ExpertRows]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def added(self, request: Any) -> None:
        """A request has come."""
        if asks_for_experts(request.sampling_params):
            self._rows[request.request_id] = []

    def note(self, told: Mapping[str, ExpertRows] | None) -> None:
        """Of a step, by `RoutingCapture`."""
        for request, rows in (told or {}).items():
            if request in self._rows:
                self._rows[request].append(rows)

    def take_off(self, outputs: Iterable[Any]) -> None:
        """Rows that vLLM's own capture has put onto the outputs of a step."""
        for output in outputs:
            if output.routed_experts is not None:
                self.note({output.request_id: output.routed_experts})
                output.routed_experts = None

    def attach(self, outputs: Iterable[Any]) -> None:
        """To outputs that are sent, what is known of their requests."""
        for output in outputs:
            rows = self._rows.get(output.request_id)
            if rows:
                output.routed_experts = rows[0] if len(rows) == 1 else np.concatenate(rows)
                rows.clear()
            if output.finish_reason is not None:
                self._rows.pop(output.request_id, None)

    def keep(self, requests: Mapping[str, Any]) -> None:
        """Forget all others."""
        self._rows = {name: rows for name, rows in self._rows.items() if name in requests}


class UntoldRows:
    """Rows of a completion behind a prompt of so many tokens that no part has told yet."""

    def __init__(self, prompt: int) -> None:
        self._prompt = prompt
        self._sampled = self._told = 0
        self._rows: list[ExpertRows] = []

    def add(self, rows: ExpertRows) -> None:
        """Take the rows that follow."""
        self._rows.append(rows)

    def take(self, token_ids: Sequence[int]) -> tuple[int, ExpertRows] | None:
        """For a part with these tokens: all up to the last but one, with the place of the first of them; None if there
        are none.
        """
        self._sampled += len(token_ids)
        if not self._rows:
            return None
        rows = self._rows[0] if len(self._rows) == 1 else np.concatenate(self._rows)
        count = min(len(rows), self._prompt + self._sampled - 1 - self._told)
        if count <= 0:
            return None
        self._rows = [rows[count:]] if count < len(rows) else []
        self._told += count
        return self._told - count, rows[:count]
