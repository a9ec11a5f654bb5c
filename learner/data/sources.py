"""Records from files, one at a time: JSON lines, Parquet, and Hugging Face datasets saved on disk.

The format is told by the path's ending, or else by how the file begins:

    *.jsonl, *.ndjson, *.json          one JSON object a line
    *.parquet                          Parquet
    *.arrow                            an Arrow file or stream
    a folder with state.json           what `Dataset.save_to_disk` writes
    a folder with dataset_dict.json    what `DatasetDict.save_to_disk` writes: needs `#split`, as in `data/pairs#train`,
                                       unless there is only one
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from services.process import WrongSettings

_BATCH_ROWS = 256
_FILE_MAGIC = b"ARROW1"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # which `json` skips
_STATE = "state.json"
_SPLITS = "dataset_dict.json"
_ONE_A_LINE = "expected one JSON object a line, in UTF-8, with nothing around them (`jq -c '.[]'` makes that of a list)"
_EXPECTED = "expected JSON lines (.jsonl), Parquet (.parquet), Arrow (.arrow) or a dataset saved with save_to_disk"


class RecordError(WrongSettings, ValueError):
    """A record of a data file does not fit; the text names the file and the line or row."""


Rows = Iterator[tuple[str, object]]


def read_parquet(file: Path) -> Rows:
    """Each row as an object of its columns. Raises RecordError that names the file, and the row that was reached."""
    reached = 0
    with _faults_of(file, "Parquet"), pyarrow.parquet.ParquetFile(file) as opened:
        for batch in opened.iter_batches(batch_size=_BATCH_ROWS):
            for row in _rows(batch, before=reached):
                reached += 1
                yield row


def read_arrow(file: Path) -> Rows:
    """The same of an Arrow file, or of a stream, which `save_to_disk` writes."""
    reached = 0
    with _faults_of(file, "Arrow"), pyarrow.memory_map(str(file)) as source:
        for batch in _record_batches(source):
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                for row in _rows(batch.slice(start, _BATCH_ROWS), before=reached):
                    reached += 1
                    yield row


def _record_batches(source: pyarrow.NativeFile) -> Iterator[pyarrow.RecordBatch]:
    beginning = source.read(len(_FILE_MAGIC))
    source.seek(0)
    if beginning == _FILE_MAGIC:
        reader = pyarrow.ipc.open_file(source)
        yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
    else:
        yield from pyarrow.ipc.open_stream(source)


def _rows(batch: pyarrow.RecordBatch, *, before: int) -> Rows:
    for number, row in enumerate(batch.to_pylist(), start=before + 1):
        yield f"row {number}", row


@contextmanager
def _faults_of(file: Path, format: str) -> Iterator[None]:
    """Names the file of which pyarrow says that it is damaged. What the reader's user raises is not touched."""
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise RecordError(f"{file} cannot be read as {format}: {error}") from error


def files_of_saved(folder: Path, *, split: str | None) -> list[Path]:
    """The Arrow files of a folder that `save_to_disk` wrote, in order. Raises RecordError."""
    if (folder / _SPLITS).exists():
        return _files_of_split(_one_split(folder, split=split))
    if split is not None:
        raise RecordError(f"{folder} holds no {_SPLITS}, so it has no split {split!r}; leave out #{split}")
    if not (folder / _STATE).exists():
        raise RecordError(
            f"{folder} is a folder with neither {_STATE} nor {_SPLITS}: expected a dataset saved with save_to_disk; "
            "name a file in it instead"
        )
    return _files_of_split(folder)


def _one_split(folder: Path, *, split: str | None) -> Path:
    names = _texts(folder / _SPLITS, _read(folder / _SPLITS).get("splits"))
    offered = ", ".join(names)
    if split is None and len(names) != 1:
        raise RecordError(f"{folder} has the splits {offered}: choose one, as in {folder}#{next(iter(names), 'train')}")
    if split is not None and split not in names:
        raise RecordError(f"{folder} has no split {split!r}; it has {offered}")
    return folder / (split or names[0])


