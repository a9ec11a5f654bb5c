"""A teacher's logprobs, beside the data or in its columns."""

import json
import math
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import safetensors.numpy

from learner.data.distillation import DistillationExample, TopLogprobs, cache_beside, read_distillation
from learner.data.distillation import write_top_logprobs as write_cache
from learner.data.sources import RecordError
from tests.learner.data.character_tokenizer import CharacterTokenizer, shown

HALF, QUARTER = math.log(0.5), math.log(0.25)
RECORD = {"prompt": "2+2=", "completion": "4"}  # trained: "4" and the end token
COLUMNS = {**RECORD, "top_ids": [[52, 53], [0, 10]], "top_logprobs": [[HALF, QUARTER], [HALF, HALF]]}


def write(tmp_path: Path, *records: object) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path: Path) -> list[DistillationExample]:
    return read_distillation(path, CharacterTokenizer())


def top(ids: list[list[int]], logprobs: list[list[float]]) -> TopLogprobs:
    return TopLogprobs(token_ids=np.array(ids, dtype=np.int32), logprobs=np.array(logprobs, dtype=np.float32))


def test_a_record_need_not_have_cached_logprobs(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    plain, chat, reply = read(write(tmp_path, RECORD, {"messages": turns}, {"prompt": turns[:1], "completion": "yo"}))
    assert (shown(plain.completion), plain.top) == (("2+2=4|", "....^^"), None)
    assert shown(chat.completion) == shown(reply.completion) == ("<u>hi|\n<a>yo|", "..........^^^")


def test_columns_give_a_row_for_each_trained_token(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([COLUMNS]), path)
    for file in (path, write(tmp_path, COLUMNS)):
        (example,) = read(file)
        assert example.top is not None
        assert example.top.token_ids.tolist() == [[52, 53], [0, 10]]
        assert np.exp(example.top.logprobs) == pytest.approx(np.array([[0.5, 0.25], [0.5, 0.5]]))


def test_a_file_beside_the_data_gives_the_rows_of_all_records_in_order(tmp_path: Path) -> None:
    path = write(tmp_path, RECORD, {"prompt": "1+1=", "completion": "2!"})
    first, second = top([[52], [0]], [[HALF], [QUARTER]]), top([[50], [33], [0]], [[QUARTER], [HALF], [HALF]])
    write_cache(cache_beside(path), [first, second])
    examples = read(path)
    for example, expected in zip(examples, (first, second), strict=True):
        assert example.top is not None
        assert example.top.token_ids.tolist() == expected.token_ids.tolist()
        assert example.top.logprobs.tolist() == expected.logprobs.tolist()


def test_rows_are_spread_over_all_tokens_with_zeros_outside_the_mask() -> None:
    spread = top([[7], [8]], [[HALF], [QUARTER]]).over(np.array([False, True, False, True]))
    assert spread.token_ids.tolist() == [[0], [7], [0], [8]]
    assert spread.logprobs[:, 0] == pytest.approx([0, HALF, 0, QUARTER])


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"top_ids": [[52, 53]], "top_logprobs": [[HALF, HALF]]}, "for 1 tokens, but 2 are trained"),
        ({"top_ids": None}, "go together"),
        ({"top_ids": [[52, 53], [0]]}, "do not fit"),
        ({"top_ids": [[52], [0]]}, r"\(2, 1\) and logprobs \(2, 2\) are not both"),
        ({"top_ids": [[52, -1], [0, 1]]}, "not a token id"),
        ({"top_ids": [[52.5, 1], [0, 1]]}, "not a token id"),
        ({"top_logprobs": [[HALF, HALF], [0.0, HALF]]}, "not logprobs"),
        ({"top_logprobs": [[HALF, float("nan")], [HALF, HALF]]}, "not logprobs"),
        ({"top_ids": None, "top_logprobs": None}, "some have none"),
        ({"top_ids": [[1], [2]], "top_logprobs": [[HALF], [HALF]]}, "1 cached tokens at each place, before 2"),
        ({"completion": None}, "expected an object with texts `prompt`"),
    ],
)
def test_a_record_that_does_not_fit_is_named(tmp_path: Path, changed: dict[str, object], complaint: str) -> None:
    with pytest.raises(RecordError, match=rf"data\.jsonl, line 2: .*{complaint}"):
        read(write(tmp_path, COLUMNS, {**COLUMNS, **changed}))


def test_a_cache_of_other_data_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, RECORD)
    rows = top([[52], [0]], [[HALF], [HALF]])
    write_cache(cache_beside(path), [rows, rows])
    with pytest.raises(RecordError, match="has 2 records, the data 1"):
        read(path)
    with pytest.raises(RecordError, match=r"line 3: .*has only 2 records"):
        read(write(tmp_path, RECORD, RECORD, RECORD))
    with pytest.raises(RecordError, match=r"line 1: .*remove one of them"):
        read(write(tmp_path, COLUMNS))
    safetensors.numpy.save_file({"x": np.zeros(1)}, cache_beside(path))
    with pytest.raises(RecordError, match=r"data\.jsonl\.top\.safetensors has the format None"):
        read(path)
    cache_beside(path).write_bytes(b"nothing")
    with pytest.raises(RecordError, match=r"data\.jsonl\.top\.safetensors cannot be read"):
        read(path)
