"""A judge of the reward service that asks a generator of ours: vLLM's OpenAI routes over a real engine and socket."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from fastapi import FastAPI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from reward_service.config import RewardServiceConfig
from services.http.server import Listener, serve_http
from tests.generator.conftest import VOCABULARY, start_rig
from tests.reward_service.serving import item_of, serving

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

# As many as the engine's model has tokens; any other character is the first one.
CHARACTERS = ["<pad>", "<s>", "</s>", *"score: 7abdfghijklmnpqtuvwxyz"][: len(VOCABULARY)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def generator(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """The address of the routes, whose model is tiny and has random weights."""
    folder = tmp_path_factory.mktemp("judge")
    save_tokenizer(folder)
    rig = await start_rig(folder=folder, tied=True, change=lambda options: dataclasses.replace(options, tokenizer=True))
    from generator.openai_routes import PREFIX, mount_openai_routes  # vLLM is loaded by now, and its warnings are past

    app = FastAPI()
    await mount_openai_routes(app, engine=rig.engine, served_model_name="policy", check_ready=lambda: None)
    with Listener(host="127.0.0.1", port=0) as listener:
        server = asyncio.create_task(serve_http(app, listener, finish_s=0))
        yield f"{listener.url}{PREFIX}/v1"
        server.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await server
    await rig.engine.shutdown()


def config_of(url: str, **settings: object) -> RewardServiceConfig:
    entry = {"name": "judge", "url": url, "model": "policy", "template": "{completion}", "max_tokens": 12, **settings}
    return RewardServiceConfig.model_validate({"judges": (entry,), "max_deadline_s": 250.0})


@pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning")
async def test_a_reply_that_the_engine_is_made_to_give_is_a_verdict(generator: str) -> None:
    forced = {"structured_outputs": {"choice": ["score: 7"]}}
    async with serving(config_of(generator, structured="never", extra=forced)) as service:
        result = await service.result(item_of("judge", "a prime"), deadline_s=250.0)
        assert result.reward == pytest.approx(0.7), result.error
        assert service.counted("asked_tokens", verifier="judge") > 400


@pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning")
async def test_noise_is_no_verdict(generator: str) -> None:
    async with serving(config_of(generator, structured="never")) as service:
        kind, message = await service.error(item_of("judge", "a prime"), deadline_s=250.0)
    assert kind == "infrastructure"
    assert "the judge gave no verdict in 3 replies" in message


def save_tokenizer(folder: Path) -> None:
    """Writes a tokenizer with a token for each character, whose template is the text of the messages."""
    numbers = {token: number for number, token in enumerate(CHARACTERS)}
    characters = Tokenizer(models.WordLevel(numbers, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
