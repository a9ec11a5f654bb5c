"""Rows of Parquet and Arrow files, a batch of them in memory at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from learner.data.errors import DataError

Rows = Iterator[tuple[str, object]]

_BATCH_ROWS = 256
_FILE_MAGIC = b"ARROW1"


def read_parquet(file: Path) -> Rows:
    """Each row as an object of its columns. Raises DataError that names the file, and the row that was reached."""
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
    """What pyarrow says about a damaged file, with its name. What the reader's user raises is not touched."""
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as {format}: {error}") from error
