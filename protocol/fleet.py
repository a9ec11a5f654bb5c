"""HTTP bodies by which a generator joins the learner's fleet and takes new weights.

New weights come in one of three ways, and all end with `Commit`: a broadcast to all that serve (`JoinGroup`,
`Prepare`); the learner's memory, for those that can map it (`SharedMemory`, `Prepare` with `files`); or a download by
one that has to catch up (`Pull`, then `PullPlan` and the chunks of each bucket, from the learner), or that always pulls
(`Pull` with the name of a manifest: see `protocol.weight_tree`).
"""

from typing import Annotated, Literal

from pydantic import Field

from protocol.model import VersionText, WireModel

Digest = str
ProbeText = Annotated[tuple[int, ...], Field(min_length=2, max_length=4096)]
Backend = Literal["gloo", "nccl"]
Channel = Literal["latest", "released", "canary"]
"""Versions that a generator holds: the newest, for rollouts; the released one, for users; or a candidate that some
users try before it is released, and the released one while there is none.
"""
WeightWay = Literal["broadcast", "pull"]
"""Way in which a generator gets each version: with the others, or by a download of what has changed."""
Condition = Literal["able", "stalled", "leaving"]
"""Of a generator: `able` takes weights and requests, the engine of a `stalled` one does not answer, and a `leaving` one
lets its requests end.
"""
PULLED_EPOCH = 0
"""Stands for a download, or the learner's memory, where a commit names the epoch of a broadcast."""
MEETING_BYTES = 16
"""The size of the broadcast with which the members of an NCCL group meet."""
BUCKET_ALIGNMENT = 16
"""Offsets of tensors in a bucket are multiples of this many bytes, so that any element type can be viewed in place."""
PULL_TOOK_TOO_LONG = "pull_took_too_long"
"""The kind of a refusal by a generator whose download was not done in time."""
MAX_PROBE_TEXTS = 64
PROBE_TIMEOUT_S = 15.0
"""Time of a generator for the probe of a small model, in seconds."""
TOLD_ALIKE = ", and with the same chat_template and chat_template_kwargs in [run]"
"""The end of a remedy for chat templates of different fingerprints."""
CHUNK_HASH_HEADER = "X-Headway-Xxh3"
"""The header of a chunk of a bucket: the xxh3 hash of its bytes, hexadecimal."""
INSTANCE_HEADER = "X-Headway-Instance"
"""The header of each step of a weight sync: the generator's process that it is meant for, as that announced itself."""
FACTOR_PREFIX = "base_model.model."
FACTOR_ENDS = (".lora_A.weight", ".lora_B.weight")
"""Ends of the names of an adapter's factors: down [rank, in], and up [out, rank]."""


class Fingerprints(WireModel):
    """Fingerprints of a model's folder that two processes must agree on before tokens pass between them."""

    model: Digest = Field(max_length=128)
    tokenizer: Digest = Field(max_length=128)
    chat_template: Digest = Field(max_length=128)


class Announcement(WireModel):
    """`POST /v1/generators` at the learner, repeated every few seconds: a generator's address, state and model.

    A generator that falls silent leaves the fleet. One that must not serve this run is refused with status 409. A
    refusal of kind `join_refused` (another protocol or model) or `superseded` (another process has taken the id) holds
    for the life of the generator's process; one of kind `expelled` (it served other weights than it was sent) holds for
    the life of the learner's.

    `instance` is drawn at random at each start of the process, which was at `started_at`, in seconds since 1970; 0 if
    that is not known. Of two processes with one id the later one stays. Generators of one `kind` load equal bytes to
    parameters of equal checksum. `serving_version` is None while it serves no whole weights, or is not `able`.
    `dtype` is that of its weights and activations. One without `staging` has no room for new weights beside the old: it
    receives a broadcast within its commit, which therefore has to be asked for while the broadcast is sent.

    One whose `weights` are a `pull` takes part in no broadcast. If it is `relayed`, it pulls from others than the
    learner as far as they have what it needs.
    """

    generator_id: str = Field(min_length=1, max_length=256)
    instance: str = Field(default="", max_length=64)
    started_at: float = Field(default=0.0, ge=0)
    condition: Condition = "able"
    channel: Channel = Field(default="latest", exclude_if=lambda channel: channel == "latest")
    kind: str = Field(default="", max_length=256)
    dtype: str = Field(default="", max_length=32)
    staging: bool = True
    weights: WeightWay = Field(default="broadcast", exclude_if=lambda way: way == "broadcast")
    relayed: bool = Field(default=False, exclude_if=lambda relayed: not relayed)
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
    """`POST /v1/weights/group`: meet the learner (rank 0) in a process group for weight broadcasts.

    A learner of several ranks may have several `senders`: each is rank 0 of a group of its own with all workers, which
    meets at the same store under the name of `group_name`. If slices are sent, each sender has `sliced` groups: one for
    each worker of a generator, with the workers of that number of all generators. `rank_offset` is then the rank of all
    workers of this generator, each in its own group, and `world_size` is that of a group.
    """

    epoch: int = Field(ge=1)
    backend: Backend
    host: str
    port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(ge=1)
    world_size: int = Field(ge=2)
    meet_timeout_s: float = Field(default=10.0, gt=0)
    bucket_timeout_s: float = Field(gt=0)
    senders: int = Field(default=1, ge=1, exclude_if=lambda senders: senders == 1)
    sliced: int = Field(default=0, ge=0, exclude_if=lambda sliced: sliced == 0)


