"""Records of a log on disk: appended one after the other, checked when they are read, a torn last one left out.

A record is `length u32, type u8, xxh3 u64 of the payload, xxh32 of these three, payload`, little-endian. The header has
a checksum of its own so that a damaged length is not mistaken for a torn tail, the mark of a crash in a write, which
would cut off all that follows.
"""

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import xxhash

from protocol.codec import Frame

_FACTS = struct.Struct("<IBQ")
_CHECK = struct.Struct("<I")
_HEADER_BYTES = _FACTS.size + _CHECK.size


class JournalDamaged(RuntimeError):
    """The journal cannot be read from a byte of a file on: what stands there is not what was written."""

    def __init__(self, path: Path, at: int, *, what: str) -> None:
        super().__init__(f"{path}: at byte {at} {what}")
        self.path = path
        self.at = at


def framed(kind: int, payload: bytes) -> bytes:
    """A record as one piece."""
    return b"".join(record(kind, [payload]))


def record(kind: int, payload: Sequence[Frame]) -> list[Frame]:
    """A record whose payload is in parts, of which none is copied."""
    digest = xxhash.xxh3_64()
    for part in payload:
        digest.update(part)
    facts = _FACTS.pack(sum(map(len, payload)), kind, digest.intdigest())
    return [facts + _CHECK.pack(xxhash.xxh32_intdigest(facts)), *payload]


def scan(path: Path, *, at: int = 0, size: int | None = None) -> Iterator[tuple[int, bytes, int, int]]:
    """Type, payload, first byte and the byte after, of each record from the byte `at` on; a torn tail is left out.

    Looks at the first `size` bytes alone, if given. Raises JournalDamaged when a record that others follow fails its
    checksum.
    """
    size = path.stat().st_size if size is None else size
    with path.open("rb") as file:
        start = file.seek(at)
        while size - start >= _HEADER_BYTES:
            facts, check = file.read(_FACTS.size), file.read(_CHECK.size)
            length, kind, checksum = _FACTS.unpack(facts)
            end = start + _HEADER_BYTES + length
            if _CHECK.unpack(check)[0] != xxhash.xxh32_intdigest(facts):
                if not any(facts + check) and _only_zeros(file):
                    return  # the file had grown on the disk, the record's bytes had not arrived
                raise _mismatch(path, start)
            if end > size:
                return
            payload = file.read(length)
            if xxhash.xxh3_64_intdigest(payload) != checksum:
                if end == size:
                    return
                raise _mismatch(path, start)
            yield kind, payload, start, end
            start = end


def _only_zeros(file: BinaryIO) -> bool:
    while chunk := file.read(1 << 20):
        if any(chunk):
            return False
    return True


def _mismatch(path: Path, start: int) -> JournalDamaged:
    return JournalDamaged(path, start, what="a record does not match its checksum, and it is not a torn last one")
