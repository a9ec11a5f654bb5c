"""Whom an env_service waits for: the reward services, the learner, a generator."""

import asyncio
from collections.abc import Sequence

from env_service.fleet import GeneratorFleet
from env_service.link import LearnerLink
from protocol.http import Readiness
from services.http_client import HttpClient, ServiceError
from services.waiting import Waiting

_POLL_S = 1.0


async def reward_service_ready(
    http: HttpClient, urls: Sequence[str], waits: Waiting, *, poll_s: float = _POLL_S
) -> None:
    """Return when one of the reward services says that it is ready."""
    with waits.wait(f"the reward service at {' or '.join(urls)}", quiet_s=0.5):
        while True:
            if any(await asyncio.gather(*(_is_ready(http, url) for url in urls))):
                return
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


async def _is_ready(http: HttpClient, url: str) -> bool:
    try:
        return (await http.get(f"{url.rstrip('/')}/readyz", Readiness, deadline_s=5.0)).ready
    except ServiceError:
        return False
