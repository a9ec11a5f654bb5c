"""The ZeroMQ messages between learner and env_service.

An env_service says `Hello` and is granted leases up to its capacity; it heartbeats while they run, sends each finished
group until that is acknowledged, and says which leases failed.

An attempt at a lease is named by the learner's incarnation that granted it, the purpose, the lease's id and the number
of the attempt: a restarted learner may give a number again.
"""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from protocol.generation import Sampling
from protocol.model import VersionText, WireModel
from protocol.status import AskedPeer, Status
from protocol.trajectories import Purpose, TrajectoryGroup

MAX_GENERATORS = 4096
"""In one fleet."""
MAX_PARTS = 1 << 12
"""Of one environment."""
MAX_LEASES = 1 << 14
"""Named in one message, which then stays within the limits of a header; a sender that has more says it in several."""
MAX_REASON_CHARS = 1024
"""Of why an environment has no greedy answers."""


class Message(WireModel):
    """The base of all messages; `kind` is the name on the wire."""

    kind: ClassVar[str]


class TaskPart(WireModel):
    """Consecutive training tasks of one share. Of more `places` than `tasks` the tasks recur in their order.

    `most_leases` of it run at once in this env_service at most; `weight` is its share of the places there
    relative to the others', 1 if only others have one. Without both, its leases come as its tasks do.
    """

    places: int = Field(ge=1)
    tasks: int = Field(ge=1)
    most_leases: int | None = Field(default=None, ge=1, exclude_if=lambda most: most is None)
    weight: float | None = Field(default=None, gt=0, allow_inf_nan=False, exclude_if=lambda weight: weight is None)

    @property
    def has_own_places(self) -> bool:
        """True if it may be passed over while others are begun."""
        return self.most_leases is not None or self.weight is not None


class EnvironmentInfo(WireModel):
    """An environment that an env_service offers, and how many different tasks it has. Training tasks are in `levels` of
    equal size, the easiest first. `parts` are those of a mix, in the order of the tasks, whose shares a learner keeps
    that draws tasks of its own choice; none, if each level is one. `chat_template` is the fingerprint of the policy's
    template with what the environment tells it; empty if it tells it nothing of its own. `no_greedy_answer` says why no
    greedy answer to its tasks can be sampled; empty if one can. `teacher_hint`: all groups of training tasks can
    have a prompt for a teacher that is shown more than the policy. `most_leases` of it run at once in this env_service
    at most; None: as many as there is room for.
    """

    name: str = Field(min_length=1, max_length=256)
    train_tasks: int = Field(ge=1)
    evaluation_tasks: int = Field(ge=0)
    levels: int = Field(default=1, ge=1, le=1 << 16, exclude_if=lambda levels: levels == 1)
    parts: tuple[TaskPart, ...] = Field(default=(), max_length=MAX_PARTS, exclude_if=lambda parts: not parts)
    chat_template: str = Field(default="", max_length=128, exclude_if=lambda text: not text)
    no_greedy_answer: str = Field(default="", max_length=MAX_REASON_CHARS, exclude_if=lambda text: not text)
    teacher_hint: bool = Field(default=False, exclude_if=lambda has_one: not has_one)
    most_leases: int | None = Field(default=None, ge=1, exclude_if=lambda most: most is None)

    @model_validator(mode="after")
    def _parts_are_all(self) -> Self:
        places = sum(part.places for part in self.parts)
        if self.parts and places != self.train_tasks:
            raise ValueError(f"its parts have {places} places, expected {self.train_tasks}, as many as training tasks")
        return self


def without_greedy_answer(why: str) -> str:
    """The refusal of an algorithm that compares with greedy answers, where `no_greedy_answer` is `why`."""
    return (
        f"the algorithm compares with the reward of a greedy answer, and {why}: no such answer is sampled there; "
        "choose another algorithm, such as rloo, or another environment"
    )


WaitsFor = Literal["environment", "generators", "rewards", "host", "learner"]
"""`environment` is its code at work, `host` whoever it needs and who is away."""
OTHERS: frozenset[WaitsFor | None] = frozenset({"rewards", "host"})
"""Peers whose absence says nothing about a rollout that waits for them."""


class RunningLease(WireModel):
    """An attempt in progress, or one whose group or failure is not acknowledged yet.

    `oldest_version` is that of the oldest token so far, None before the first. `waits_for` says for whom the rollout
    waits, one that has ended for the learner; the time of waiting for rewards, or for the host of its environment, is
    not held against it. One without a place at the env_service waits as for a host.
    """

    incarnation: int = Field(ge=1)
    lease_id: int = Field(ge=0)
    attempt: int = Field(ge=0)
    purpose: Purpose
    oldest_version: VersionText | None = None
    waits_for: WaitsFor | None = None


class Hello(Message):
    """env_service → learner, first: who I am, what I can run at once, and what I hold of run `run` already.

    `instance` is made at the start of the process: another one under the same `env_id` holds of what the former one
    held what it lists in `running`, from its records, and nothing else. A restarted learner takes up `running` before
    it grants anything. `address` says to people where the process is.
    """

    kind: ClassVar[str] = "hello"
    env_id: str = Field(min_length=1, max_length=256)
    instance: str = Field(min_length=1, max_length=64)
    capacity: int = Field(ge=1, le=1 << 20)
    environments: tuple[EnvironmentInfo, ...] = Field(min_length=1, max_length=256)
    tokenizer: str = Field(max_length=128)
    chat_template: str = Field(max_length=128)
    run: str = Field(default="", max_length=64)
    running: tuple[RunningLease, ...] = Field(default=(), max_length=MAX_LEASES)
    address: str = Field(default="", max_length=512)


