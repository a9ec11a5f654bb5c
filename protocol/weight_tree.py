"""The tree of published weights: immutable files named by their content, and one that names the newest version.

    newest.json          the newest version's manifest
    objects/<sha256>     manifests, layouts, and parts: frames of `protocol.weight_deltas`

Any web server, mirror or object store can hold a copy of it, and need not be trusted: the learner tells a generator
the name of a manifest, which names the rest. A part stands for the next bytes of all buckets, one after another.
`parts` are what has changed since the base; an anchor has the weights themselves beside that, for late comers. What
results is proven by the same hashes of buckets as a broadcast is.
"""

import hashlib
from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from protocol.fleet import BucketSpec, TensorSpec
from protocol.model import VersionText, WireModel

NEWEST_FILE = "newest.json"
OBJECTS = "objects"
TREE_ROUTE = "/v1/weights/tree"
"""Below it the learner serves its own tree."""
MAX_OBJECT_BYTES = 48 << 20

ObjectName = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""The SHA-256 of an object's bytes, hexadecimal."""


class ManifestRef(WireModel):
    """A version, and the name of its manifest; what `newest.json` holds."""

    version: VersionText
    manifest: ObjectName


class LayoutBucket(WireModel):
    """A bucket without its hash, which changes with each version."""

    nbytes: int = Field(ge=1)
    tensors: tuple[TensorSpec, ...] = Field(min_length=1)


class TreeLayout(WireModel):
    """The buckets of all versions that name it."""

    buckets: tuple[LayoutBucket, ...] = Field(min_length=1)

    @property
    def nbytes(self) -> int:
        """Of all buckets together."""
        return sum(bucket.nbytes for bucket in self.buckets)

    def specs(self, hashes: tuple[str, ...]) -> tuple[BucketSpec, ...]:
        """The buckets of a version. Raises ValueError for hashes of another layout."""
        return tuple(
            BucketSpec(nbytes=bucket.nbytes, xxh3=xxh3, tensors=bucket.tensors)
            for bucket, xxh3 in zip(self.buckets, hashes, strict=True)
        )


class TreePart(WireModel):
    """An object of frames for the next `raw_bytes` of the buckets; `nbytes` is its own size."""

    name: ObjectName
    nbytes: int = Field(ge=1, le=MAX_OBJECT_BYTES)
    raw_bytes: int = Field(ge=1)


class VersionManifest(WireModel):
    """The making of a version: of its base and `parts`, or of `whole`; one of these may be missing.

    `hashes` are those of its buckets (`BucketSpec.xxh3`).
    """

    version: VersionText
    layout: ObjectName
    hashes: tuple[Annotated[str, Field(max_length=128)], ...] = Field(min_length=1)
    base: ManifestRef | None = None
    parts: tuple[TreePart, ...] = ()
    whole: tuple[TreePart, ...] = ()

    @model_validator(mode="after")
    def _can_be_made(self) -> Self:
        if self.base is None and not self.whole:
            raise ValueError(f"version {self.version} has neither a base nor the whole weights")
        return self


def parts_bytes(parts: tuple[TreePart, ...]) -> int:
    """The size of some parts as objects."""
    return sum(part.nbytes for part in parts)


def name_of(content: bytes) -> str:
    """The name of an object."""
    return hashlib.sha256(content).hexdigest()
