"""From an item to a reward model's tokens: the same as in training, or those that Hugging Face's own users make."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.data.preferences import read_pairs
from protocol.rewards import RewardFormat, Tokenize
from reward_service.models.process import ModelJob, ModelMessage
from reward_service.models.worker import chunks_by_length, input_ids, unused_token
from reward_service.verifier.submission import DataError
from tests.learner.data.character_tokenizer import END, CharacterTokenizer

HI = (ModelMessage(role="user", content="hi"),)


def job(
    completion: str,
    *,
    format: RewardFormat = "plain",
    tokenize: Tokenize = "apart",
    prompt: str = "2+2=",
    messages: tuple[ModelMessage, ...] = HI,
    max_tokens: int | None = None,
    special_tokens: bool = False,
) -> ModelJob:
    return ModelJob(
        format=format,
        tokenize=tokenize,
        special_tokens=special_tokens,
        max_tokens=max_tokens,
        messages=messages,
        prompt=prompt,
        completion=completion,
    )


class NoBeginning(CharacterTokenizer):
    """Has no tokens to add."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return super().encode(text, add_special_tokens=False)


class WithBeginning(CharacterTokenizer):
    """Adds a token of its own before a text, as many do."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord("^")] * add_special_tokens + super().encode(text, add_special_tokens=False)


def shown(given: ModelJob) -> str:
    return "".join("|" if token == END else chr(token) for token in input_ids(given, WithBeginning()))


def test_tokenized_apart_an_input_ends_with_the_end_token_and_nothing_after() -> None:
    assert shown(job("4")) == "2+2=4|"
    assert shown(job("4|")) == "2+2=4|"
    assert shown(job("")) == "2+2=|"
    assert shown(job("yo", format="chat")) == "<u>hi|\n<a>yo|"


def test_tokenized_apart_plain_text_has_what_the_tokenizer_adds_if_the_model_was_trained_so(tmp_path: Path) -> None:
    assert shown(job("4", special_tokens=True)) == "^2+2=4|"
    assert shown(job("4", prompt="^2+2=", special_tokens=True)) == "^2+2=4|"
    assert shown(job("yo", format="chat", special_tokens=True)) == "<u>hi|\n<a>yo|"
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "2+2=", "chosen": "4", "rejected": "5"}) + "\n")
    (pair,) = read_pairs(tmp_path / "pairs.jsonl", WithBeginning())
    assert input_ids(job("4", special_tokens=True), WithBeginning()) == pair.chosen.token_ids.tolist()


def test_tokenized_whole_an_input_is_what_the_template_and_the_tokenizer_make_of_it() -> None:
    assert shown(job("4", tokenize="whole")) == "^2+2=4"
    assert shown(job("yo", format="chat", tokenize="whole")) == "<u>hi|\n<a>yo|\n"


def test_an_input_is_tokenized_as_the_pairs_that_the_model_was_trained_on(tmp_path: Path) -> None:
    conversation = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}] * 2
    conversation[2:3] = [{"role": "user", "content": "so"}]
    records = [
        {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
        {"prompt": conversation[:3], "chosen": "yes", "rejected": "no"},
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    plain, chat = read_pairs(tmp_path / "pairs.jsonl", CharacterTokenizer())
    messages = tuple(ModelMessage(role=turn["role"], content=turn["content"]) for turn in conversation[:3])
    for text, trained in (("4", plain.chosen), ("5", plain.rejected)):
        assert input_ids(job(text), CharacterTokenizer()) == trained.token_ids.tolist()
    for text, trained in (("yes", chat.chosen), ("no", chat.rejected)):
        served = input_ids(job(text, format="chat", messages=messages), CharacterTokenizer())
        assert served == trained.token_ids.tolist()


def test_an_input_that_is_too_long_or_empty_is_a_fault_of_the_data_and_never_cut() -> None:
    assert shown(job("4", max_tokens=6)) == "2+2=4|"
    with pytest.raises(DataError, match="has 6 tokens, and the reward model takes at most 5"):
        input_ids(job("4", max_tokens=5), CharacterTokenizer())
    with pytest.raises(DataError, match="no tokens"):
        input_ids(job("", prompt="", tokenize="whole"), NoBeginning())


@given(lengths=st.lists(st.integers(1, 50), max_size=30), batch_tokens=st.integers(1, 120))
def test_groups_hold_every_input_once_and_no_more_padded_tokens_than_allowed(
    lengths: list[int], batch_tokens: int
) -> None:
    groups = chunks_by_length(lengths, batch_tokens=batch_tokens)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        padded = max(lengths[index] for index in group) * len(group)
        assert padded <= batch_tokens or len(group) == 1


def test_a_token_that_no_row_has_is_found_if_there_is_one() -> None:
    assert unused_token([[0, 1], [3]], vocabulary=5) == 2
    assert unused_token([[0, 1], [2]], vocabulary=3) is None
