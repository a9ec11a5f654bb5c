"""Requests that vLLM refuses are the caller's fault, or come at the wrong time, and never the generator's."""

import warnings
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any, cast

import pytest

from protocol.adapters import AdapterSampleRequest
from protocol.generation import GenerateRequest, LogprobsRequest, Sampling
from services.http.metrics import Metrics
from services.http.refusals import RequestRefused

with warnings.catch_warnings():  # those of vLLM
    warnings.simplefilter("ignore")
    from vllm.exceptions import GracefulHTTPError, VLLMValidationError
    from vllm.v1.engine.exceptions import EngineGenerateError

    from generator.adapter_sampling import AdapterSampling
    from generator.adapters import AdapterSlots
    from generator.engine.engine import Engine
    from generator.engine.options import EngineOptions
    from generator.engine.records import EngineCounters
    from generator.logprobs import LogprobScoring
    from generator.serving import GeneratorMetrics, Serving


class RefusingLLM:
    """Raises at each request."""

    errored = False

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def generate(self, *given: Any, **more: Any) -> AsyncIterator[Any]:
        raise self._error
        yield

    def counters(self) -> EngineCounters:
        return cast("EngineCounters", None)


def wrapped(cause: Exception) -> Exception:
    error: Exception = EngineGenerateError()
    error.__cause__ = cause
    return error


class RefusingGenerator:
    def __init__(self, error: Exception) -> None:
        options = EngineOptions(model="m")
        engine = Engine(options=options, llm=cast("Any", RefusingLLM(error)), last_words=cast("Any", None))
        metrics = GeneratorMetrics(Metrics("generator"), engine=engine)
        self.serving = Serving(
            engine=engine, generator_id="g", vocabulary_size=100, max_model_len=64, max_waiting_requests=8,
            metrics=metrics,
        )  # fmt: skip
        self.serving.holds("1.0")
        slots = AdapterSlots(engine=engine, fetch=cast("Any", None), slots=1, max_rank=8, metrics=Metrics("adapters"))
        self.adapters = AdapterSampling(
            engine=engine, serving=self.serving, slots=slots, metrics=metrics, generator_id="g"
        )
        self.scoring = LogprobScoring(
            engine=engine, serving=self.serving, metrics=metrics, generator_id="g", instance="i", tokenizer="t",
            vocabulary_size=100, max_model_len=64,
        )  # fmt: skip
        self.slots = slots

    async def ask(self, route: str) -> None:
        try:
            match route:
                case "generate":
                    request = GenerateRequest(request_id="r", prompt_token_ids=(1,), sampling=Sampling(max_tokens=2))
                    async for _ in self.serving.generate(request):
                        pass
                case "sample":
                    await self.adapters.sample(
                        AdapterSampleRequest(request_id="r", namespace="s", prompt_token_ids=(1,), max_tokens=2)
                    )
                case _:
                    await self.scoring.answer(LogprobsRequest(request_id="r", sequences=((1, 2),)))
        finally:
            self.slots.close()


@pytest.mark.parametrize("route", ["generate", "sample", "logprobs"])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (VLLMValidationError("too warm", parameter="temperature", value=3.0), 422),
        (wrapped(ValueError("too warm: temperature")), 422),
        (GracefulHTTPError("temperature: come back", HTTPStatus.TOO_MANY_REQUESTS), 503),
    ],
)
async def test_a_request_that_the_engine_refuses_is_refused(route: str, error: Exception, status: int) -> None:
    with pytest.raises(RequestRefused, match="temperature") as refusal:
        await RefusingGenerator(error).ask(route)
    assert refusal.value.status_code == status


async def test_a_fault_of_the_engine_is_no_refusal() -> None:
    with pytest.raises(EngineGenerateError):
        await RefusingGenerator(wrapped(KeyError("inside"))).ask("sample")


def test_the_wire_takes_no_temperature_that_the_engine_refuses() -> None:
    with pytest.raises(ValueError, match="temperature"):
        AdapterSampleRequest(request_id="r", namespace="s", prompt_token_ids=(1,), max_tokens=2, temperature=2.01)
