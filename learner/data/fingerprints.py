"""Fingerprints of files on disk, byte by byte. Loads no torch."""

from collections.abc import Iterable
from pathlib import Path

import xxhash

_CHUNK_BYTES = 1 << 24


def fingerprint_files(files: Iterable[Path]) -> str:
    """Over sizes and contents, in order: a file that is moved or renamed stays the same."""
    digest = xxhash.xxh3_128()
    for file in files:
        digest.update(f"{file.stat().st_size}\0".encode())
        with file.open("rb") as opened:
            while chunk := opened.read(_CHUNK_BYTES):
                digest.update(chunk)
    return str(digest.hexdigest())


def fingerprint_data(path: Path) -> str | None:
    """Of a file of examples, or of all files of a saved dataset, also as `folder#split`; None if there is neither."""
    at = path if path.exists() else path.with_name(path.name.partition("#")[0] or path.name)
    files = sorted(each for each in at.rglob("*") if each.is_file()) if at.is_dir() else [at]
    return fingerprint_files(files) if at.exists() else None
