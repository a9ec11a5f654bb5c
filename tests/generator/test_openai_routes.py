"""vLLM's OpenAI routes in an app of ours, over a real engine."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from fastapi import FastAPI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from services.http.metrics import Metrics
from tests.generator.conftest import Rig, start_rig

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]


EXTRA = {"long_prefill_token_threshold": 768}  # longer than any prompt here
CHARACTERS = ["<pad>", "<s>", "</s>", *"Here ismythougpc:n[]()1230+="]
"""Of no more tokens than the engine's model has."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    folder = tmp_path_factory.mktemp("chat")
    save_tokenizer(folder)
    rig = await start_rig(
        folder=folder, tied=True, change=lambda options: dataclasses.replace(options, tokenizer=True, extra=EXTRA)
    )
    yield rig
    await rig.engine.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(rig: Rig) -> AsyncIterator[httpx.AsyncClient]:
    from generator.openai_routes import mount_openai_routes

    app = FastAPI()
    await mount_openai_routes(app, engine=rig.engine, served_model_name="policy", check_ready=lambda: None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test/openai") as client:
        yield client


async def test_an_extra_argument_arrives_in_the_engine(rig: Rig) -> None:
    from vllm.config import SchedulerConfig

    assert SchedulerConfig.long_prefill_token_threshold != EXTRA["long_prefill_token_threshold"]
    assert rig.engine.llm.vllm_config.scheduler_config.long_prefill_token_threshold == 768


@pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning")
async def test_parsers_of_tools_and_reasoning_take_apart_what_the_engine_says_and_a_template_of_a_file_is_used(
    rig: Rig,
) -> None:
    from generator.openai_routes import mount_openai_routes

    app = FastAPI()
    await mount_openai_routes(
        app,
        engine=rig.engine,
        served_model_name="policy",
        check_ready=lambda: None,
        tool_parser="pythonic",
        reasoning_parser="granite",
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}===",
    )
    made_to_say = "Here is my thought process:hm Here is my response:[go()]"
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": "12+30"}],
        "tools": [{"type": "function", "function": {"name": "go", "parameters": {"type": "object", "properties": {}}}}],
        "structured_outputs": {"choice": [made_to_say]},
        "max_tokens": 80,
    }
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test/openai") as client:
        answer = await client.post("/v1/chat/completions", json=body)

    assert answer.status_code == 200, answer.text
    said = answer.json()["choices"][0]["message"]
    assert answer.json()["usage"]["prompt_tokens"] == len("12+30===")
    assert [call["function"]["name"] for call in said["tool_calls"]] == ["go"], said
    assert said.get("reasoning", said.get("reasoning_content")).strip() == "hm", said
    assert not said["content"]


@pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning")
async def test_the_template_is_told_what_the_run_says_and_what_a_request_says_over_that(rig: Rig) -> None:
    from generator.openai_routes import mount_openai_routes

    app = FastAPI()
    await mount_openai_routes(
        app,
        engine=rig.engine,
        served_model_name="policy",
        check_ready=lambda: None,
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}"
        "{% if enable_thinking is defined and not enable_thinking %}=={% endif %}{{ '+++' if mode == 'plus' }}",
        chat_template_kwargs={"enable_thinking": False, "mode": "plus"},
    )
    body = {"model": "policy", "messages": [{"role": "user", "content": "12+30"}], "max_tokens": 1}
    sizes = []
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test/openai") as client:
        for told in (None, {}, {"enable_thinking": True}, {"mode": "none"}):
            answer = await client.post("/v1/chat/completions", json={**body, "chat_template_kwargs": told})
            assert answer.status_code == 200, answer.text
            sizes.append(answer.json()["usage"]["prompt_tokens"])

    assert sizes == [len("12+30==+++"), len("12+30==+++"), len("12+30+++"), len("12+30==")]


async def test_the_model_is_listed_by_its_served_name(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/models")
    assert [model["id"] for model in answer.json()["data"]] == ["policy"]


@pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning")
async def test_chat_completions_give_text_and_logprobs(client: httpx.AsyncClient) -> None:
    question = {"role": "user", "content": "12+30="}
    body = {"model": "policy", "messages": [question], "max_tokens": 5, "min_tokens": 5, "logprobs": True}
    answer = await client.post("/v1/chat/completions", json=body)
    choice = answer.json()["choices"][0]
    assert answer.status_code == 200
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["content"]) == 5


async def test_completions_stream_tokens_as_they_come(client: httpx.AsyncClient) -> None:
    """Not in parts of 32 as our own route does. On a busy machine vLLM puts tokens that are ready into one line."""
    body = {"model": "policy", "prompt": [3, 4, 5], "max_tokens": 96, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    assert lines[-1] == "[DONE]"
    assert 6 < len([json.loads(line) for line in lines[:-1]]) <= 97


async def test_a_request_for_another_model_is_refused(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/completions", json={"model": "other", "prompt": [3], "max_tokens": 1})
    assert answer.status_code == 404


async def test_a_request_waits_while_the_gate_is_closed(rig: Rig, client: httpx.AsyncClient) -> None:
    await rig.engine.llm.close_gate()
    body = {"model": "policy", "prompt": [3, 4], "max_tokens": 1}
    waiting = asyncio.create_task(client.post("/v1/completions", json=body))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting), 0.1)
    rig.engine.llm.open_gate()
    assert (await waiting).status_code == 200


async def test_the_prefix_cache_is_not_shared_between_versions(rig: Rig, client: httpx.AsyncClient) -> None:
    body = {"model": "policy", "prompt": [3 + i % 20 for i in range(300)], "max_tokens": 1}
    from generator.serving import GeneratorMetrics  # as above

    metrics = Metrics("generator")
    GeneratorMetrics(metrics, engine=rig.engine)

    def shown(what: str) -> float:
        return metrics.registry.get_sample_value(f"headway_generator_prefix_cache_{what}_total") or 0.0

    for version, cached in (("1.1", 0), ("1.1", 256), ("1.2", 0), ("1.2", 256)):
        rig.engine.llm.cache_version = version
        before = shown("queries"), shown("hits")
        await client.post("/v1/completions", json=body)
        assert (shown("queries") - before[0], shown("hits") - before[1]) == (300, cached)


def save_tokenizer(folder: Path) -> None:
    """Writes a tokenizer with a token for each character, whose template is the text of the messages."""
    numbers = {token: number for number, token in enumerate(CHARACTERS)}
    characters = Tokenizer(models.WordLevel(numbers, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
