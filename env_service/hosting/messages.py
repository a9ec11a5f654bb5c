"""The conversation between an env_service and whoever runs an environment for it: a child process, or a host elsewhere.

    Call(about, reset | step | close)  ──▶  one environment, kept under its key  ──▶  Reply(opening | step), or a fault
    Call(task)                         ──▶  its tasks                            ──▶  Reply(task)
    Call(describe)                     ──▶                                       ──▶  Reply(description)

JSON in both directions, nothing that could be run. What does not fit these models is nonsense of whoever sent it.
"""

import traceback
from collections.abc import Awaitable, Mapping
from inspect import isawaitable
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal, TypeVar

from pydantic import Field, StringConstraints, ValidationError

from env_service.environments.interface import (
    Action,
    Aggregation,
    EnvironmentFailed,
    EnvironmentFull,
    EnvironmentUnavailable,
    OfferedEnvironment,
    Opening,
    Role,
    Step,
    Task,
)
from env_service.environments.rules import Rules
from protocol.codec import describe
from protocol.model import WireModel
from protocol.trajectories import Purpose
from services.user_code import checked_number, number_of

_OURS = str(Path(__file__).parent)
_MAX_CHARS = 2000
_MAX_TRACEBACK_CHARS = 16_000

T = TypeVar("T")
Key = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class Reset(WireModel):
    """Begin a conversation."""

    task: Task
    seed: int


class MakeTask(WireModel):
    """Asks for a task."""

    purpose: Purpose
    index: int = Field(ge=0)


class HostCall(WireModel):
    """A request to the environment `name`. `about` is the conversation's key, chosen by the caller."""

    kind: Literal["describe", "task", "reset", "step", "close"]
    name: str = ""
    about: Key = "-"
    task: MakeTask | None = None
    reset: Reset | None = None
    action: Action | None = None


class Description(WireModel):
    """An environment's description of itself. `own_tasks`: they are asked for; else they are numbered, each with a
    seed. `makes_room`: it has `on_full`.
    """

    rules: Rules
    roles: tuple[Role, ...]
    metrics: Mapping[str, Aggregation]
    train_tasks: int
    evaluation_tasks: int
    own_tasks: bool
    makes_room: bool = False


class HostedFault(WireModel):
    """A failure: `unavailable`, `full` and `killed` say nothing about the task or the policy."""

    kind: Literal["raised", "nonsense", "hung", "crashed", "killed", "unavailable", "full"]
    text: str
    traceback: str = ""


class HostReply(WireModel):
    """The answer to a call: what its kind wants, nothing for `close`, or a fault."""

    description: Description | None = None
    task: Task | None = None
    opening: Opening | None = None
    step: Step | None = None
    fault: HostedFault | None = None


class HostUnavailable(EnvironmentFull):
    """The process that an environment runs in is at hand, and is busy, starting or dead; `kind` says which."""

    def __init__(self, text: str, *, kind: str = "unavailable") -> None:
        super().__init__(text)
        self.kind = kind


def raise_fault(reply: HostReply) -> None:
    """Raises the fault of a reply, if it holds one, as EnvironmentFailed or EnvironmentUnavailable."""
    fault = reply.fault
    if fault is None:
        return
    if fault.kind == "full":
        raise EnvironmentFull(fault.text)
    if fault.kind == "killed":
        raise HostUnavailable(fault.text, kind=fault.kind)
    if fault.kind == "unavailable":
        raise EnvironmentUnavailable(fault.text)
    raise EnvironmentFailed(fault.kind, fault.text, traceback=fault.traceback)


