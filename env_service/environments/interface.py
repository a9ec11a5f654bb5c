"""What a task is, what an environment is, and what passes between an environment and the rollout loop."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pydantic import JsonValue

from protocol.trajectories import Purpose

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class ChatMessage:
    """One message of a conversation; the chat template turns it into tokens."""

    role: Role
    content: str


Prompt = str | tuple[ChatMessage, ...]
"""What the policy is given: plain text that it continues, or messages that it answers."""


@dataclass(frozen=True)
class Verification:
    """Who judges a completion: a verifier of the reward service, with its arguments."""

    verifier: str
    arguments: dict[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """The unit of work, a pure function of environment, purpose and index."""

    prompt: Prompt
    verification: Verification


@dataclass(frozen=True)
class Action:
    """What the policy sampled in a turn, decoded, without special tokens."""

    text: str


@dataclass(frozen=True)
class Step:
    """An environment's answer to an action: how it goes on, or how the whole is judged.

    `messages` are appended to the conversation as they are; the tokens before them are never made again. Exactly one of
    `messages` and `verification` is given.
    """

    messages: tuple[ChatMessage, ...] = ()
    verification: Verification | None = None

    def __post_init__(self) -> None:
        assert bool(self.messages) != (self.verification is not None), "a step goes on or ends, not both or neither"


class TaskSource(Protocol):
    """The tasks of an environment. `task` raises for a task that cannot be made; it may be a coroutine."""

    @property
    def train_tasks(self) -> int: ...

    @property
    def evaluation_tasks(self) -> int: ...

    def task(self, purpose: Purpose, index: int) -> Task | Awaitable[Task]: ...


class Environment(Protocol):
    """One conversation with the policy; each trajectory has an instance of its own. Methods may be coroutines; they are
    called one at a time, in a thread beside the event loop, and coroutines run in the event loop.

    All instances of a group are reset with the same task and seed, and must open with the same prompt.
    """

    def reset(self, task: Task, seed: int) -> Prompt | Awaitable[Prompt]: ...

    def step(self, action: Action) -> Step | Awaitable[Step]: ...


@dataclass(frozen=True)
class OfferedEnvironment:
    """A name that leases may use, with its tasks and the way to start a conversation."""

    name: str
    tasks: TaskSource
    start: Callable[[], Environment]

    def task_count(self, purpose: Purpose) -> int:
        """Number of different tasks; valid indices are below it."""
        return self.tasks.train_tasks if purpose == "train" else self.tasks.evaluation_tasks


def text_of(prompt: Prompt) -> str:
    """A prompt as a person reads it, without the markup of a chat template."""
    return prompt if isinstance(prompt, str) else "\n\n".join(message.content for message in prompt)