class JoinedGroup(WireModel):
    """The generator's workers are in the process group of `epoch`."""

    epoch: int = Field(ge=1)


SharedPath = Annotated[str, Field(pattern=r"^/proc/[1-9][0-9]*/fd/[0-9]+$", max_length=64)]
"""Path of a file in a process's memory, for others of its host."""


class SharedMemory(WireModel):
    """`POST /v1/weights/host`: tell the secret in the learner's file at `path`, if that is seen there.

    `path` is a link, and `link` is where it leads, a file of no folder; another process may have the path elsewhere.
    """

    path: SharedPath
    link: str = Field(pattern=r"^/memfd:headway-[0-9a-f]{16} \(deleted\)$")


class SharedMemoryAnswer(WireModel):
    """The content of the learner's file: it can be mapped. Empty if it is not to be seen, as from another host."""

    secret: str = Field(max_length=64)


class TensorSpec(WireModel):
    """A tensor's place in its bucket. `dtype` is torch's name without the prefix, such as `float32`.

    With `whole` it is the part of this shape, from `start` on, of a tensor of that one; all parts of a tensor that a
    worker is sent stand one after another in one bucket.
    """

    name: str = Field(max_length=512)
    dtype: str = Field(max_length=32)
    shape: tuple[int, ...] = Field(max_length=8)
    offset: int = Field(ge=0)
    start: tuple[int, ...] = Field(default=(), max_length=8, exclude_if=lambda start: not start)
    whole: tuple[int, ...] | None = Field(default=None, max_length=8, exclude_if=lambda whole: whole is None)


class TensorBox(WireModel):
    """A part of a tensor: its first place and its size in each dimension."""

    start: tuple[int, ...] = Field(max_length=8)
    shape: tuple[int, ...] = Field(max_length=8)


class WorkerSlices(WireModel):
    """Parts of the weights that a worker of a generator reads, by the names of tensors. It reads others whole."""

    boxes: dict[str, tuple[TensorBox, ...]]


class SliceLayout(WireModel):
    """The slices of all workers of a generator, in their order."""

    workers: tuple[WorkerSlices, ...] = Field(min_length=2, max_length=256)


class BucketSpec(WireModel):
    """A broadcast: `nbytes` bytes whose xxh3 hash is `xxh3` (hexadecimal), in the group of `sender`.

    Buckets of one sender are sent in the order of the plan. Who takes part in several groups in one thread receives in
    the order of the plan, too: the senders take turns in it.

    `device_hash` is that of `services.tensor_hash`, for who has the bytes on a device: it is sent with a broadcast
    between devices.
    """

    nbytes: int = Field(ge=1)
    xxh3: Digest
    tensors: tuple[TensorSpec, ...] = Field(min_length=1)
    sender: int = Field(default=0, ge=0, exclude_if=lambda sender: sender == 0)
    device_hash: Digest = Field(default="", exclude_if=lambda found: not found)


WeightForm = Literal["whole", "based", "alone"]
"""Form in which a version is sent: the model's weights; base weights and then an adapter; or an adapter alone, to
whoever holds its base weights.
"""


class LowRank(WireModel):
    """Of weights that are sent as base weights and a low-rank adapter: `alpha / rank` * up @ down is added.

    `base` is the digest of the base weights. The factors are named as in peft's files, and in buckets of their own
    behind those of the base weights, if these are sent.
    """

    base: Digest = Field(min_length=1, max_length=128)
    rank: int = Field(ge=1)
    alpha: float = Field(gt=0)