def fault_of(error: BaseException) -> HostedFault:
    """The error of an environment's code, in the user's own words: file, line, function and traceback."""
    if isinstance(error, EnvironmentFailed):
        kinds = ("raised", "nonsense", "hung", "crashed")
        kind = next((each for each in kinds if each == error.kind), "raised")
        text, places = (sendable(each, most=_MAX_TRACEBACK_CHARS) for each in (str(error), error.traceback))
        return HostedFault.model_validate({"kind": kind, "text": text, "traceback": places})
    if isinstance(error, EnvironmentUnavailable):
        away: Literal["full", "unavailable"] = "full" if isinstance(error, EnvironmentFull) else "unavailable"
        return HostedFault(kind="killed" if error.kind == "killed" else away, text=sendable(str(error)))
    theirs = _below_ours(error.__traceback__)
    frames = traceback.extract_tb(theirs)
    place = f" ({frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    lines = "".join(traceback.format_exception(type(error), error, theirs))
    return HostedFault(
        kind="raised",
        text=sendable(f"{type(error).__name__}: {error}{place}"),
        traceback=sendable(lines[-_MAX_TRACEBACK_CHARS:], most=_MAX_TRACEBACK_CHARS),
    )


def _below_ours(whole: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames that lead to the environment's code."""
    frames, theirs = whole, whole
    while frames is not None:
        if frames.tb_frame.f_code.co_filename.startswith(_OURS) and frames.tb_next is not None:
            theirs = frames.tb_next
        frames = frames.tb_next
    return theirs


def sendable(text: str, *, most: int = _MAX_CHARS) -> str:
    """Short, and without the halves of characters that no JSON can hold."""
    return text[:most].encode("utf-8", errors="replace").decode()


def nonsense(text: str) -> HostReply:
    """The reply for an answer that no environment may give."""
    return HostReply(fault=HostedFault(kind="nonsense", text=sendable(text)))


def line_of(reply: HostReply, *, most_bytes: int) -> bytes:
    """A reply as one line of JSON, or that it cannot be one."""
    try:
        line = reply.model_dump_json(warnings="error").encode()
    except (ValueError, TypeError) as error:  # such as half a character, or an object of numpy's in the tools
        return nonsense(f"the environment's answer cannot be sent: {error}").model_dump_json().encode()
    if len(line) >= most_bytes:
        text = f"the environment's answer has {len(line)} bytes; it may have {most_bytes}"
        return nonsense(text).model_dump_json().encode()
    return line


def reply_of(line: bytes | str) -> HostReply:
    """Raises EnvironmentFailed for what is no reply."""
    try:
        return HostReply.model_validate_json(line)
    except ValidationError as error:
        raise EnvironmentFailed("nonsense", f"the environment's process answers nonsense: {describe(error)}") from error


def opening_reply(given: object) -> HostReply:
    """The reply to `reset`."""
    match given:
        case Opening():
            return HostReply(opening=given)
        case str() | tuple():
            return HostReply(opening=Opening(given))
    return nonsense(f"the environment's reset returned {type(given).__name__}, expected an Opening, text or messages")


def step_reply(step: object) -> HostReply:
    """The reply to `step`; numbers of numpy's become plain ones."""
    if not isinstance(step, Step):
        return nonsense(f"the environment's step returned {type(step).__name__}, expected a Step")
    numbers = {"reward": step.reward, **step.metrics}
    for name, number in numbers.items():
        if number_of(number) is None:
            return nonsense(f"the environment's step gives {number!r} as its {name}, expected a finite number")
    plain = {name: checked_number(number) for name, number in step.metrics.items()}
    return HostReply(
        step=Step(
            observation=step.observation,
            verification=step.verification,
            stop=step.stop,
            reward=checked_number(step.reward),
            state=step.state,
            invalid=bool(step.invalid),
            metrics=plain,
        )
    )


def description_of(offered: OfferedEnvironment, *, own_tasks: bool) -> Description:
    """Of an environment that is at hand."""
    return Description(
        rules=offered.rules,
        roles=offered.roles,
        metrics=offered.metrics,
        train_tasks=offered.tasks.train_tasks,
        evaluation_tasks=offered.tasks.evaluation_tasks,
        own_tasks=own_tasks,
        makes_room=offered.makes_room,
    )


async def resolved(given: T | Awaitable[T]) -> T:
    """The value, or what it resolves to."""
    return await given if isawaitable(given) else given
