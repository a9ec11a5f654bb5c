"""A model directory with a character tokenizer, and scripted peers on loopback."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.env_service.bench import MakeBench, benches
from tests.env_service.chat_models import model_with

CHARACTERS = [*"0123456789+=", "<|end|>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with config.json, tokenizer.json and tokenizer_config.json; id 12 is the end token."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.WordLevel({text: index for index, text in enumerate(CHARACTERS)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "bos_token": "<|end|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4})
    )
    return folder


@pytest.fixture
async def bench(model: Path) -> AsyncIterator[MakeBench]:
    """Makes rollouts against scripted generators and reward services."""
    async with benches(model) as make:
        yield make


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    """A directory with a chat template."""
    return model_with("chatml", tmp_path)


@pytest.fixture
async def chat_bench(chat_model: Path) -> AsyncIterator[MakeBench]:
    """As `bench`, of a model with a chat template."""
    async with benches(chat_model) as make:
        yield make
