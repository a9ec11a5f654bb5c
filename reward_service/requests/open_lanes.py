"""The lanes of all verifiers, opened together."""

import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

from protocol.rewards import ScoreItem
from reward_service.verifier.config import ScoringConfig
from reward_service.verifier.lanes import UNKNOWN, Lane, Registry, ScoringMetrics, SharedResources, Surroundings
from reward_service.verifier.program import Sandbox
from reward_service.verifier.submission import Outcome, UserError, error_of


class OpenLanes:
    """Made by `open_lanes`."""

    def __init__(self, *, registry: Registry, metrics: ScoringMetrics) -> None:
        self._registry = registry
        self._metrics = metrics
        self._lanes: dict[str, Lane] = {}

    def add(self, name: str, lane: Lane) -> None:
        """The lane of the verifier of that name."""
        self._lanes[name] = lane

    def judge(self, item: ScoreItem, *, deadline: float) -> Outcome | Awaitable[Outcome]:
        """The outcome in the lane of the item's verifier; an unknown verifier is an error of the item."""
        lane = self._lanes.get(item.verifier)
        if lane is not None:
            return lane.judge(item, deadline=deadline)
        try:
            self._registry.get(item.verifier)
        except UserError as error:
            return Outcome(result=error_of(error))
        raise AssertionError(f"no lane is open for {item.verifier}")

    def judge_together(self, items: Sequence[ScoreItem], *, deadline: float) -> Awaitable[Sequence[Outcome]]:
        """Outcomes of a group, in the lane of a verifier that takes groups."""
        return self._lanes[items[0].verifier].judge_together(items, deadline=deadline)

    def takes_groups(self, verifier: str) -> bool:
        """True if the verifier judges the items of a group at once."""
        lane = self._lanes.get(verifier)
        return lane is not None and lane.takes_groups

    def needs_whole_groups(self, verifier: str) -> bool:
        """True if the verifier, which takes groups, cannot judge a part of one."""
        return self._lanes[verifier].needs_whole_groups

    def judge_part(self, item: ScoreItem, *, deadline: float) -> Outcome | Awaitable[Outcome]:
        """As `judge`, for a verifier that asks others; what they say is counted by their own names."""
        began = time.perf_counter()
        outcome = self.judge(item, deadline=deadline)
        if isinstance(outcome, Outcome):
            return self._counted(item, outcome, began=began)
        return self._count_later(item, outcome, began=began)

    async def _count_later(self, item: ScoreItem, outcome: Awaitable[Outcome], *, began: float) -> Outcome:
        return self._counted(item, await outcome, began=began)

    def _counted(self, item: ScoreItem, outcome: Outcome, *, began: float) -> Outcome:
        self._metrics.count(outcome, verifier=self.label(item.verifier), latency_s=time.perf_counter() - began)
        return outcome

    def share(self, verifier: str) -> int:
        """Most items of one request in the verifier's lane at once."""
        return self._lanes[verifier].share()

    def label(self, verifier: str) -> str:
        """The verifier's name in metrics: callers' own words would make labels without bound."""
        return verifier if verifier in self._lanes else UNKNOWN

    def judges_at_once(self, verifier: str) -> bool:
        """True if its items wait for nothing but their turn; those of an unknown one are errors at once."""
        lane = self._lanes.get(verifier)
        return lane is None or lane.at_once

    def version(self, verifier: str) -> str:
        """The version of a verifier; of an unknown one, nothing."""
        return self._registry.get(verifier).version if verifier in self._lanes else ""

    async def prewarm(self, verifier: str) -> None:
        """Start the workers of a verifier. Raises UserError if it is unknown or has none."""
        with _naming(verifier, of="workers.prewarm: "):
            self._registry.get(verifier)
            await self._lanes[verifier].prewarm()

    async def loaded(self) -> None:
        """Wait until all lanes have loaded what they need; until then their items wait. Raises UserError."""
        for name, lane in self._lanes.items():
            with _naming(name):
                await lane.loaded()

    def workers(self) -> tuple[int, int]:
        """Number of worker processes at work, and of all."""
        counts = [lane.workers() for lane in self._lanes.values()]
        return sum(busy for busy, _ in counts), sum(size for _, size in counts)


@asynccontextmanager
async def open_lanes(
    *, registry: Registry, config: ScoringConfig, metrics: ScoringMetrics, sandbox: Sandbox | None
) -> AsyncIterator[OpenLanes]:
    """Open the lane of every verifier, and start the workers that are to be warm. Raises UserError that names it."""
    lanes = OpenLanes(registry=registry, metrics=metrics)
    async with AsyncExitStack() as stack:
        shared = await stack.enter_async_context(SharedResources())
        for verifier in registry.all():
            surroundings = Surroundings(
                verifier=verifier,
                config=config,
                metrics=metrics,
                sandbox=sandbox,
                judge=lanes.judge_part,
                version_of=lanes.version,
                shared=shared,
            )
            with _naming(verifier.name):
                lanes.add(verifier.name, await stack.enter_async_context(verifier.open(surroundings)))
        for name in config.workers.prewarm:
            await lanes.prewarm(name)
        yield lanes


@contextmanager
def _naming(verifier: str, *, of: str = "") -> Iterator[None]:
    """An error at the start says which verifier it is about."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{of}verifier {verifier!r}: {error}") from error
