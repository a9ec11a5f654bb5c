"""The contract of a verifier: a description, and a lane that it opens in its surroundings; and the registry by name."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Protocol, Self, TypeVar, cast

from pydantic import BaseModel

from protocol.rewards import ScoreItem, VerifierInfo
from reward_service.verifier.config import ScoringConfig
from reward_service.verifier.metrics import ScoringMetrics
from reward_service.verifier.program import Sandbox
from reward_service.verifier.submission import Outcome, UserError

T = TypeVar("T")


class Lane(ABC):
    """How the items of one verifier are judged. A lane without processes of its own needs only `judge`.

    `at_once`: `judge` never returns an outcome to wait for.
    """

    at_once: ClassVar[bool] = False

    @abstractmethod
    def judge(self, item: ScoreItem, *, deadline: float) -> Outcome | Awaitable[Outcome]:
        """The outcome at once, or one to wait for; neither raises. `deadline` is on the event loop's clock.

        What is to be waited for is awaited once, or closed if nobody wants it any more; being cancelled, it stops.
        """

    def share(self) -> int:
        """Most items of one request in the lane at once: the others wait, so that requests take turns."""
        return 64

    async def loaded(self) -> None:  # noqa: B027  most lanes have nothing to load
        """Wait until items need not wait for the lane itself. Raises UserError if that will never be."""

    async def prewarm(self) -> None:
        """Start all workers. Raises UserError if the lane has none."""
        raise UserError("it runs in no worker processes, which `workers.prewarm` could start")

    def workers(self) -> tuple[int, int]:
        """How many worker processes are at work, and of how many."""
        return 0, 0


class JudgeItem(Protocol):
    """The lane of whichever verifier an item names; an unknown one is an error of the item."""

    def __call__(self, item: ScoreItem, *, deadline: float) -> Outcome | Awaitable[Outcome]:
        """As `Lane.judge`."""
        ...


class Shared:
    """Resources that several lanes use, such as an HTTP session: opened at first use, closed after all lanes.

    A context manager. Each is known by the function that opens it: the same function, the same resource.
    """

    def __init__(self) -> None:
        self._opened: dict[object, object] = {}
        self._stack = AsyncExitStack()

    async def get(self, open: Callable[[], AbstractAsyncContextManager[T]]) -> T:
        """What `open` opened. To be called while lanes are opened, which is one after the other."""
        if open not in self._opened:
            self._opened[open] = await self._stack.enter_async_context(open())
        return cast(T, self._opened[open])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What the lane of `verifier` may use. Without a `sandbox`, what needs one answers with a UserError.

    `judge` and `version_of`, which knows a verifier by its name, work as soon as all lanes are open, not before.
    """

    verifier: "Verifier"
    config: ScoringConfig
    metrics: ScoringMetrics
    sandbox: Sandbox | None
    judge: JudgeItem
    version_of: Callable[[str], str]
    shared: Shared


@dataclass(frozen=True, kw_only=True)
class Verifier:
    """A named verifier. `open` is called once, when the service starts, and may raise UserError.

    `packages`: the distributions without which it is not offered; their versions become part of its own.
    """

    name: str
    version: str
    description: str
    arguments: type[BaseModel]
    open: Callable[[Surroundings], AbstractAsyncContextManager[Lane]]
    packages: tuple[str, ...] = ()

    def info(self) -> VerifierInfo:
        """How the verifier is described on the wire."""
        schema = self.arguments.model_json_schema()
        return VerifierInfo(name=self.name, version=self.version, description=self.description, arguments_schema=schema)


Opener = Callable[[Surroundings], AbstractAsyncContextManager[Lane]]


logger = logging.getLogger(__name__)


class Registry:
    """The verifiers that this service offers. Raises UserError if two have one name."""

    def __init__(self, verifiers: Iterable[Verifier]) -> None:
        self._verifiers: dict[str, Verifier] = {}
        for verifier in verifiers:
            if verifier.name in self._verifiers:
                raise UserError(f"two verifiers are named {verifier.name!r}; give yours another name")
            self._verifiers[verifier.name] = verifier

    def get(self, name: str) -> Verifier:
        """The verifier of that name. Raises UserError that lists the names there are."""
        verifier = self._verifiers.get(name)
        if verifier is None:
            raise UserError(f"unknown verifier {name!r}; this service offers: {', '.join(sorted(self._verifiers))}")
        return verifier

    def all(self) -> tuple[Verifier, ...]:
        """All verifiers, by name."""
        return tuple(sorted(self._verifiers.values(), key=lambda verifier: verifier.name))
