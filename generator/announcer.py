"""Telling the learner, again and again, that this generator is there."""

import asyncio
import logging

from generator.serving import Serving
from protocol.fleet import Announcement, AnnouncementAnswer
from services.http_client import HttpClient, ServiceError, ServiceRefused
from services.waiting import Waiting

log = logging.getLogger(__name__)

_RETRY_S = 1.0


class JoinRefusedByLearner(RuntimeError):
    """The learner does not take this generator, and would not at another try."""


async def announce(
    *, learner: str, client: HttpClient, announcement: Announcement, serving: Serving, waits: Waiting
) -> None:
    """Announces until cancelled; waits for a learner that is away. Raises JoinRefusedByLearner."""
    while True:
        with waits.wait(f"the learner at {learner}", quiet_s=2.0, blocks_readiness=serving.version is None):
            answer = await _announce_once(learner, client, announcement, serving)
            while answer is None:
                await asyncio.sleep(_RETRY_S)
                answer = await _announce_once(learner, client, announcement, serving)
        await asyncio.sleep(answer.announce_every_s)


async def _announce_once(
    learner: str, client: HttpClient, announcement: Announcement, serving: Serving
) -> AnnouncementAnswer | None:
    current = announcement.model_copy(update={"serving_version": serving.version})
    try:
        return await client.post(f"{learner.rstrip('/')}/v1/generators", current, AnnouncementAnswer, deadline_s=5.0)
    except ServiceRefused as error:
        raise JoinRefusedByLearner(error.message) from error
    except ServiceError as error:
        log.debug("the learner does not answer: %s", error)
        return None
