"""The manifest of a checkpoint: every file's size and hash, by which damage is found before anything is loaded."""

import json
from pathlib import Path

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

MANIFEST = "manifest.json"


class FileEntry(BaseModel):
    """Size in bytes and xxh3 (64 bits, hexadecimal) of a file."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    size: int
    xxh3: str


class Manifest(BaseModel):
    """The files of a checkpoint, by their path in it, and the journal's segment that follows it."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    version: int
    journal: str
    files: dict[str, FileEntry]


def write_manifest(folder: Path, *, version: int, journal: str) -> None:
    """Writes the manifest of all that is in the folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): _entry(path) for path in paths}
    manifest = Manifest(version=version, journal=journal, files=files)
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")


def fault_of(folder: Path) -> str | None:
    """What is wrong with a checkpoint: the file, what was expected and what is there. None if it is whole."""
    path = folder / MANIFEST
    try:
        manifest = Manifest.model_validate(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return f"{path} is missing"
    except (ValueError, ValidationError) as error:
        return f"{path} cannot be read: {str(error).splitlines()[0]}"
    for name, expected in manifest.files.items():
        fault = _fault_of_file(folder / name, expected)
        if fault is not None:
            return fault
    return None


def _fault_of_file(path: Path, expected: FileEntry) -> str | None:
    if not path.is_file():
        return f"{path} is missing: expected {expected.size} bytes"
    size = path.stat().st_size
    if size != expected.size:
        return f"{path} has {size} bytes, expected {expected.size}"
    got = _entry(path).xxh3
    return None if got == expected.xxh3 else f"{path} has the hash {got}, expected {expected.xxh3}"


def _entry(path: Path) -> FileEntry:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
        return FileEntry(size=file.tell(), xxh3=digest.hexdigest())
