"""Folders of tensors that are whole or not there, and verified before they are used.

<folder>/facts.json, <name>.safetensors …    facts.json holds a checksum of each file beside it
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import JsonValue
from safetensors.numpy import load, save

from learner.journal.files import sync_tree, unused, write_atomically
from services.append_file import sync_folder

Tensors = Mapping[str, NDArray[np.generic]]
_FACTS = "facts.json"


class TensorsDamaged(RuntimeError):
    """Files of a folder are not what was written. The text names the folder."""


def write_tensor_folder(
    folder: Path, *, tensors: Mapping[str, Tensors], facts: JsonValue, files: Mapping[str, bytes] | None = None
) -> int:
    """Write the folder, or replace it, and return its bytes; it is on the disk afterwards. Raises OSError."""
    draft = unused(folder.with_name(f"{folder.name}.draft"))
    draft.mkdir(parents=True)
    contents = {f"{name}.safetensors": save(dict(each), metadata={"format": "pt"}) for name, each in tensors.items()}
    contents |= files or {}
    checksums = {name: xxhash.xxh3_128_hexdigest(content) for name, content in contents.items()}
    contents[_FACTS] = json.dumps({"checksums": checksums, "facts": facts}).encode()
    try:
        for name, content in contents.items():
            (draft / name).write_bytes(content)
        sync_tree(draft)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)  # of a full disk it would take what room there is
        raise
    former = unused(folder.with_name(f"{folder.name}.removed")) if folder.exists() else None
    if former is not None:
        folder.rename(former)
    draft.rename(folder)
    sync_folder(folder.parent)
    if former is not None:
        shutil.rmtree(former)  # not before the new one has its name on the disk: there must always be one of them
    return sum(map(len, contents.values()))


def folder_facts(folder: Path) -> JsonValue:
    """The facts that it was written with. Raises TensorsDamaged."""
    try:
        facts: JsonValue = json.loads((folder / _FACTS).read_bytes())["facts"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TensorsDamaged(f"{folder}: {_FACTS} cannot be read: {error}") from error
    return facts


def replace_facts(folder: Path, facts: JsonValue) -> None:
    """Write other facts to the folder at once, and leave its files. Raises TensorsDamaged, OSError."""
    whole = json.loads((folder / _FACTS).read_bytes())
    write_atomically(folder / _FACTS, json.dumps({**whole, "facts": facts}))


def read_tensor_file(folder: Path, name: str) -> dict[str, NDArray[np.generic]]:
    """The tensors of a file. Raises TensorsDamaged."""
    try:
        content = (folder / f"{name}.safetensors").read_bytes()
        expected = json.loads((folder / _FACTS).read_bytes())["checksums"][f"{name}.safetensors"]
    except (OSError, ValueError, KeyError) as error:
        raise TensorsDamaged(f"{folder}: {name} cannot be read: {error}") from error
    if xxhash.xxh3_128_hexdigest(content) != expected:
        raise TensorsDamaged(f"{folder}: {name} does not match its checksum; restore it from a copy")
    tensors: dict[str, NDArray[np.generic]] = load(content)
    return tensors


def folder_files(folder: Path) -> list[Path]:
    """The files but the facts, by name."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith(_FACTS))


def remove_folder(folder: Path) -> None:
    """Remove the folder with one step that a crash leaves done or not done."""
    if folder.exists():
        draft = unused(folder.with_name(f"{folder.name}.removed"))
        folder.rename(draft)
        shutil.rmtree(draft)


def remove_drafts(parent: Path) -> None:
    """Remove what a crash left of folders that were being written, and finish those that were being replaced."""
    sync_folder(parent)  # a former life may have ended before it had: a name that is gone after a power loss takes all
    for path in list(parent.glob("*.removed*")):
        whole = path.with_name(path.name.partition(".removed")[0])
        if whole.exists() or not parent.joinpath(f"{whole.name}.draft").exists():
            shutil.rmtree(path)
        else:
            path.rename(whole)  # between the two renames: the former one is the whole one
            sync_folder(parent)
    for path in list(parent.glob("*.draft*")):
        shutil.rmtree(path)
