"""Published weights in host memory, packed: what is broadcast, and what a generator that catches up downloads."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import xxhash

from learner.weights.plane import Bucket, NamedTensors
from protocol.fleet import PullPlan
from protocol.versions import PolicyVersion

CHUNK_BYTES = 4 << 20


class NotOnTheShelf(LookupError):
    """What was asked for is not kept, or lies outside of its bucket. The text says what there is."""


@dataclass(frozen=True, eq=False)
class Packed:
    """One version, ready to be sent, and the proof of it. `digest` is that of `digest_of`."""

    version: PolicyVersion
    buckets: Sequence[Bucket]
    digest: str
    probe_token_ids: tuple[int, ...]
    probe_logprobs: tuple[float, ...]


def digest_of(tensors: NamedTensors) -> str:
    """XXH3 over the values at half precision, hexadecimal.

    Versions of different digests have to be different in an engine of whatever type; a change that is finer may be lost
    there in rounding.
    """
    digest = xxhash.xxh3_64()
    for name, tensor in tensors:
        value = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        digest.update(name.encode())
        digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return str(digest.hexdigest())


class Shelf:
    """Keeps the newest version, and older ones for as long as somebody still downloads them."""

    def __init__(self) -> None:
        self._kept: dict[str, Packed] = {}
        self._pulled: Counter[str] = Counter()
        self.newest: Packed | None = None

    def put(self, packed: Packed) -> None:
        """This is the newest version from now on."""
        self.newest = packed
        self._kept[str(packed.version)] = packed
        self._clear()

    @contextmanager
    def lent(self, packed: Packed) -> Iterator[None]:
        """Keeps a version while the body runs."""
        version = str(packed.version)
        self._pulled[version] += 1
        try:
            yield
        finally:
            self._pulled[version] -= 1
            self._clear()

    def plan(self, version: str) -> PullPlan:
        """What a download consists of. Raises NotOnTheShelf."""
        packed = self._find(version)
        specs = tuple(bucket.spec for bucket in packed.buckets)
        return PullPlan(version=version, chunk_bytes=CHUNK_BYTES, buckets=specs)

    def chunk(self, version: str, *, index: int, offset: int, length: int) -> bytes:
        """A part of a bucket. Raises NotOnTheShelf."""
        buckets = self._find(version).buckets
        if not 0 <= index < len(buckets):
            raise NotOnTheShelf(f"version {version} has no bucket {index}; it has {len(buckets)}")
        size = buckets[index].spec.nbytes
        if not (0 <= offset < size and 0 < length <= CHUNK_BYTES and offset + length <= size):
            raise NotOnTheShelf(
                f"bucket {index} of version {version} has no {length} bytes at {offset}: it has {size}, and at most "
                f"{CHUNK_BYTES} are served at once"
            )
        return buckets[index].data[offset : offset + length].numpy().tobytes()

    def _find(self, version: str) -> Packed:
        packed = self._kept.get(version)
        if packed is None:
            kept = ", ".join(self._kept) or "none yet"
            raise NotOnTheShelf(f"version {version} is not kept here any more, or not yet; kept: {kept}")
        return packed

    def _clear(self) -> None:
        self._kept = {
            version: packed
            for version, packed in self._kept.items()
            if packed is self.newest or self._pulled[version] > 0
        }
