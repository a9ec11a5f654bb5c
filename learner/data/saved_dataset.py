"""Hugging Face datasets saved on disk: which Arrow files a folder consists of. The `datasets` package is not needed."""

import json
from pathlib import Path

from learner.data.errors import DataError

_STATE = "state.json"
_SPLITS = "dataset_dict.json"


def files_of_saved(folder: Path, *, split: str | None) -> list[Path]:
    """The Arrow files of a folder that `save_to_disk` wrote, in order. Raises DataError."""
    if (folder / _SPLITS).exists():
        return _files_of_split(_one_split(folder, split=split))
    if split is not None:
        raise DataError(f"{folder} holds no {_SPLITS}, so it has no split {split!r}; leave out #{split}")
    if not (folder / _STATE).exists():
        raise DataError(
            f"{folder} is a folder with neither {_STATE} nor {_SPLITS}: expected a dataset saved with save_to_disk; "
            "name a file in it instead"
        )
    return _files_of_split(folder)


def _one_split(folder: Path, *, split: str | None) -> Path:
    names = _texts(folder / _SPLITS, _read(folder / _SPLITS).get("splits"))
    offered = ", ".join(names)
    if split is None and len(names) != 1:
        raise DataError(f"{folder} has the splits {offered}: choose one, as in {folder}#{next(iter(names), 'train')}")
    if split is not None and split not in names:
        raise DataError(f"{folder} has no split {split!r}; it has {offered}")
    return folder / (split or names[0])


def _files_of_split(folder: Path) -> list[Path]:
    state = folder / _STATE
    values = _read(state)
    if values.get("_indices_data_files"):
        raise DataError(f"{state}: rows are picked by an index file; call flatten_indices() and save the dataset again")
    entries = values.get("_data_files")
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in _list(state, entries)]
    files = [folder / name for name in _texts(state, names)]
    for file in files:
        if not file.resolve().is_relative_to(folder.resolve()) or not file.is_file():
            raise DataError(f"{state} names {file}, which is not a file in the folder; is the copy complete?")
    return files


def _read(file: Path) -> dict[str, object]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise DataError(f"{file} holds {type(values).__name__}, expected an object")
    return values


def _list(file: Path, value: object) -> list[object]:
    if not isinstance(value, list):
        raise DataError(f"{file} names no files: expected a list `_data_files`, as save_to_disk writes it")
    return value


def _texts(file: Path, value: object) -> list[str]:
    match value:
        case [*names] if all(isinstance(name, str) for name in names):
            return [str(name) for name in names]
        case _:
            raise DataError(f"{file} holds {value!r}, expected a list of names")