class Welcome(Message):
    """learner → env_service: accepted by this incarnation of this run; send heartbeats this often.

    Leases of another run than `run` are nobody's any more.
    """

    kind: ClassVar[str] = "welcome"
    run: str = Field(max_length=64)
    incarnation: int = Field(ge=1)
    heartbeat_every_s: float = Field(gt=0)


class PeerRefusal(Message):
    """learner → env_service: a message could not be taken, and why."""

    kind: ClassVar[str] = "refused"
    reason: str = Field(max_length=256)
    message: str = Field(max_length=4096)


class Lease(WireModel):
    """The right and duty to roll out one task. The task is a pure function of environment, purpose and index.

    `trace` is the context of its trace, as in the header `traceparent`; empty if it is not traced. `routed_experts`
    asks for those of its tokens, where generators can tell them. With `greedy_baseline` one more answer is sampled, at
    temperature 0, beside the `group_size` that `sampling` is of. With `teacher_prompt` the group is to have the prompt
    of a teacher that is shown more than the policy.
    """

    incarnation: int = Field(ge=1)
    lease_id: int = Field(ge=0)
    attempt: int = Field(ge=0)
    purpose: Purpose
    environment: str = Field(max_length=256)
    task_index: int = Field(ge=0)
    seed: int = Field(ge=0, lt=1 << 63)
    group_size: int = Field(ge=1, le=4096)
    sampling: Sampling
    timeout_s: float = Field(gt=0)
    trace: str = Field(default="", max_length=64, exclude_if=lambda text: not text)
    routed_experts: bool = Field(default=False, exclude_if=lambda asked: not asked)
    greedy_baseline: bool = Field(default=False, exclude_if=lambda asked: not asked)
    teacher_prompt: bool = Field(default=False, exclude_if=lambda asked: not asked)


class LeaseGrant(Message):
    """learner → env_service."""

    kind: ClassVar[str] = "granted"
    leases: tuple[Lease, ...] = Field(min_length=1, max_length=4096)


class Heartbeat(Message):
    """env_service → learner: these leases are alive here. `fleet`: number of the last Fleet of this learner that has
    arrived, 0 for none.
    """

    kind: ClassVar[str] = "heartbeat"
    running: tuple[RunningLease, ...] = Field(max_length=MAX_LEASES)
    fleet: int | None = Field(default=None, ge=0, exclude_if=lambda number: number is None)


class StatusNote(Message):
    """env_service → learner, every few seconds and before its hello, too: the status of the process at `url`, and what
    it found at its reward services. For the verdict on the run; there is no answer.
    """

    kind: ClassVar[str] = "status"
    url: str = Field(max_length=2048)
    status: Status
    rewards: tuple[AskedPeer, ...] = Field(default=(), max_length=64)


class FinishedLease(Message):
    """env_service → learner, repeated until acknowledged."""

    kind: ClassVar[str] = "finished"
    group: TrajectoryGroup


class FailedLease(Message):
    """env_service → learner: a lease that came to nothing. `infrastructure` is worth a retry, `data` hardly.

    `task` is for people: the task's text, cut, as far as it was made.
    """

    kind: ClassVar[str] = "failed"
    incarnation: int = Field(ge=1)
    lease_id: int = Field(ge=0)
    attempt: int = Field(ge=0)
    purpose: Purpose
    data_fault: bool
    reason: str = Field(max_length=4096)
    task: str = Field(default="", max_length=4096, exclude_if=lambda text: not text)


class OutcomeReceipt(Message):
    """learner → env_service: the outcome of this attempt is recorded; forget it."""

    kind: ClassVar[str] = "acknowledged"
    incarnation: int = Field(ge=1)
    lease_id: int = Field(ge=0)
    attempt: int = Field(ge=0)
    purpose: Purpose


class LeaseCancellation(Message):
    """learner → env_service: stop rolling these out; nobody waits for them."""

    kind: ClassVar[str] = "cancelled"
    leases: tuple[RunningLease, ...] = Field(min_length=1, max_length=MAX_LEASES)


class ServingGenerator(WireModel):
    """A generator that holds whole weights and takes requests."""

    generator_id: str = Field(max_length=256)
    url: str = Field(max_length=2048)
    policy_version: VersionText


class Fleet(Message):
    """learner → env_service: who serves now. Sent on every change, and again where a heartbeat tells that the last one
    was lost. `number` grows with each change.
    """

    kind: ClassVar[str] = "fleet"
    generators: tuple[ServingGenerator, ...] = Field(max_length=MAX_GENERATORS)
    number: int = Field(default=0, ge=0, exclude_if=lambda number: number == 0)


class Goodbye(Message):
    """Either way: I am leaving on purpose. Leases held by the sender are granted afresh, but those that it `keeps`:
    its next process, under the same `env_id`, goes on with them if it comes before their deadline.
    """

    kind: ClassVar[str] = "goodbye"
    reason: str = Field(max_length=4096)
    keeps: tuple[RunningLease, ...] = Field(default=(), max_length=MAX_LEASES, exclude_if=lambda keeps: not keeps)


ALL: tuple[type[Message], ...] = (
    Hello, Welcome, PeerRefusal, LeaseGrant, Heartbeat, FinishedLease, FailedLease, OutcomeReceipt, LeaseCancellation,
    Fleet, Goodbye, StatusNote,
)  # fmt: skip
