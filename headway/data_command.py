"""The command `headway data`: published data sets as task files."""

import importlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from headway.own_options import own_options
from services.config.sources import ConfigError

# Found by name, so that this package imports none of the processes.
_CONVERTERS = "reward_service.code.published_rows"

_OPTIONS = {"--reference": False, "--extract": True, "--reward": True}
_VALUES = {"--extract": ("last", "first", "whole"), "--reward": ("all", "fraction")}


def convert_data(words: Sequence[str]) -> int:
    """Writes a task for each row of a file. Raises ConfigError for wrong arguments, and all rows that are unknown."""
    own, paths = own_options(words, _OPTIONS)
    unknown = [path for path in paths if path.startswith("-") and path != "-"]
    if unknown or not 1 <= len(paths) <= 2:
        usage = "headway data convert ROWS.jsonl [TASKS.jsonl] [--reference] [--extract HOW] [--reward HOW]"
        raise ConfigError([f"{' '.join(unknown) or 'a wrong number of files'}: expected {usage}"])
    for name, values in _VALUES.items():
        if (given := own.get(name, [values[0]])[-1]) not in values:
            raise ConfigError([f"command line: {name}: got {given!r}, expected one of {', '.join(values)}"])
    rows = importlib.import_module(_CONVERTERS)
    choices = rows.Choices(
        reference="--reference" in own,
        **{name.removeprefix("--"): own[name][-1] for name in _VALUES if name in own},
    )
    lines: list[str] = []
    problems: list[str] = []
    for place, row in _rows(Path(paths[0])):
        try:
            lines.append(json.dumps(rows.task_of(row, choices), ensure_ascii=False) + "\n")
        except rows.UnknownRow as error:
            problems.append(f"{place}: {error}")
    if problems:
        raise ConfigError(problems)
    _write(lines, Path(paths[1]) if len(paths) == 2 and paths[1] != "-" else None)
    return 0


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a JSONL or Parquet file with their places."""
    try:
        if path.suffix == ".parquet":
            yield from _parquet_rows(path)
            return
        with path.open(encoding="utf-8") as text:
            yield from _json_rows(path, text)
    except (OSError, UnicodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from error


def _json_rows(path: Path, text: TextIO) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(text, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError([f"{path}, line {number}: no JSON: {error}"]) from error
        if not isinstance(row, dict):
            raise ConfigError([f"{path}, line {number}: got {type(row).__name__}, expected an object"])
        yield f"{path}, line {number}", row


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError([f"{path}: to read Parquet, pip install pyarrow; or give it as JSONL"]) from error
    number = 0
    for batch in parquet.ParquetFile(path).iter_batches():
        for row in batch.to_pylist():
            number += 1
            yield f"{path}, row {number}", row


def _write(lines: Sequence[str], path: Path | None) -> None:
    if path is None:
        sys.stdout.writelines(lines)
        return
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        aside.write_text("".join(lines), encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        raise ConfigError([f"cannot write {path}: {error.strerror}"]) from error
    sys.stderr.write(f"{len(lines)} tasks in {path}\n")
