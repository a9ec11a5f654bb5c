"""Version spans on every part of a completion, and counters, at the place where vLLM hands out the engine's outputs.

vLLM stamps each step's outputs with the version that the engine holds, and adds the spans to the last part of a
completion only. Work that can go on elsewhere after a death needs them with every part.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from vllm.outputs import CompletionOutput
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

from generator.engine.reports import EngineCounters


class SpannedRequestState(RequestState):  # type: ignore[misc]
    """A completion in flight whose every part carries the spans so far."""

    def _new_completion_output(self, *args: Any, **kwargs: Any) -> CompletionOutput:
        output = super()._new_completion_output(*args, **kwargs)
        if output.weight_versions is None:
            output.weight_versions = self._weight_version_spans()
        return output


class CountingOutputProcessor(OutputProcessor):  # type: ignore[misc]
    """vLLM's processor, with spanned states, a count of tokens and a clock of idle time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.idle = asyncio.Event()
        self.idle.set()
        self._started = time.monotonic()
        self._idle_since: float | None = self._started
        self._idle_s = 0.0
        self._tokens = 0
        self._completions = 0
        self._cached_tokens = 0

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super().add_request(request, *args, **kwargs)
        self.request_states[request.request_id].__class__ = SpannedRequestState

    def process_outputs(self, engine_core_outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        self._tokens += sum([len(output.new_token_ids) for output in engine_core_outputs])
        return super().process_outputs(engine_core_outputs, *args, **kwargs)

    def counters(self) -> EngineCounters:
        """Costs a walk over the requests in flight."""
        now = time.monotonic()
        waiting = sum(state.is_prefilling for state in self.request_states.values())
        idle_s = self._idle_s + (now - self._idle_since if self._idle_since is not None else 0.0)
        return EngineCounters(
            running=len(self.request_states) - waiting,
            waiting=waiting,
            tokens_total=self._tokens,
            completions_total=self._completions,
            cached_tokens_total=self._cached_tokens,
            idle_s=idle_s,
            uptime_s=now - self._started,
        )

    def _finish_request(self, req_state: RequestState) -> None:
        self._completions += 1
        self._cached_tokens += req_state.num_cached_tokens
        super()._finish_request(req_state)

    def _update_admission_stats(self) -> None:
        """vLLM calls it at each change of the set of requests."""
        super()._update_admission_stats()
        if not self.request_states:
            if self._idle_since is None:
                self._idle_since = time.monotonic()
                self.idle.set()
        elif self._idle_since is not None:
            self._idle_s += time.monotonic() - self._idle_since
            self._idle_since = None
            self.idle.clear()