def _files_of_split(folder: Path) -> list[Path]:
    state = folder / _STATE
    values = _read(state)
    if values.get("_indices_data_files"):
        raise RecordError(
            f"{state}: rows are picked by an index file; call flatten_indices() and save the dataset again"
        )
    entries = values.get("_data_files")
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in _list(state, entries)]
    files = [folder / name for name in _texts(state, names)]
    for file in files:
        if not file.resolve().is_relative_to(folder.resolve()) or not file.is_file():
            raise RecordError(f"{state} names {file}, which is not a file in the folder; is the copy complete?")
    return files


def _read(file: Path) -> dict[str, object]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"{file} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise RecordError(f"{file} holds {type(values).__name__}, expected an object")
    return values


def _list(file: Path, value: object) -> list[object]:
    if not isinstance(value, list):
        raise RecordError(f"{file} names no files: expected a list `_data_files`, as save_to_disk writes it")
    return value


def _texts(file: Path, value: object) -> list[str]:
    match value:
        case [*names] if all(isinstance(name, str) for name in names):
            return [str(name) for name in names]
        case _:
            raise RecordError(f"{file} holds {value!r}, expected a list of names")


Parsed = TypeVar("Parsed")


@dataclass(frozen=True, kw_only=True)
class Record:
    """The content of a line or row, not yet checked, and where that is: `FILE, line 3` or `FILE, row 3`."""

    value: object
    place: str


def read_records(path: Path) -> Iterator[Record]:
    """The records of a path, read as they are asked for; places count from 1.

    Raises FileNotFoundError for a path that does not exist, RecordError that names file and line or row.
    """
    file, split = _split_off(path)
    if not file.exists():
        raise FileNotFoundError(f"{file} does not exist: {_EXPECTED}")
    if file.is_dir():
        for part in files_of_saved(file, split=split):
            yield from _records(part, read_arrow)
        return
    if split is not None:
        raise RecordError(f"{path}: {file} is one file, and has no split {split!r}; leave out #{split}")
    yield from _records(file, _reader_of(file))


def read_parsed(path: Path, parse: Callable[[object], Parsed]) -> Iterator[Parsed]:
    """`parse` of every record. A ValueError that it raises becomes a RecordError that names the place."""
    for record in read_records(path):
        try:
            parsed = parse(record.value)
        except ValueError as error:
            raise RecordError(f"{record.place}: {error}") from error
        yield parsed


def _split_off(path: Path) -> tuple[Path, str | None]:
    """`folder#split` as folder and split; a path that exists as it stands has none."""
    name, mark, split = path.name.rpartition("#")
    if not mark or not name or path.exists():
        return path, None
    return path.with_name(name), split


def _records(file: Path, read: Callable[[Path], Rows]) -> Iterator[Record]:
    for place, value in read(file):
        yield Record(value=value, place=f"{file}, {place}")


def _reader_of(file: Path) -> Callable[[Path], Rows]:
    by_ending = _READERS.get(file.suffix.lower())
    if by_ending is not None:
        return by_ending
    with file.open("rb") as opened:
        beginning = opened.read(8)
    for magic, reader in _MAGIC.items():
        if beginning.startswith(magic):
            return reader
    if beginning.removeprefix(_BYTE_ORDER_MARK).lstrip()[:1] in (b"{", b""):
        return read_json_lines
    raise RecordError(f"{file} begins with {beginning!r}: {_EXPECTED}")


def read_json_lines(file: Path) -> Rows:
    """Reads one value a line; empty lines are left out."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    value = json.loads(line)
                except ValueError as error:
                    raise RecordError(f"{file}, line {number}: {error}: {_ONE_A_LINE}") from error
                if isinstance(value, list):
                    raise RecordError(f"{file}, line {number}: this is a list: {_ONE_A_LINE}")
                yield f"line {number}", value


_READERS: Mapping[str, Callable[[Path], Rows]] = {
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".json": read_json_lines,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}
_MAGIC: Mapping[bytes, Callable[[Path], Rows]] = {
    b"PAR1": read_parquet,
    b"ARROW1": read_arrow,
    b"\xff\xff\xff\xff": read_arrow,
}
