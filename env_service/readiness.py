"""Whom an env_service waits for: the reward services, the learner, a generator."""

import asyncio

from env_service.fleet import GeneratorFleet
from env_service.link import LearnerLink
from services.rewards.client import RewardClient
from services.waiting import Waiting

_POLL_S = 1.0


async def reward_services_ready(client: RewardClient, waits: Waiting, *, poll_s: float = _POLL_S) -> None:
    """Return when, of the reward services for each verifier, one says that it is ready."""
    with waits.wait("the reward services", quiet_s=0.5) as wait:
        while missing := await client.unready():
            sets = (" or ".join(urls) for urls in missing)
            wait.whom = f"the reward service at {', and the one at '.join(sets)}"
            await asyncio.sleep(poll_s)


async def watch_peers(link: LearnerLink, fleet: GeneratorFleet, waits: Waiting, *, learner: str) -> None:
    """Keep `waits` true to who is missing, until cancelled."""
    while True:
        if not link.welcomed:
            with waits.wait(f"the learner at {learner}", quiet_s=0.5):
                await link.wait_for(lambda: link.welcomed)
        elif not fleet.serving:
            with waits.wait("a generator that serves", quiet_s=0.5):
                await link.wait_for(lambda: bool(fleet.serving) or not link.welcomed)
        elif not fleet.answering:
            names = ", ".join(generator.generator_id for generator in fleet.serving)
            with waits.wait(f"generators that do not answer: {names}", quiet_s=0.5):
                await link.wait_for(lambda: fleet.answering or not (fleet.serving and link.welcomed))
        else:
            await link.wait_for(lambda: not (fleet.answering and link.welcomed))
