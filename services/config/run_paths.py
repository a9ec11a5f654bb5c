"""The folder of a run.toml: the paths in it count from there, and code in that folder can be imported.

    "tasks.jsonl" in sums/run.toml      sums/tasks.jsonl
    the same, if that is not there      tasks.jsonl of the current folder, if it is there
    "runs", to be written               sums/runs, whatever the current folder has; also if it is left out
    "Qwen/Qwen2.5-0.5B-Instruct"        neither a folder: the snapshot of that name in the hub's cache, if it is there

Paths of the environment and the command line count from the current folder. Nothing here asks the network: `headway
fetch` brings a model or a data set into the cache, whose folder HF_HUB_CACHE or HF_HOME names.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MAX_NAME = 100
HubKind = Literal["model", "dataset"]
_OURS = str(Path(__file__).resolve().parents[2])
"""Folder of the packages of this project."""


@dataclass(frozen=True)
class CountsFrom:
    """Marks a table whose paths nobody knows who reads it; the `key` beside it holds the folder that they count from,
    which is that of the run.toml if it is not set.
    """

    key: str


@dataclass(frozen=True)
class WrittenPath:
    """Marks a path that the process makes: it is where the run.toml says, and nobody else's of that name."""


def import_code_beside(path: Path) -> None:
    """Lets this process, and those that it starts, import modules from the folder of a run.toml, after all others."""
    import_code_from(path.resolve().parent)


def import_code_from(folder: Path) -> None:
    """Lets this process, and those that it starts, import modules from a folder, after all others.

    After ours, too: those of an editable install are in no folder of `sys.path`, and would be looked for last.
    """
    for each in (_OURS, str(folder.resolve())):
        if each not in sys.path:
            sys.path.append(each)


def run_name(folder: Path) -> str:
    """The name of a run that is called as a folder; empty if that has no letter or digit."""
    name = "".join(
        each if each.isascii() and (each.isalnum() or each in "._-") else "-" for each in folder.resolve().name
    )
    return name.lstrip("._-")[:_MAX_NAME]


def is_written(info: FieldInfo) -> bool:
    """True if the process makes what the field names."""
    return any(isinstance(mark, WrittenPath) for mark in info.metadata)


def placed(value: object, annotation: object, *, written: bool = False, beside: Path | None) -> object:
    """The value of a setting of a type, with each path in it as the process finds it, or will make it if `written`.

    `beside` is the folder of the file that the setting is from; None if it is from elsewhere.
    """
    if written and isinstance(value, str):
        return _beside(value, beside)
    if isinstance(value, str):
        return _placed_path(value, beside) if Path in parts_of(annotation) else value
    if isinstance(value, list):
        return [placed(each, item_of(annotation), beside=beside) for each in value]
    if isinstance(value, dict):
        kinds = list(models_of(annotation))
        folders = {} if beside is None else {key: str(beside) for key in _counted_from(value, kinds)}
        return folders | {key: _placed_field(key, each, kinds, beside) for key, each in value.items()}
    return value


def _counted_from(value: Mapping[str, object], models: list[type[BaseModel]]) -> Iterator[str]:
    infos = [model.model_fields[key] for key in value for model in models if key in model.model_fields]
    yield from (mark.key for info in infos for mark in info.metadata if isinstance(mark, CountsFrom))


def _placed_field(key: str, value: object, models: list[type[BaseModel]], beside: Path | None) -> object:
    """As the first of the models has it, one of which the table is."""
    infos = [model.model_fields[key] for model in models if key in model.model_fields]
    if not infos:
        return value
    return placed(value, infos[0].annotation, written=is_written(infos[0]), beside=beside)


def _beside(text: str, beside: Path | None) -> str:
    path = Path(text).expanduser()
    if path.is_absolute():
        return str(path)
    return os.path.normpath((beside or Path()) / path) if text else text


def _placed_path(text: str, beside: Path | None) -> str:
    there = _beside(text, beside)
    if Path(text).expanduser().is_absolute() or _exists(there):
        return there
    if _exists(text):
        return text if beside is None else os.path.abspath(text)
    name, mark, split = text.partition("#")
    for kind in ("model", "dataset"):
        if (folder := in_hub_cache(name, kind)) is not None:
            return f"{folder}{mark}{split}"
    return there


def _exists(text: str) -> bool:
    return os.path.exists(text) or os.path.exists(text.partition("#")[0])


def is_hub_name(text: str) -> bool:
    """True for ORGANISATION/NAME, which a folder may be called, too."""
    return _HUB_NAME.fullmatch(text) is not None and ".." not in text and "--" not in text


def hub_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of the hub's cache, as its own client finds it."""
    if given := environ.get("HF_HUB_CACHE"):
        return Path(given).expanduser()
    home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    return Path(home).expanduser() / "hub"


def in_hub_cache(name: str, kind: HubKind, *, revision: str = "main") -> Path | None:
    """The snapshot of a model or a data set that was fetched before; None if there is none."""
    if not is_hub_name(name):
        return None
    kept = hub_cache() / f"{kind}s--{name.replace('/', '--')}"
    try:
        commit = (kept / "refs" / revision).read_text(encoding="utf-8").strip()
    except OSError:
        commit = revision
    folder = kept / "snapshots" / commit
    return folder if folder.is_dir() else None


def parts_of(annotation: object) -> list[object]:
    """The members of a union, unions in it and what is annotated included."""
    if get_origin(annotation) is Annotated:
        return parts_of(get_args(annotation)[0])
    arguments = get_args(annotation)
    if get_origin(annotation) in (list, tuple, set, frozenset, dict) or not arguments:
        return [annotation]
    return [inner for part in arguments for inner in parts_of(part)]


def item_of(annotation: object) -> object:
    """The type of a list's items; object if the type is of no list."""
    for part in parts_of(annotation):
        if get_origin(part) in (list, tuple, set, frozenset):
            return get_args(part)[0]
    return object


def models_of(annotation: object) -> Iterator[type[BaseModel]]:
    """The tables that a setting may be."""
    yield from (part for part in parts_of(annotation) if isinstance(part, type) and issubclass(part, BaseModel))
