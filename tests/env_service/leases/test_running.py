"""Order in which leases get places; no place is ever lost."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from env_service.leases.running import RunningLeases
from env_service.rollouts.completions import RolloutProgress
from env_service.rollouts.outcomes import Outcome, RolloutMetrics
from protocol.generation import GeneratePart
from protocol.lease_keys import key_of
from protocol.messages import OTHERS, FailedLease, Lease
from protocol.trajectories import Purpose, VersionSpan
from services.http.metrics import Metrics
from tests.env_service.peers import lease


@dataclass
class OnePlace:
    """Leases at one place. Each goes on until it is released; at its report these are `cancelled_then`."""

    leases: RunningLeases = field(init=False)
    cancelled_then: Sequence[Lease] = ()
    started: "asyncio.Queue[tuple[Purpose, int]]" = field(default_factory=asyncio.Queue)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, each: Lease, progress: RolloutProgress) -> Outcome:
        self.started.put_nowait((each.purpose, each.lease_id))
        await self.released.wait()
        self.released.clear()
        return FailedLease(
            incarnation=each.incarnation, lease_id=each.lease_id, attempt=each.attempt, purpose=each.purpose,
            data_fault=False, reason="released",
        )  # fmt: skip

    async def report(self, outcome: Outcome) -> None:
        self.leases.cancel(map(key_of, self.cancelled_then))

    async def next_started(self) -> tuple[Purpose, int]:
        async with asyncio.timeout(60):
            return await self.started.get()


@asynccontextmanager
async def one_place() -> AsyncIterator[OnePlace]:
    made = OnePlace()
    async with asyncio.TaskGroup() as tasks:
        made.leases = RunningLeases(
            run=made.run, report=made.report, capacity=1, tasks=tasks, metrics=RolloutMetrics(Metrics("env-service"))
        )
        yield made
        made.leases.cancel_all()


async def test_of_those_that_wait_the_evaluation_and_then_the_oldest_lease_gets_the_place() -> None:
    async with one_place() as place:
        waiting = [lease(5), lease(9), lease(3), lease(7).model_copy(update={"purpose": "evaluate"})]
        for each in waiting:
            await place.leases.start(each)
        order = [await place.next_started()]
        for _ in waiting[1:]:
            place.released.set()
            order.append(await place.next_started())
        assert order == [("train", 5), ("evaluate", 7), ("train", 3), ("train", 9)]


async def test_a_lease_without_a_place_waits_as_for_a_host_which_is_not_held_against_it() -> None:
    async with one_place() as place:
        for number in (1, 2):
            await place.leases.start(lease(number))
        await place.next_started()
        told = {each.lease_id: each.waits_for for each in place.leases.report_progress()}
        assert (told[1], told[2] in OTHERS) == ("environment", True)


async def test_a_lease_that_is_cancelled_at_the_moment_it_gets_the_place_passes_it_on() -> None:
    async with one_place() as place:
        for number in range(3):
            await place.leases.start(lease(number))
        assert await place.next_started() == ("train", 0)
        place.cancelled_then = [lease(1)]
        place.released.set()
        assert await place.next_started() == ("train", 2)


def test_a_heartbeat_names_the_oldest_version_that_sampled_a_token_in_any_turn() -> None:
    progress = RolloutProgress()
    for version in ("1.7", "1.4", "1.9"):
        (completion,) = progress.completions(1)
        spans = (VersionSpan(version=version, start=0, end=1),)
        part = GeneratePart(
            index=0, token_ids=(3,), behavior_logprobs=(-1.0,), version_spans=spans, finish_reason="stop"
        )
        completion.extend(part, generator_id="g")
    assert progress.oldest_version() == "1.4"
