"""The door that all requests pass, for those that clients would have before others, or that no engine can be sent."""

import asyncio
import warnings
from typing import Any

import pytest

with warnings.catch_warnings():  # those of vLLM
    warnings.simplefilter("ignore")
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

    from generator.engine.gated_llm import BEFORE_OTHERS, CountingOutputProcessor, GatedLLM


class DeafCore:
    """An engine's process that cannot be sent any request."""

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")

    async def abort_requests_async(self, request_ids: list[str]) -> None: ...


class DoorAlone(GatedLLM):
    def __init__(self) -> None:
        self.cache_version, self.policy_adapter = "1.4", None
        self._closed, self._entering, self._none_entering = False, 0, asyncio.Event()
        self.engine_core = DeafCore()
        self.output_processor = CountingOutputProcessor(None, log_stats=False, stream_interval=1)
        self.log_requests = False

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Takes any number."""


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Prompts that came through, and their priorities."""
    seen: list[tuple[Any, Any]] = []

    async def add_request(self: Any, request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> None:
        seen.append((prompt, kwargs["priority"]))

    monkeypatch.setattr(AsyncLLM, "add_request", add_request)
    return seen


async def test_no_client_has_its_requests_before_those_of_others(entered: list[tuple[Any, Any]]) -> None:
    door = DoorAlone()
    await door.add_request("probe", {"prompt_token_ids": [1], BEFORE_OTHERS: True}, None)
    for priority in (-(2**63), 7):
        await door.add_request("client's", {"prompt_token_ids": [1]}, None, priority=priority)
    assert [priority for _, priority in entered] == [-1, 0, 0]
    assert all(BEFORE_OTHERS not in prompt for prompt, _ in entered)


async def test_a_request_that_cannot_be_sent_to_the_engine_is_not_under_way() -> None:
    door = DoorAlone()
    params = SamplingParams(extra_args={"kv_transfer_params": {"a": "\ud800"}})
    request = EngineCoreRequest("r", [1], None, params, None, 0.0, None, None, None, external_req_id="r")
    queue = RequestOutputCollector(params.output_kind, "r")
    with pytest.raises(UnicodeEncodeError):
        await door._add_request(request, None, None, 0, queue)
    assert (door.counters().running, door.counters().waiting) == (0, 0)
    async with asyncio.timeout(10):
        await door.idle()
