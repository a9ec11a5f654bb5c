"""A rollout and all that it talks to, on loopback."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from env_service.checkpoints.records import LeaseRecords
from env_service.environments import catalog
from env_service.environments.interface import OfferedEnvironment
from env_service.environments.task_configs import AdditionTasks
from env_service.environments.tokenization import Tokenization
from env_service.rollouts.completions import RolloutProgress
from env_service.rollouts.fleet import GeneratorFleet
from env_service.rollouts.generation import Generation
from env_service.rollouts.judging import GroupScoring
from env_service.rollouts.match import Opponent
from env_service.rollouts.outcomes import RolloutMetrics
from env_service.rollouts.rollout import Attempts, Rollout
from protocol.generation import GeneratePart, GenerateRequest
from protocol.messages import FailedLease, FinishedLease, Lease
from services.http.backoff import Backoff
from services.http.breakers import Breakers, BreakerSettings
from services.http.client import HttpClient
from services.http.metrics import Metrics
from services.rewards.client import RewardClient
from services.rewards.settings import ClientSettings
from tests.env_service.peers import END, ScriptedCompletions, ScriptedRewards, lease, part, served, serving

Script = Callable[[GenerateRequest], Sequence[GeneratePart | None] | int]


TEXT = (0, 8, 5, END)


def well(request: GenerateRequest) -> Sequence[GeneratePart | None]:
    """The rest of the text for each completion, whatever its beginning is."""
    rest = TEXT[prefix_of(request) :]
    return [part(index, rest) for index in range(request.n)]


def prefix_of(request: GenerateRequest) -> int:
    """Number of a completion's tokens that the prompt of a plain lease ends with."""
    return lease().sampling.max_tokens - request.sampling.max_tokens


def exact(completion: str, arguments: dict[str, object]) -> float | str:
    return 1.0 if completion == arguments["answer"] else 0.0


@dataclass
class Bench:
    """A rollout and all that it talks to."""

    rollout: Rollout
    fleet: GeneratorFleet
    generators: list[ScriptedCompletions]
    rewards: list[ScriptedRewards]
    pauses: list[float]
    metrics: Metrics

    async def run(self, granted: Lease) -> FinishedLease | FailedLease:
        async with asyncio.timeout(60):
            return await self.rollout.run(granted, RolloutProgress())

    async def finished(self, granted: Lease) -> FinishedLease:
        outcome = await self.run(granted)
        assert isinstance(outcome, FinishedLease), outcome
        return outcome

    async def failed(self, granted: Lease) -> FailedLease:
        outcome = await self.run(granted)
        assert isinstance(outcome, FailedLease)
        return outcome


RESTS = BreakerSettings(rest_s=0.02, rest_max_s=0.1)
MakeBench = Callable[..., Awaitable[Bench]]


@asynccontextmanager
async def benches(model: Path) -> AsyncIterator[MakeBench]:
    """Makes benches; what fails rests shortly."""
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(HttpClient())

        async def make(
            *scripts: Script,
            rewards: Sequence[ScriptedRewards] | None = None,
            extra: Sequence[OfferedEnvironment] = (),
            timeout_s: float = 20.0,
            silence_s: float = 5.0,
            environment_timeout_s: float = 5.0,
            agents: Attempts | None = None,
            opponents: Mapping[str, Opponent] | None = None,
            records: LeaseRecords | None = None,
        ) -> Bench:
            generators = [ScriptedCompletions(script) for script in scripts or (well,)]
            judges = list(rewards or [ScriptedRewards(exact)])
            for generator in generators:
                generator.url = await stack.enter_async_context(served(generator.handle, "/v1/generate"))
            for judge in judges:
                judge.url = await stack.enter_async_context(served(judge.handle, "/v1/score"))
            fleet = GeneratorFleet(breakers=Breakers("generator", settings=RESTS))
            fleet.replace([serving(f"g{index}", generator.url) for index, generator in enumerate(generators)])
            pauses: list[float] = []

            async def note(pause_s: float) -> None:
                pauses.append(pause_s)

            backoff = Backoff(first_s=1.0, max_s=8.0, sleep=note)
            process_metrics = Metrics("env-service")
            metrics = RolloutMetrics(process_metrics)
            settings = ClientSettings(
                deadline_s=5, patience_s=None, attempts=3, item_attempts=2, rests=RESTS, backoff=backoff
            )
            client = RewardClient([judge.url for judge in judges], settings=settings, metrics=process_metrics)
            await stack.enter_async_context(client)
            offered = {**catalog.build([AdditionTasks()]), **{each.name: each for each in extra}}
            rollout = Rollout(
                env_id="env-0",
                environments=offered,
                tokenization=Tokenization(model),
                generation=Generation(
                    http=http,
                    fleet=fleet,
                    attempts=3,
                    silence_s=silence_s,
                    deadline_s=20,
                    backoff=backoff,
                    metrics=metrics,
                ),
                scoring=GroupScoring(client),
                timeout_s=timeout_s,
                environment_timeout_s=environment_timeout_s,
                agents=agents,
                metrics=metrics,
                opening_attempts=3,
                backoff=backoff,
                opponents=opponents,
                records=records,
            )
            return Bench(rollout, fleet, generators, judges, pauses, process_metrics)

        yield make
