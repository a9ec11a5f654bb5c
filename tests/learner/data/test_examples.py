"""Supervised examples from files: what is trained, where it ends, and whose fault a bad line is."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from env_service.environments.tokenization import LightTokenizer, Tokenization
from learner.data.examples import batches, read_examples
from learner.data.model_tokenizer import open_tokenizer
from learner.data.sources import RecordError
from learner.training.batch import TrainSequence
from tests.learner.data.character_tokenizer import CharacterTokenizer, shown

HI = {"role": "user", "content": "hi"}
YO = {"role": "assistant", "content": "yo"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}


class ForgetfulTokenizer(CharacterTokenizer):
    """A template that leaves out what the assistant said before."""

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        kept = [message for message in conversation[:-1] if message["role"] != "assistant"] + list(conversation[-1:])
        return super().apply_chat_template(kept, add_generation_prompt=add_generation_prompt, tokenize=tokenize)


def read(tmp_path: Path, *lines: object, tokenizer: CharacterTokenizer | None = None) -> list[TrainSequence]:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return read_examples(path, tokenizer or CharacterTokenizer())


def test_a_completion_is_trained_and_ends_with_the_end_token(tmp_path: Path) -> None:
    (example,) = read(tmp_path, {"prompt": "2+2=", "completion": "4"})
    assert shown(example) == ("2+2=4|", "....^^")


def test_an_end_token_that_is_there_is_not_doubled(tmp_path: Path) -> None:
    (example,) = read(tmp_path, {"prompt": "2+2=", "completion": "4|"})
    assert shown(example) == ("2+2=4|", "....^^")


def test_a_tokenizer_without_an_end_token_adds_none(tmp_path: Path) -> None:
    tokenizer = CharacterTokenizer()
    tokenizer.eos_token_id = None
    (example,) = read(tmp_path, {"prompt": "a", "completion": "b"}, tokenizer=tokenizer)
    assert shown(example) == ("ab", ".^")


def test_of_a_conversation_what_the_assistant_said_is_trained_up_to_its_end_token(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "so"},
        {"role": "assistant", "content": "no"},
    ]
    (example,) = read(tmp_path, {"messages": messages})
    assert shown(example) == (
        "<u>hi|\n<a>yo|\n<u>so|\n<a>no|\n",
        "..........^^^..........." + "^^^.",
    )


def test_a_prompt_of_messages_takes_a_reply_or_messages_of_which_only_those_are_trained(tmp_path: Path) -> None:
    prompt = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "so"},
    ]
    first, second = read(
        tmp_path,
        {"prompt": prompt, "completion": "no"},
        {"prompt": prompt, "completion": [{"role": "assistant", "content": "no"}]},
    )
    assert shown(first) == shown(second) == ("<u>hi|\n<a>yo|\n<u>so|\n<a>no|\n", "." * 24 + "^^^.")


def test_what_follows_the_last_answer_is_left_out(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    (example,) = read(tmp_path, {"messages": [*messages, {"role": "user", "content": "bye"}]})
    assert shown(example)[0] == "<u>hi|\n<a>yo|\n"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{not json}\n", "Expecting property name"),
        ({"prompt": "a"}, "expected an object with texts `prompt` and `completion`"),
        ({"prompt": "a", "completion": 4}, "expected an object with texts `prompt` and `completion`"),
        ([1, 2], "is a list: expected one JSON object a line"),
        ([{"prompt": "a", "completion": "b"}], "is a list: expected one JSON object a line"),
        ("{\n", "expected one JSON object a line, in UTF-8"),
        ("4\n", "expected an object with texts"),
        ({"instruction": "a", "output": "b"}, "got instruction (str), output (str)"),
        ({"prompt": [HI, YO], "completion": "more"}, "the prompt ends with a message of the assistant"),
        ({"prompt": [HI, YO], "completion": [YO]}, "the prompt ends with a message of the assistant"),
        ({"prompt": [HI], "completion": [HI, YO]}, "the completion begins with a message of user"),
        ({"prompt": "a", "completion": "b\ud83d"}, r"half of a surrogate pair (\ud83d) at character 2"),
        ({"prompt": "\ude00a", "completion": "b"}, r"half of a surrogate pair (\ude00) at character 1"),
        ({"messages": [HI, {**YO, "content": "\ud83d"}]}, r"half of a surrogate pair (\ud83d)"),
        ({"prompt": "a", "completion": ""}, "the completion is empty"),
        ({"prompt": "", "completion": "b"}, "the prompt is empty"),
        ({"messages": [{"role": "user", "content": "a"}]}, "a conversation without an assistant's turn"),
        ({"messages": [{"content": "a"}]}, "expected messages with texts `role` and `content`, got {'content': 'a'}"),
        ({"messages": ["hello"]}, "expected messages with texts `role` and `content`, got 'hello'"),
        ({"messages": [{"role": "assistant", "content": None}]}, "expected messages with texts"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: object, complaint: str) -> None:
    with pytest.raises(RecordError) as caught:
        read(tmp_path, {"prompt": "a", "completion": "b"}, "\n", line)
    assert str(caught.value).startswith(f"{tmp_path / 'data.jsonl'}, line 3: ")
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({"messages": [HI, {**YO, "tool_calls": [CALL]}]}, "a message has `tool_calls`, which is not read"),
        ({"messages": [HI, {"role": "assistant", "tool_calls": [CALL]}]}, "a message has `tool_calls`"),
        ({"messages": [HI, {**YO, "function_call": {"name": "f"}}]}, "a message has `function_call`"),
        ({"messages": [HI, {**YO, "reasoning_content": "so"}]}, "a message has `reasoning_content`"),
        ({"messages": [HI, {**YO, "thinking": "so"}]}, "a message has `thinking`"),
        ({"prompt": [HI, {**YO, "tool_calls": [CALL]}], "completion": "no"}, "a message has `tool_calls`"),
        ({"messages": [HI, {**YO, "weight": 0}, HI, YO]}, "has `weight` 0, and would be trained all the same"),
        ({"messages": [HI, {**YO, "train": False}, HI, YO]}, "has `train` False, and would be trained"),
        ({"messages": [HI, YO], "tools": [{"type": "function"}]}, "`tools` is not read, and the chat template"),
        ({"messages": [HI, YO], "tools": '[{"type": "function"}]'}, "`tools` is not read"),
        ({"prompt": [HI], "completion": [YO], "tools": [{"type": "function"}]}, "`tools` is not read"),
        ({"messages": [HI, YO], "chat_template_kwargs": {"a": False}}, "as run.chat_template_kwargs"),
        ({"messages": [HI, YO], "images": ["a.png"]}, "`images` is not read: expected texts alone"),
        ({"prompt": "<image>", "completion": "b", "image": {"bytes": "x", "path": None}}, "`image` is not read"),
    ],
)
def test_what_would_be_lost_of_a_record_is_refused_by_its_key(
    tmp_path: Path, record: dict[str, object], complaint: str
) -> None:
    with pytest.raises(RecordError) as caught:
        read(tmp_path, record)
    assert complaint in str(caught.value)


def test_keys_that_say_nothing_and_those_of_other_kinds_change_nothing(tmp_path: Path) -> None:
    """As columns of a table have them, of which a row uses some."""
    empty = {"tool_calls": None, "reasoning_content": "", "weight": None, "train": True, "name": "x"}
    bare = {"messages": [HI, YO]}
    full = {
        "messages": [{**HI, **empty}, {**YO, **empty, "weight": 1}],
        **{"tools": "[]", "images": [], "image": {"bytes": None}, "chat_template_kwargs": {"a": None}, "id": 7},
    }
    taught = {"prompt": [HI, {**YO, "weight": 0}, HI], "completion": [YO]}
    made = {"prompt": "made of tools", "completion": "b", "tools": [{"type": "function"}]}
    first, second, *_ = read(tmp_path, bare, full, taught, made)
    assert shown(first) == shown(second)


class OpeningTokenizer(CharacterTokenizer):
    """It puts `^` before a text by itself, as many put their first token."""

    begin = "^"


def test_a_prompt_that_is_a_text_begins_with_what_the_tokenizer_adds_and_a_conversation_does_not(
    tmp_path: Path,
) -> None:
    text = {"prompt": "2+2=", "completion": "4"}
    first, second, third, chat = read(
        tmp_path,
        text,
        {"prompt": "^2+2=", "completion": "4"},
        {"prompt": "", "completion": "b"},
        {"messages": [HI, YO]},
        tokenizer=OpeningTokenizer(),
    )
    assert shown(first) == shown(second) == ("^2+2=4|", ".....^^")
    assert shown(third) == ("^b|", ".^^")
    assert shown(chat)[0] == "<u>hi|\n<a>yo|\n"


@pytest.mark.parametrize("prompt", ["a b", "<s>a b"])
def test_a_text_has_the_tokens_that_an_env_service_samples_after(prompt: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    made = Tokenizer(WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "c": 4}, unk_token="c"))
    made.pre_tokenizer = Whitespace()
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": prompt, "completion": "c"}) + "\n")
    sampled_after = Tokenization(folder).encode(prompt)[1]
    (example,) = read_examples(path, open_tokenizer(folder, template="", told={}))
    assert example.token_ids.tolist() == [*sampled_after, 4, 1] == [0, 2, 3, 4, 1]
    (looked_at,) = read_examples(path, LightTokenizer(Tokenization(folder)))
    assert len(looked_at.token_ids) == len(example.token_ids)  # by which `headway check` looks at lengths


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "a", "completion": "b"}\n{"prompt": "\xff", "completion": "b"}\n')
    with pytest.raises(RecordError, match=r"data\.jsonl, line 2: .*utf-8"):
        read_examples(path, CharacterTokenizer())


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2
    with pytest.raises(RecordError, match="the chat template rewrites earlier turns"):
        read(tmp_path, {"messages": turns}, tokenizer=ForgetfulTokenizer())


def test_a_file_without_examples_and_one_that_is_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"data\.jsonl holds no examples"):
        read(tmp_path, "\n")
    with pytest.raises(FileNotFoundError, match="none"):
        read_examples(tmp_path / "none", CharacterTokenizer())


@pytest.mark.parametrize("size", [2, 3, 7])
def test_batches_hold_every_example_once_an_epoch_in_an_order_that_the_seed_fixes(tmp_path: Path, size: int) -> None:
    examples = read(tmp_path, *({"prompt": "p", "completion": chr(97 + index)} for index in range(5)))

    def drawn(seed: int) -> list[int]:
        taken = itertools.islice(batches(examples, size=size, seed=seed), 10)
        return [int(example.token_ids[1]) for batch in taken for example in batch]

    row = drawn(seed=1)
    assert len(row) == 10 * size
    for start in range(0, len(row) - 4, 5):
        assert sorted(row[start : start + 5]) == [97, 98, 99, 100, 101]
    assert row == drawn(seed=1) != drawn(seed=2)
    for first in range(10):
        taken = itertools.islice(batches(examples, size=size, seed=1, first=first), 10 - first)
        assert [int(example.token_ids[1]) for batch in taken for example in batch] == row[first * size :]
