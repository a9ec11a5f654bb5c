"""Records of every format: the same rows, lazily, with faults that name file and row."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from learner.data.sources import RecordError, read_parsed, read_records

Row = dict[str, object]

ROWS: list[Row] = [
    {"prompt": "a", "turns": [{"role": "user", "content": "x"}], "margin": 0.5},
    {"prompt": "b", "turns": [], "margin": None},
    {"prompt": "ü", "turns": [{"role": "user", "content": "y"}], "margin": 2.0},
]


def write_json_lines(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: list[Row]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    return path


def write_stream(path: Path, rows: list[Row]) -> Path:
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


def write_arrow_file(path: Path, rows: list[Row]) -> Path:
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


def write_saved(folder: Path, *parts: list[Row]) -> Path:
    """As `Dataset.save_to_disk` writes it."""
    folder.mkdir(parents=True)
    names = [f"data-{index:05}-of-{len(parts):05}.arrow" for index in range(len(parts))]
    for name, rows in zip(names, parts, strict=True):
        write_stream(folder / name, rows)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0f", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def write_splits(folder: Path, **splits: list[Row]) -> Path:
    """As `DatasetDict.save_to_disk` writes it."""
    for name, rows in splits.items():
        write_saved(folder / name, rows)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return folder


def values(path: Path) -> list[object]:
    return [record.value for record in read_records(path)]


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("rows.jsonl", write_json_lines),
        ("rows.json", write_json_lines),
        ("rows", write_json_lines),
        ("rows.parquet", write_parquet),
        ("rows.bin", write_parquet),
        ("rows.arrow", write_stream),
        ("stream", write_stream),
        ("rows.arrow", write_arrow_file),
        ("file", write_arrow_file),
        ("folder", write_saved),
    ],
)
def test_every_format_gives_the_same_records_by_its_ending_or_its_content(
    tmp_path: Path, name: str, write: Callable[[Path, list[Row]], Path]
) -> None:
    assert values(write(tmp_path / name, ROWS)) == ROWS


@pytest.mark.parametrize(
    ("name", "write", "place"),
    [
        ("rows.jsonl", write_json_lines, "rows.jsonl, line 3"),
        ("rows.parquet", write_parquet, "rows.parquet, row 3"),
        ("rows.arrow", write_arrow_file, "rows.arrow, row 3"),
        ("folder", write_saved, "folder/data-00000-of-00001.arrow, row 3"),
    ],
)
def test_a_record_that_does_not_fit_is_named_by_file_and_row(
    tmp_path: Path, name: str, write: Callable[[Path, list[Row]], Path], place: str
) -> None:
    def parse(value: object) -> str:
        match value:
            case {"prompt": "ü"}:
                raise ValueError("not this one")
        return "fine"

    rows = read_parsed(write(tmp_path / name, ROWS), parse)
    assert [next(rows), next(rows)] == ["fine", "fine"]
    with pytest.raises(RecordError) as caught:
        next(rows)
    assert str(caught.value) == f"{tmp_path / place}: not this one"


def test_rows_are_counted_over_many_batches(tmp_path: Path) -> None:
    rows: list[Row] = [{"number": number} for number in range(1000)]
    for file in (write_parquet(tmp_path / "rows.parquet", rows), write_stream(tmp_path / "rows.arrow", rows)):
        records = list(read_records(file))
        assert [record.value for record in records] == rows
        assert records[-1].place == f"{file}, row 1000"


def test_json_lines_are_read_as_they_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{broken\n')
    records = read_records(path)
    assert next(records).value == {"a": 1}
    with pytest.raises(RecordError, match=r"rows\.jsonl, line 2: Expecting property name"):
        next(records)


def test_a_saved_dataset_of_several_files_is_read_in_their_order(tmp_path: Path) -> None:
    folder = write_saved(tmp_path / "saved", ROWS[:1], ROWS[1:])
    assert values(folder) == ROWS
    assert [record.place for record in read_records(folder)][-1] == f"{folder / 'data-00001-of-00002.arrow'}, row 2"


def test_of_several_splits_one_must_be_chosen(tmp_path: Path) -> None:
    folder = write_splits(tmp_path / "pairs", train=ROWS[:2], test=ROWS[2:])
    assert values(tmp_path / "pairs#train") == ROWS[:2]
    assert values(tmp_path / "pairs#test") == ROWS[2:]
    with pytest.raises(RecordError, match=r"has the splits train, test: choose one, as in .*pairs#train"):
        values(folder)
    with pytest.raises(RecordError, match=r"has no split 'dev'; it has train, test"):
        values(tmp_path / "pairs#dev")


def test_the_only_split_need_not_be_named(tmp_path: Path) -> None:
    assert values(write_splits(tmp_path / "pairs", train=ROWS)) == ROWS


def test_a_file_whose_name_has_the_mark_of_a_split_is_that_file(tmp_path: Path) -> None:
    assert values(write_json_lines(tmp_path / "run#1.jsonl", ROWS)) == ROWS


def test_a_split_of_what_has_none_is_refused(tmp_path: Path) -> None:
    write_saved(tmp_path / "saved", ROWS)
    write_json_lines(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(RecordError, match="no split 'train'; leave out #train"):
        values(tmp_path / "saved#train")
    with pytest.raises(RecordError, match="no split 'train'; leave out #train"):
        values(tmp_path / "rows.jsonl#train")


def test_a_folder_or_file_of_another_kind_is_named_with_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"neither state\.json nor dataset_dict\.json"):
        values(tmp_path)
    (tmp_path / "image").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(RecordError, match=r"image begins with b'\\x89PNG.*expected JSON lines"):
        values(tmp_path / "image")
    with pytest.raises(FileNotFoundError, match=r"absent\.parquet does not exist: expected"):
        values(tmp_path / "absent.parquet")


def test_damaged_files_are_named(tmp_path: Path) -> None:
    for write, name in ((write_parquet, "rows.parquet"), (write_arrow_file, "rows.arrow")):
        path = write(tmp_path / name, ROWS)
        path.write_bytes(path.read_bytes()[:40])
        with pytest.raises(RecordError, match=rf"{name} cannot be read as"):
            values(path)


def test_a_saved_dataset_that_is_not_whole_is_named(tmp_path: Path) -> None:
    folder = write_saved(tmp_path / "saved", ROWS[:1], ROWS[1:])
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(RecordError, match=r"data-00001-of-00002\.arrow, which is not a file in the folder"):
        values(folder)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "../secret.arrow"}]}')
    write_stream(tmp_path / "secret.arrow", ROWS)
    with pytest.raises(RecordError, match="not a file in the folder"):
        values(folder)
    (folder / "state.json").write_text('{"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]}')
    with pytest.raises(RecordError, match="flatten_indices"):
        values(folder)
    (folder / "state.json").write_text("[")
    with pytest.raises(RecordError, match=r"state\.json cannot be read"):
        values(folder)
