"""HTTP bodies that all four processes share: `GET /v1/status`, readiness and errors. Ages are in seconds."""

from typing import Literal

from pydantic import Field, JsonValue

from protocol.costs import CostSums
from protocol.model import VersionText, WireModel
from protocol.tenants import TenantsStatus

Kind = Literal["learner", "generator", "reward-service", "env-service"]


class WaitStatus(WireModel):
    """A wait that is in progress. One that is part of normal work does not block readiness."""

    whom: str
    since_s: float = Field(ge=0)
    blocks_readiness: bool


class PeerStatus(WireModel):
    """Another process as this one sees it. Fields that are not known are None."""

    name: str
    kind: Kind
    url: str | None = None
    last_heard_s: float | None = None
    serving_version: VersionText | None = None
    state: str


class QueueStatus(WireModel):
    """The length of a queue now, and its `limit`; None for no limit."""

    name: str
    depth: int = Field(ge=0)
    limit: int | None = None


class EventStatus(WireModel):
    """Age of the latest event of a kind."""

    name: str
    age_s: float = Field(ge=0)


class FailureStatus(WireModel):
    """A warning or an error of the recent past."""

    text: str = Field(max_length=2000)
    age_s: float = Field(ge=0)


class ProgressStatus(WireModel):
    """Work that the process has done so far, of `total` if there is an end to it. `usual_s`: seconds that one took of
    late, by the median.
    """

    unit: str
    done: int = Field(ge=0)
    total: int | None = None
    usual_s: float | None = Field(default=None, ge=0)


class WaitingItems(WireModel):
    """Items at hand that wait for somebody, on average over a time."""

    whom: str = Field(max_length=64)
    running: float = Field(ge=0)


class LoadStatus(WireModel):
    """Work of the last `over_s` seconds.

    `busy_share` is the share of that time in which there was work, `per_s` what was done a second, `running` how many
    items were at hand on average, of `limit` at most; `waits` are those of them that waited for another process.
    """

    over_s: float = Field(gt=0)
    busy_share: float = Field(ge=0, le=1)
    per_s: float = Field(ge=0)
    running: float = Field(ge=0)
    limit: int | None = None
    waits: tuple[WaitingItems, ...] = Field((), max_length=16)
    long_busy_share: float | None = Field(default=None, ge=0, le=1)
    """The share of the last minute, or of what has passed of it, in which long work is seen whole."""


class GpuStatus(WireModel):
    """A GPU that a process or a child of it holds, by its number on the machine, with what all who use it take of it:
    the share of the last second or less in which a kernel ran, which not every card tells, and memory.
    """

    index: int = Field(ge=0)
    busy_share: float | None = Field(default=None, ge=0, le=1)
    memory_bytes: int = Field(ge=0)
    total_bytes: int = Field(ge=0)


class UsageStatus(WireModel):
    """Use of its machine by a process and its children: cores at work in the last seconds, of `usable_cores` that it
    may keep busy with whoever shares them, CPU seconds so far, and memory, in which what several share counts once,
    where the kernel says who does.
    """

    cores: float = Field(ge=0)
    usable_cores: float | None = Field(default=None, gt=0, exclude_if=lambda cores: cores is None)
    cpu_s: float | None = Field(default=None, ge=0, exclude_if=lambda seconds: seconds is None)
    memory_bytes: int = Field(ge=0)
    gpus: tuple[GpuStatus, ...] = ()


class DiskStatus(WireModel):
    """Room on the disk of a folder that the process writes to."""

    path: str
    free_bytes: int = Field(ge=0)
    total_bytes: int = Field(ge=0)


class Report(WireModel):
    """The part of a status that is different in each kind of process.

    `problems` are what the process knows to be wrong with itself: with one of them, nobody else is to blame. `notes`
    are worth knowing, and nothing wrong. `tenants` are those of a learner that serves training loops of others.
    `step_costs` are CPU seconds of a generator's engine so far, over its steps: by 1, sequences, and those that began.
    """

    id: str
    policy_version: VersionText | None = None
    progress: ProgressStatus | None = None
    load: LoadStatus | None = None
    usage: UsageStatus | None = None
    peers: tuple[PeerStatus, ...] = ()
    queues: tuple[QueueStatus, ...] = ()
    events: tuple[EventStatus, ...] = ()
    disks: tuple[DiskStatus, ...] = ()
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = Field(default=(), exclude_if=lambda notes: not notes)
    tenants: TenantsStatus | None = Field(default=None, exclude_if=lambda tenants: tenants is None)
    step_costs: CostSums | None = Field(default=None, exclude_if=lambda costs: costs is None)


class Status(Report):
    """The answer of `GET /v1/status`; `version` is that of the release, `log` the last lines of the log."""

    service: Kind
    version: str
    protocol_version: int
    pid: int
    host: str
    uptime_s: float = Field(ge=0)
    stopping: bool
    waits: tuple[WaitStatus, ...]
    failures: tuple[FailureStatus, ...]
    log: tuple[str, ...] = Field((), max_length=100)


class AskedPeer(WireModel):
    """A process as another one found it when it asked for its status: `status` if it `answers`, and otherwise the
    `complaint`, with the process that listens there if it is of the asking one's machine.
    """

    kind: Kind
    url: str = Field(max_length=2048)
    condition: Literal["answers", "dead", "hangs", "strange"]
    complaint: str = Field(default="", max_length=2000)
    status: Status | None = None
    pid: int | None = None
    command: str = Field(default="", max_length=256)
    is_stopped: bool = False


class ErrorDetail(WireModel):
    """The fault: its kind, a message, the field, what was expected and what arrived."""

    kind: str
    message: str
    field: str | None = None
    expected: JsonValue = None
    got: JsonValue = None


class ErrorBody(WireModel):
    """The body of every answer with status 4xx or 5xx."""

    error: ErrorDetail


class Readiness(WireModel):
    """`/readyz`: ready, or whom the process waits for, and since how many seconds."""

    ready: bool
    waiting_for: tuple[str, ...] = ()
    waiting_s: float = Field(default=0.0, ge=0)