class Prepare(WireModel):
    """`POST /v1/weights/prepare`: receive these buckets into the staging buffer while serving goes on.

    Without `adapter` they hold the model's weights as they are. With `slices` the buckets themselves are not sent, but
    each worker is sent those of its number, of the same version. With `files` nothing is sent: each bucket is the
    beginning of a file in the learner's memory, which is mapped; the epoch is then `PULLED_EPOCH`.
    """

    version: VersionText
    epoch: int = Field(ge=0)
    buckets: tuple[BucketSpec, ...] = Field(min_length=1)
    adapter: LowRank | None = Field(default=None, exclude_if=lambda adapter: adapter is None)
    slices: tuple[tuple[BucketSpec, ...], ...] = Field(default=(), exclude_if=lambda slices: not slices)
    files: tuple[SharedPath, ...] = Field(default=(), exclude_if=lambda files: not files)

    def arriving(self, worker: int) -> tuple[BucketSpec, ...]:
        """The buckets that a worker is sent."""
        return self.slices[worker] if self.slices else self.buckets

    @property
    def brings_base(self) -> bool:
        """False for an adapter alone."""
        return not all(is_factor(tensor.name) for tensor in self.buckets[0].tensors)


class PrepareResult(WireModel):
    """All buckets arrived and their hashes agree. `received_bytes` is told by one that pulled from a tree."""

    version: VersionText
    receive_s: float = Field(ge=0)
    received_bytes: int | None = Field(default=None, ge=0, exclude_if=lambda nbytes: nbytes is None)


class Pull(WireModel):
    """`POST /v1/weights/pull`: download this version from the learner of the announcements, and stage it, within
    `deadline_s`. Answered with PrepareResult; the commit that follows names the epoch `PULLED_EPOCH`.

    With a `manifest`, which is the name of one, it is made of the tree of published weights.
    """

    version: VersionText
    deadline_s: float = Field(gt=0)
    form: WeightForm = Field(default="whole", exclude_if=lambda form: form == "whole")
    manifest: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$", exclude_if=lambda name: name is None)


class PullPlan(WireModel):
    """`GET /v1/weights/{version}/plan?form=…` at the learner: what to download.

    Chunks of at most `chunk_bytes` are at `/v1/weights/{version}/buckets/{index}?form=…&offset=…&length=…`.
    """

    version: VersionText
    chunk_bytes: int = Field(ge=1)
    buckets: tuple[BucketSpec, ...] = Field(min_length=1)
    adapter: LowRank | None = Field(default=None, exclude_if=lambda adapter: adapter is None)

    @property
    def total_bytes(self) -> int:
        """The bytes of all buckets."""
        return sum(bucket.nbytes for bucket in self.buckets)


class Commit(WireModel):
    """`POST /v1/weights/commit`: at a token boundary, load what is staged and serve it as `version`.

    `epoch` is that of the broadcast, or `PULLED_EPOCH`. `probe` are texts whose logprobs are wanted. `digest` is
    that of all that was sent, for the generator to remember: equal weights have an equal one, in whichever version.
    """

    version: VersionText
    epoch: int = Field(ge=0)
    probe: tuple[ProbeText, ...] = Field(default=(), max_length=MAX_PROBE_TEXTS)
    digest: Digest = Field(default="", max_length=128, exclude_if=lambda digest: not digest)


class FormerLoad(WireModel):
    """The weights that a generator's process loaded by an earlier commit: `digest` is what that commit said of them,
    `fingerprint` is over the parameters as they were then.
    """

    version: VersionText
    digest: Digest = Field(max_length=128)
    fingerprint: Digest = Field(max_length=128)


class CommitResult(WireModel):
    """The generator serves `version`. `fingerprint` is over the loaded parameters; `probe_logprobs` are those of the
    tokens 1… of each text of the probe, one text after another, or none if the engine was too busy to answer. `slices`
    are what its workers have read of whole tensors, if that was less. `former` is what it had loaded until then, if
    that came by a commit: a learner that has lost its memory of it can tell by that whether anything was loaded.
    """

    version: VersionText
    fingerprint: Digest
    probe_logprobs: tuple[float, ...]
    load_s: float = Field(ge=0)
    pause_s: float = Field(ge=0)
    slices: SliceLayout | None = Field(default=None, exclude_if=lambda slices: slices is None)
    former: FormerLoad | None = Field(default=None, exclude_if=lambda former: former is None)


class Reprobe(WireModel):
    """`POST /v1/weights/probe`: logprobs of these texts are wanted again, of a generator that serves `version`."""

    version: VersionText
    probe: tuple[ProbeText, ...] = Field(min_length=1, max_length=MAX_PROBE_TEXTS)


class ReprobeResult(WireModel):
    """As in a `CommitResult`: the logprobs under `version`, or none if the engine was too busy again."""

    version: VersionText
    probe_logprobs: tuple[float, ...]


def group_name(epoch: int, sender: int = 0, worker: int | None = None) -> str:
    """The name under which the members of a sender's group find each other in the store of their meeting; of the group
    for one worker's slices, if that is given.
    """
    name = f"headway-{epoch}-{sender}" if sender else f"headway-{epoch}"
    return name if worker is None else f"{name}-worker-{worker}"


def is_factor(name: str) -> bool:
    """True for a tensor that is one of an adapter's factors."""
    return name.endswith(FACTOR_ENDS)
