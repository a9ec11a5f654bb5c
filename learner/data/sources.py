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
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from learner.data.columnar import read_arrow, read_parquet
from learner.data.errors import DataError
from learner.data.saved_dataset import files_of_saved

Parsed = TypeVar("Parsed")
Rows = Iterator[tuple[str, object]]

_EXPECTED = "expected JSON lines (.jsonl), Parquet (.parquet), Arrow (.arrow) or a dataset saved with save_to_disk"


@dataclass(frozen=True, kw_only=True)
class Record:
    """What stands in one line or row, not yet checked, and where that is: `FILE, line 3` or `FILE, row 3`."""

    value: object
    place: str


def read_records(path: Path) -> Iterator[Record]:
    """The records of a path, read as they are asked for; places count from 1.

    Raises FileNotFoundError for a path that does not exist, DataError that names file and line or row.
    """
    file, split = _split_off(path)
    if not file.exists():
        raise FileNotFoundError(f"{file} does not exist: {_EXPECTED}")
    if file.is_dir():
        for part in files_of_saved(file, split=split):
            yield from _records(part, read_arrow)
        return
    if split is not None:
        raise DataError(f"{path}: {file} is one file, and has no split {split!r}; leave out #{split}")
    yield from _records(file, _reader_of(file))


def read_parsed(path: Path, parse: Callable[[object], Parsed]) -> Iterator[Parsed]:
    """`parse` of every record. A ValueError that it raises becomes a DataError that names the place."""
    for record in read_records(path):
        try:
            parsed = parse(record.value)
        except ValueError as error:
            raise DataError(f"{record.place}: {error}") from error
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
    if beginning.lstrip()[:1] in (b"{", b""):
        return read_json_lines
    raise DataError(f"{file} begins with {beginning!r}: {_EXPECTED}")


def read_json_lines(file: Path) -> Rows:
    """One value a line; empty lines are left out."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    value = json.loads(line)
                except ValueError as error:
                    raise DataError(f"{file}, line {number}: {error}") from error
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
