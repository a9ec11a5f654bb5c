"""The manifest of a checkpoint: its files with their sizes and hashes, signed where the learner has a secret key.

xxh3 finds damage, and anybody can compute it. A learner with a secret key (`learner.leases.secret_key_file`) adds the
files' SHA-256 and an HMAC over all of it: nobody else who can write to the folder makes a checkpoint of their own.
"""

import hashlib
import hmac
import json
from pathlib import Path
from typing import Self

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from services.secret_files import read_secret

MANIFEST = "manifest.json"
_CHUNK = 1 << 22
_PURPOSE = b"headway checkpoint manifest"


class FileEntry(BaseModel):
    """Size in bytes, xxh3 (64 bits) and, in a signed manifest, SHA-256 of a file; hashes in hexadecimal."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    size: int
    xxh3: str
    sha256: str | None = None


class Manifest(BaseModel):
    """The files of a checkpoint, by their path in it, and the journal's segment that follows it.

    `signature` is the HMAC-SHA256 (hexadecimal) of everything else; None where the learner has no secret key.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    version: int
    journal: str
    files: dict[str, FileEntry]
    signature: str | None = None


class Signer:
    """Signs manifests, and knows its own signature again. `secret` is the learner's secret CURVE key."""

    @classmethod
    def read(cls, secret_key_file: Path | None) -> Self | None:
        """The signer of a key; None where there is none. Raises SecretFileError."""
        return None if secret_key_file is None else cls(read_secret(secret_key_file))

    def __init__(self, secret: str) -> None:
        self._key = hmac.digest(secret.encode("ascii"), _PURPOSE, "sha256")

    def signed(self, manifest: Manifest) -> Manifest:
        """The manifest with its signature."""
        return manifest.model_copy(update={"signature": self._signature(manifest)})

    def knows(self, manifest: Manifest) -> bool:
        """True if this key signed the manifest as it is."""
        return hmac.compare_digest(manifest.signature or "", self._signature(manifest))

    def _signature(self, manifest: Manifest) -> str:
        said = json.dumps(manifest.model_dump(exclude={"signature"}), sort_keys=True, separators=(",", ":"))
        return hmac.digest(self._key, said.encode("utf-8"), "sha256").hex()


def write_manifest(folder: Path, *, version: int, journal: str, signer: Signer | None = None) -> None:
    """Writes the manifest of all that is in the folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): _entry(path, with_sha256=signer is not None) for path in paths}
    manifest = Manifest(version=version, journal=journal, files=files)
    if signer is not None:
        manifest = signer.signed(manifest)
    text = manifest.model_dump_json(indent=2, exclude_none=True) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def manifest_fault(folder: Path, *, signer: Signer | None = None) -> str | None:
    """Tells what is wrong with a checkpoint: the file, what was expected and what is there. None if it is whole.

    With a signer, a checkpoint is whole only if the same key signed it, and if nothing lies in it that is not named.
    What the disk does not read is a fault too. Raises PermissionError, for what may only not be read is not damaged.
    """
    path = folder / MANIFEST
    try:
        manifest = Manifest.model_validate(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return f"{path} is missing"
    except (ValueError, ValidationError) as error:
        return f"{path} cannot be read: {str(error).splitlines()[0]}"
    except OSError as error:
        return _unreadable(path, error)
    if signer is not None and (fault := _foreign(folder, manifest, signer)):
        return fault
    for name, expected in manifest.files.items():
        try:
            fault = _file_fault(folder / name, expected)
        except OSError as error:
            fault = _unreadable(folder / name, error)
        if fault is not None:
            return fault
    return None


def _unreadable(path: Path, error: OSError) -> str:
    if isinstance(error, PermissionError):
        raise error
    return f"{path} cannot be read: {error.strerror or error}"


def _foreign(folder: Path, manifest: Manifest, signer: Signer) -> str | None:
    if not signer.knows(manifest):
        by = "nobody signed it" if manifest.signature is None else "it is not what this learner's key signed"
        return (
            f"{folder / MANIFEST} is not to be trusted: {by}. Expected the signature of the key in "
            "leases.secret_key_file; if keys were changed and nobody else can write to the folder, resume once with "
            "checkpoint.check_signature = false"
        )
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    if more := sorted(there - manifest.files.keys() - {MANIFEST}):
        return f"{folder / more[0]} is not in its manifest: expected the files that the learner wrote, and no other"
    return None


def _file_fault(path: Path, expected: FileEntry) -> str | None:
    if not path.is_file():
        return f"{path} is missing: expected {expected.size} bytes"
    size = path.stat().st_size
    if size != expected.size:
        return f"{path} has {size} bytes, expected {expected.size}"
    got = _entry(path, with_sha256=expected.sha256 is not None)
    if got.xxh3 != expected.xxh3:
        return f"{path} has the hash {got.xxh3}, expected {expected.xxh3}"
    return None if got == expected else f"{path} has the SHA-256 {got.sha256}, expected {expected.sha256}"


def _entry(path: Path, *, with_sha256: bool) -> FileEntry:
    quick, slow = xxhash.xxh3_64(), hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            quick.update(chunk)
            if with_sha256:
                slow.update(chunk)
        sha256 = slow.hexdigest() if with_sha256 else None
        return FileEntry(size=file.tell(), xxh3=quick.hexdigest(), sha256=sha256)
