"""Preference pairs in every form: what is trained, what is the prompt, and whose fault a bad record is."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from learner.data.preferences import LabelledCompletion, PreferencePair, read_labelled, read_pairs
from learner.data.sources import RecordError
from tests.learner.data.character_tokenizer import CharacterTokenizer, shown

USER = {"role": "user", "content": "hi"}
BYE = {"role": "user", "content": "so"}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write(tmp_path: Path, *records: object) -> Path:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def pairs(tmp_path: Path, *records: object) -> list[PreferencePair]:
    return read_pairs(write(tmp_path, *records), CharacterTokenizer())


def labelled(tmp_path: Path, *records: object) -> list[LabelledCompletion]:
    return read_labelled(write(tmp_path, *records), CharacterTokenizer())


def test_a_plain_pair_trains_both_completions_and_their_end_tokens(tmp_path: Path) -> None:
    (pair,) = pairs(tmp_path, {"prompt": "2+2=", "chosen": "4", "rejected": "5!"})
    assert shown(pair.chosen) == ("2+2=4|", "....^^")
    assert shown(pair.rejected) == ("2+2=5!|", "....^^^")
    assert pair.margin == 0.0
    assert pair.chosen.prompt_length == pair.rejected.prompt_length == 4


CHAT = {
    "replies": {"prompt": [USER], "chosen": "yo", "rejected": "no"},
    "messages": {"prompt": [USER], "chosen": [said("yo")], "rejected": [said("no")]},
    "conversations": {"chosen": [USER, said("yo")], "rejected": [USER, said("no")]},
    "columns": {"prompt": None, "chosen": [USER, said("yo")], "rejected": [USER, said("no")], "margin": None},
}


@pytest.mark.parametrize("form", CHAT)
def test_the_chat_forms_of_one_pair_are_alike_and_end_with_the_end_token(tmp_path: Path, form: str) -> None:
    (pair,) = pairs(tmp_path, CHAT[form])
    assert shown(pair.chosen) == ("<u>hi|\n<a>yo|", "..........^^^")
    assert shown(pair.rejected) == ("<u>hi|\n<a>no|", "..........^^^")


def test_of_a_conversation_only_what_follows_the_common_beginning_is_trained(tmp_path: Path) -> None:
    beginning = [USER, said("yo"), BYE]
    (pair,) = pairs(tmp_path, {"chosen": [*beginning, said("A")], "rejected": [*beginning, said("B"), BYE, said("C")]})
    assert shown(pair.chosen) == ("<u>hi|\n<a>yo|\n<u>so|\n<a>A|", "........................^^")
    assert shown(pair.rejected) == (
        "<u>hi|\n<a>yo|\n<u>so|\n<a>B|\n<u>so|\n<a>C|",
        "........................^^...........^^",
    )


def test_a_margin_is_read(tmp_path: Path) -> None:
    pair, other = pairs(
        tmp_path,
        {"prompt": "p", "chosen": "a", "rejected": "b", "margin": 1.5},
        {"prompt": "p", "chosen": "a", "rejected": "b", "margin": -2},
    )
    assert (pair.margin, other.margin) == (1.5, -2.0)


def test_a_tie_is_kept(tmp_path: Path) -> None:
    tie, pair, conversation = pairs(
        tmp_path,
        {"prompt": "p", "chosen": "a", "rejected": "a"},
        {"prompt": "p", "chosen": "a", "rejected": "b"},
        {"chosen": [USER, said("yo")], "rejected": [USER, said("yo")]},
    )
    assert shown(tie.chosen) == shown(tie.rejected) != shown(pair.rejected)
    assert shown(conversation.chosen) == shown(conversation.rejected)
    assert shown(conversation.chosen) == ("<u>hi|\n<a>yo|", "..........^^^")


def test_pairs_from_parquet_are_those_from_json_lines(tmp_path: Path) -> None:
    records = [
        {"prompt": [USER], "chosen": [said("yo")], "rejected": [said("no")], "margin": 0.5},
        {"prompt": [USER, said("yo"), BYE], "chosen": [said("A")], "rejected": [said("B")], "margin": None},
    ]
    path = tmp_path / "pairs.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    for read, expected in zip(read_pairs(path, CharacterTokenizer()), pairs(tmp_path, *records), strict=True):
        assert shown(read.chosen) == shown(expected.chosen)
        assert shown(read.rejected) == shown(expected.rejected)
        assert read.margin == expected.margin


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({"prompt": "p", "chosen": "a"}, "got prompt (str), chosen (str)"),
        ({"chosen": "a", "rejected": "b"}, "with a `prompt`"),
        ({"prompt": "p", "chosen": [said("a")], "rejected": [said("b")]}, "a text `prompt` takes texts"),
        ({"prompt": "p", "chosen": "", "rejected": "b"}, "the completion is empty"),
        ({"prompt": [USER], "chosen": "", "rejected": "b"}, "the completion is empty"),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, "the prompt is empty"),
        ({"prompt": [], "chosen": "a", "rejected": "b"}, "the prompt has no messages"),
        ({"prompt": [USER], "chosen": [USER], "rejected": "b"}, "expected one of the assistant first"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": "big"}, "`margin` is 'big'"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": True}, "`margin` is True"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": float("nan")}, "`margin` is nan"),
        ({"chosen": [USER, said("a")], "rejected": [BYE, said("b")]}, "do not begin alike"),
        ({"chosen": [USER, said("a"), USER], "rejected": [USER, said("a"), BYE]}, "part at message 3, which is from"),
        ({"chosen": [USER], "rejected": [USER, said("a")]}, "part at message 2, which is from nothing and assistant"),
        ({"chosen": [], "rejected": []}, "do not begin alike"),
        ([1], "is a list: expected one JSON object a line"),
    ],
)
def test_a_bad_pair_is_named_by_file_and_line(tmp_path: Path, record: object, complaint: str) -> None:
    with pytest.raises(RecordError) as caught:
        pairs(tmp_path, {"prompt": "p", "chosen": "a", "rejected": "b"}, record)
    assert str(caught.value).startswith(f"{tmp_path / 'pairs.jsonl'}, line 2: ")
    assert complaint in str(caught.value)


def test_what_would_be_lost_of_a_pair_or_of_an_unpaired_record_is_refused_by_its_key(tmp_path: Path) -> None:
    """Two answers that differ in their calls alone would be one and the same."""
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    for record in (
        {"chosen": [USER, {**said(""), "tool_calls": calls}], "rejected": [USER, said("")]},
        {"prompt": [USER], "chosen": [said("yo")], "rejected": [{**said("no"), "tool_calls": calls}]},
    ):
        with pytest.raises(RecordError, match=r"line 1: a message has `tool_calls`, which is not read"):
            pairs(tmp_path, record)
    answer = {"completion": [said("yo")], "label": True}
    with pytest.raises(RecordError, match=r"line 1: `tools` is not read"):
        labelled(tmp_path, {"prompt": [USER], **answer, "tools": calls})
    with pytest.raises(RecordError, match=r"line 1: `images` is not read"):
        pairs(tmp_path, {"prompt": "a", "chosen": "b", "rejected": "c", "images": ["x.png"]})


def test_the_prompt_of_a_text_pair_begins_with_what_the_tokenizer_adds(tmp_path: Path) -> None:
    tokenizer = CharacterTokenizer()
    tokenizer.begin = "^"
    (pair,) = read_pairs(write(tmp_path, {"prompt": "2+2=", "chosen": "4", "rejected": "5"}), tokenizer)
    assert shown(pair.chosen) == ("^2+2=4|", ".....^^")
    assert shown(pair.rejected) == ("^2+2=5|", ".....^^")


def test_an_unpaired_record_says_whether_its_completion_is_good(tmp_path: Path) -> None:
    good, bad = labelled(
        tmp_path,
        {"prompt": "2+2=", "completion": "4", "label": True},
        {"prompt": [USER], "completion": "no", "label": False},
    )
    assert (shown(good.completion), good.label) == (("2+2=4|", "....^^"), True)
    assert (shown(bad.completion), bad.label) == (("<u>hi|\n<a>no|", "..........^^^"), False)


@pytest.mark.parametrize("label", [1, "true", None])
def test_a_label_is_true_or_false_and_nothing_else(tmp_path: Path, label: object) -> None:
    with pytest.raises(RecordError, match=r"line 1: expected `prompt`.*and `label` \(true or false\)"):
        labelled(tmp_path, {"prompt": "p", "completion": "c", "label": label})


def test_files_without_records_are_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"pairs\.jsonl holds no preference pairs"):
        pairs(tmp_path)
    with pytest.raises(RecordError, match=r"pairs\.jsonl holds no records"):
        labelled(tmp_path)


def test_a_pair_knows_whether_its_prompt_was_a_text_or_messages(tmp_path: Path) -> None:
    found = pairs(
        tmp_path,
        {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
        {"prompt": [USER], "chosen": "4", "rejected": "5"},
        {"chosen": [USER, said("4")], "rejected": [USER, said("5")]},
    )
    assert [pair.form for pair in found] == ["plain", "chat", "chat"]
