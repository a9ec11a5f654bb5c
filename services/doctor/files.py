"""Checks of files before a start: model folders and keys."""

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from services.doctor.findings import Finding, bad, doubtful, good

_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model.safetensors"


def check_model(what: str, folder: Path) -> Finding:
    """Whether a Hugging Face model directory has its configuration, its tokenizer and all of its weights."""
    if not folder.is_dir():
        return bad(what, f"{folder} is not a folder", "expected a Hugging Face model directory: correct the path")
    missing = list(_missing(folder))
    if missing:
        return bad(what, f"{folder} lacks {', '.join(missing)}", "copy or download the model again")
    return good(what, f"{folder}, {model_bytes(folder) >> 20} MiB of weights")


def model_bytes(folder: Path) -> int:
    """The size of a model's weights on disk, in bytes; 0 if there are none."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def check_key(what: str, path: Path) -> Finding:
    """Whether a file of keys, or each in a folder of them, can be read by us and by nobody else."""
    if not path.exists():
        return bad(what, f"{path} does not exist", "headway keys makes it; copy it from where it was made")
    unreadable = [file for file in _files(path) if not os.access(file, os.R_OK)]
    if unreadable or not os.access(path, os.R_OK):
        return bad(what, f"{(unreadable or [path])[0]} cannot be read", "chown it to the user that runs Headway")
    open_to_all = [file for file in _files(path) if "secret" in file.name and file.stat().st_mode & stat.S_IROTH]
    if open_to_all:
        return doubtful(what, f"{open_to_all[0]} can be read by everybody", f"chmod 600 {open_to_all[0]}")
    return good(what, f"{path} can be read")


def _files(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() and os.access(path, os.R_OK | os.X_OK) else [path]


def _missing(folder: Path) -> Iterator[str]:
    if not (folder / "config.json").is_file():
        yield "config.json"
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        yield "tokenizer.json"
    if (folder / _INDEX).is_file():
        yield from _missing_shards(folder)
    elif not any(folder.glob("*.safetensors")):
        yield _WEIGHTS


def _missing_shards(folder: Path) -> Iterator[str]:
    try:
        shards = set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError):
        yield f"a readable {_INDEX}"
        return
    yield from sorted(shard for shard in shards if not (folder / shard).is_file())
