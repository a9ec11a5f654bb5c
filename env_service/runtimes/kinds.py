"""The seam between the pool, which counts runtimes, and what makes them: bubblewrap, a container engine, a cluster.

    open ─▶ launch ─▶ (a runtime, until it is stopped or lost) ─▶ … ─▶ close

A kind tells failures apart as runtimes do: RuntimeLost for what nobody inside has done, ImageFault for an image that
there is not, CannotIsolate for walls that cannot be had here at all.
"""

from collections.abc import Callable, Set
from typing import Protocol

from env_service.runtimes.interface import Runtime, RuntimeCommand, RuntimeSnapshot

WITHOUT = "if no environment needs a computer, say env-service.runtimes.kind = 'off'"


class PooledRuntime(Runtime, Protocol):
    """A runtime as the pool has it."""

    @property
    def stands(self) -> bool:
        """True until it is stopped or lost."""
        ...

    def age_from_now(self) -> None:
        """Have it end after its lifetime, counted from here."""
        ...


Ended = Callable[[PooledRuntime], None]


class RuntimeKind(Protocol):
    """Makes runtimes. It lives in the event loop of its pool; only `check` is called outside of it."""

    trial: RuntimeCommand
    """Prints a line for each wall that does not hold, and ends with 0."""

    remedy: str
    """Advice where walls do not hold."""

    memory_mib: int
    """Memory that each runtime counts for, in MiB."""

    def check(self, image: str) -> None:
        """Say at the start that an image will be wanted. Raises ImageFault for one that cannot be had."""
        ...

    async def open(self, images: Set[str]) -> None:
        """Clear what a killed service left, and make ready for images. Raises CannotIsolate and ImageFault."""
        ...

    async def launch(self, image: str, snapshot: RuntimeSnapshot | None, *, name: str, ended: Ended) -> PooledRuntime:
        """A runtime that stands; `ended` is called once, when nothing of it is left. Raises RuntimeLost, ImageFault."""
        ...

    async def close(self) -> None:
        """Let go of what `open` took; all runtimes have been stopped."""
        ...
