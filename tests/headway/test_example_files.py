"""`headway check` reads files of examples as the learner does: it refuses what the learner refuses, and no more."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from env_service.environments.tokenization import LightTokenizer, Tokenization
from learner.data.distillation import read_distillation
from learner.data.examples import read_examples
from learner.data.model_tokenizer import open_tokenizer

WORDS = ("<unk>", "a", "b", "c", "user", "assistant", "<pad>", "</s>")
END = WORDS.index("</s>")
TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} </s> c {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
"""A turn goes on behind the end token, as most templates' does with a newline."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tokenizer whose end token has another number than 0."""
    folder = tmp_path / "model"
    folder.mkdir()
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


RECORDS: tuple[dict[str, object], ...] = (
    {"prompt": "a b", "completion": "c"},
    {"prompt": "a b", "completion": "c </s>"},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b b"}]},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2},
)


@pytest.mark.parametrize("record", RECORDS)
def test_examples_have_the_learners_tokens_and_masks(tmp_path: Path, model: Path, record: dict[str, object]) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(record) + "\n")
    (learned,) = read_examples(path, open_tokenizer(model, template="", told={}))
    (looked_at,) = read_examples(path, LightTokenizer(Tokenization(model)))
    assert looked_at.token_ids.tolist() == learned.token_ids.tolist()
    assert looked_at.loss_mask.tolist() == learned.loss_mask.tolist()
    assert END in learned.token_ids


def test_an_end_token_that_only_a_tokenizers_class_names_is_that_of_the_models_config(model: Path) -> None:
    """As GPT-2's files have it."""
    (model / "tokenizer_config.json").write_text("{}")
    (model / "config.json").write_text(json.dumps({"eos_token_id": END}))
    assert LightTokenizer(Tokenization(model)).eos_token_id == END


def test_logprobs_of_a_conversation_fit_for_the_check_as_they_do_for_the_learner(tmp_path: Path, model: Path) -> None:
    """They were made for the tokens that the learner trains: the reply, and the end token of the template."""
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({**RECORDS[2], "top_ids": [[2], [2], [END]], "top_logprobs": [[-0.1]] * 3}) + "\n")
    (learned,) = read_distillation(path, open_tokenizer(model, template="", told={}))
    (looked_at,) = read_distillation(path, LightTokenizer(Tokenization(model)))
    assert learned.completion.trained_length == looked_at.completion.trained_length == 3
