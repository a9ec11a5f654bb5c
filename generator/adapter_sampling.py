"""Samples from adapters: what `POST /v1/adapters/sample` and `/v1/adapters/offer` are answered with."""

import uuid

from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput

from generator.adapters import AdapterSlots
from generator.engine.answers import adapter_answer
from generator.engine.engine import Engine, EngineGone
from generator.engine.gated_llm import HandedBack
from generator.engine.refusals import RequestUnfit, RequestUntimely
from generator.serving import GeneratorMetrics, Serving
from generator.whole_targets import WholeTargets
from protocol.adapters import AdapterSampleAnswer, AdapterSampleRequest, OfferAnswer, OfferedAdapter
from services.http.refusals import RequestRefused


class AdapterSampling:
    """Answers the adapter routes."""

    def __init__(
        self,
        *,
        engine: Engine,
        serving: Serving,
        slots: AdapterSlots | WholeTargets,
        metrics: GeneratorMetrics,
        generator_id: str,
    ) -> None:
        self._engine, self._serving, self._slots = engine, serving, slots
        self._metrics, self._generator_id = metrics, generator_id

    async def offer(self, offered: OfferedAdapter) -> OfferAnswer:
        """Raises RequestRefused."""
        return OfferAnswer(held=await self._slots.offer(offered))

    async def sample(self, request: AdapterSampleRequest) -> AdapterSampleAnswer:
        """Raises RequestRefused."""
        self._serving.check_ready()
        self._serving.check_tokens("prompt_token_ids", request.prompt_token_ids)
        self._serving.check_tokens("stop_token_ids", request.stop_token_ids)
        self._serving.check_length(len(request.prompt_token_ids), request.max_tokens)
        with self._serving.occupied():
            async with self._slots.using(request.adapter) as adapter:
                output = await self._sampled(request, adapter)
                version = self._slots.version
        answer = adapter_answer(output, request, generator_id=self._generator_id, version=version)
        self._metrics.sampled([(len(each.token_ids), each.finish_reason) for each in answer.sequences])
        return answer

    async def _sampled(self, request: AdapterSampleRequest, adapter: LoRARequest | None) -> RequestOutput:
        request_id = f"{request.request_id}-{uuid.uuid4().hex[:8]}"
        try:
            return await self._engine.sample(request, request_id=request_id, adapter=adapter)
        except HandedBack as error:
            raise RequestRefused(503, "handed_back", f"{error}: try another generator") from error
        except RequestUnfit as error:
            raise RequestRefused(422, "engine_refused", f"request {request.request_id}: {error}") from error
        except (EngineGone, RequestUntimely, ValueError) as error:
            raise RequestRefused(503, "engine", f"request {request.request_id}: {error}") from error
