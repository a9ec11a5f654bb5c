"""Experts that a mixture's tokens are sent to, from the engine's layers to the parts of an answer.

    worker     `RoutingCapture`: the rows of a step, by request
    scheduler  `RoutedRows`: those of a request until an output of it is sent (`packing`)
    client     `UntoldRows`: those of a completion until a part tells them

The rows of a request follow one another from the first token of its prompt on, each once: of tokens that are computed
again, after a preemption, the first ones count. A token has one once it was an input; the last one sampled never was.
Those before the first token that a request wants go no further than the scheduler.

vLLM has a capture of its own, for its second model runner, which there is on GPUs only; its rows go the same way.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np
from vllm.sampling_params import SamplingParams

from generator.weights.routing_capture import asks_for_experts, first_wanted
from protocol.routed_experts import ExpertRows


class RoutedRows:
    """Of a scheduler: the rows of requests that ask for them, until an output is sent."""

    def __init__(self) -> None:
        self._rows: dict[str, list[ExpertRows]] = {}
        self._unwanted: dict[str, int] = {}
        """Number of rows that are still to be left out."""

    def __len__(self) -> int:
        return len(self._rows)

    def added(self, request: Any) -> None:
        """A request has come."""
        if asks_for_experts(request.sampling_params):
            self._rows[request.request_id] = []
            self._unwanted[request.request_id] = max(0, first_wanted(request.sampling_params))

    def note(self, told: Mapping[str, ExpertRows] | None) -> None:
        """Of a step, by `RoutingCapture`."""
        for request, rows in (told or {}).items():
            if request not in self._rows:
                continue
            unwanted = min(self._unwanted[request], len(rows))
            self._unwanted[request] -= unwanted
            if unwanted < len(rows):
                self._rows[request].append(rows[unwanted:])

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
                self._unwanted.pop(output.request_id, None)

    def keep(self, requests: Mapping[str, Any]) -> None:
        """Forget all others."""
        self._rows = {name: rows for name, rows in self._rows.items() if name in requests}
        self._unwanted = {name: self._unwanted[name] for name in self._rows}


class UntoldRows:
    """Rows of a completion behind a prompt of so many tokens, from the token `first` on, that no part has told yet."""

    def __init__(self, prompt: int, *, first: int = 0) -> None:
        self._prompt, self._told = prompt, first
        self._sampled = 0
        self._rows: list[ExpertRows] = []

    @classmethod
    def of_request(cls, params: SamplingParams, *, prompt: int) -> Self:
        """Rows that a request with these parameters wants."""
        return cls(prompt, first=max(0, first_wanted(params)))

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
