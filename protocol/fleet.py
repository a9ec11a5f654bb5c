"""HTTP bodies by which a generator joins the learner's fleet and takes new weights."""

from typing import Literal

from pydantic import Field

from protocol.model import WireModel
from protocol.versions import VersionText

Digest = str
Backend = Literal["gloo", "nccl"]


class Fingerprints(WireModel):
    """What two processes must agree on before tokens pass between them (see `protocol.fingerprints`)."""

    model: Digest = Field(max_length=128)
    tokenizer: Digest = Field(max_length=128)
    chat_template: Digest = Field(max_length=128)


class Announcement(WireModel):
    """`POST /v1/generators` at the learner, repeated every few seconds: I am here, this is what I am.

    A generator that falls silent leaves the fleet. One whose fingerprints differ is refused with status 409.
    """

    generator_id: str = Field(min_length=1, max_length=256)
    url: str = Field(min_length=1, max_length=2048)
    protocol_version: int
    fingerprints: Fingerprints
    world_size: int = Field(default=1, ge=1)
    backend: Backend
    max_model_len: int = Field(ge=1)
    serving_version: VersionText | None


class AnnouncementAnswer(WireModel):
    """The learner's answer: its incarnation, and how often to announce."""

    incarnation: int = Field(ge=1)
    announce_every_s: float = Field(gt=0)


class JoinGroup(WireModel):
    """`POST /v1/weights/group`: meet the learner (rank 0) in a process group for weight broadcasts."""

    epoch: int = Field(ge=1)
    backend: Backend
    host: str
    port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(ge=1)
    world_size: int = Field(ge=2)
    bucket_timeout_s: float = Field(gt=0)


class JoinedGroup(WireModel):
    """The generator's workers are in the process group of `epoch`."""

    epoch: int = Field(ge=1)


class TensorSpec(WireModel):
    """A tensor's place in its bucket. `dtype` is torch's name without the prefix, such as `float32`."""

    name: str = Field(max_length=512)
    dtype: str = Field(max_length=32)
    shape: tuple[int, ...] = Field(max_length=8)
    offset: int = Field(ge=0)


class BucketSpec(WireModel):
    """One broadcast: `nbytes` bytes whose xxh3 hash is `xxh3` (hexadecimal)."""

    nbytes: int = Field(ge=1)
    xxh3: Digest
    tensors: tuple[TensorSpec, ...] = Field(min_length=1)


class Prepare(WireModel):
    """`POST /v1/weights/prepare`: receive these buckets into the staging buffer while serving goes on."""

    version: VersionText
    epoch: int = Field(ge=1)
    buckets: tuple[BucketSpec, ...] = Field(min_length=1)


class Prepared(WireModel):
    """All buckets arrived and their hashes agree."""

    version: VersionText
    receive_s: float = Field(ge=0)


class Commit(WireModel):
    """`POST /v1/weights/commit`: at a token boundary, load what is staged and serve it as `version`."""

    version: VersionText
    epoch: int = Field(ge=1)
    probe_token_ids: tuple[int, ...] = Field(default=(), max_length=4096)


class Committed(WireModel):
    """The generator serves `version`. `fingerprint` is over the loaded parameters; `probe_logprobs` are those of the
    probe's tokens 1…, given the ones before.
    """

    version: VersionText
    fingerprint: Digest
    probe_logprobs: tuple[float, ...]
    load_s: float = Field(ge=0)
    pause_s: float = Field(ge=0)
