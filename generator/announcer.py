"""Telling the learner, again and again, that this generator is there."""

import asyncio
import logging

from generator.serving import Serving
from protocol.fleet import Announcement, AnnouncementAnswer
from services.http.client import HttpClient, ServiceError, ServiceMistrusted, ServiceRefused, ServiceUnreachable
from services.http.waiting import QUIET_S, Wait, Waiting
from services.process import NeverServed

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_NO_LEARNER = (
    "it has not answered, as while it loads its model: start it, or correct generator.join.learner, which is the "
    "address of its HTTP server"
)

_FINAL = frozenset({401, 403, 409})
"""Statuses of refusals that would be the same at another try."""

_EXPELLED_RETRY_S = 10.0
_LEAVE_S = 2.0


class JoinRefusedByLearner(RuntimeError):
    """The learner does not take this generator, and would not at another try."""


class NeverTaken(JoinRefusedByLearner, NeverServed):
    """It did not take it from the first."""


class _ProcessRefusal(Exception):
    """The learner does not take this process, but its next start may."""


async def announce(
    *, learner: str, client: HttpClient, announcement: Announcement, serving: Serving, waits: Waiting
) -> None:
    """Announces until cancelled, at once when something changes; waits for a learner that is away.

    Raises JoinRefusedByLearner for what will not go away: another protocol, model or token, or an id taken by a later
    process. Any other refusal, as of a request that came too slowly or of a proxy that is busy, may pass, and is waited
    out. A generator that was expelled stays up, serves nothing, and goes on asking: it is taken in again by the
    learner's next start, and checked anew. What it holds is kept for whoever looks for the fault; a restart of its
    process is the remedy, and left to its supervisor.
    """
    while True:
        try:
            await _announce_for_a_while(learner, client, announcement, serving, waits)
        except _ProcessRefusal as expelled:
            logger.error("%s", expelled)
            serving.holds(None)
            with waits.wait(f"the learner at {learner} to take it back", remedy="restart this process"):
                await _wait_until_taken_back(learner, client, announcement, serving)


async def _announce_for_a_while(
    learner: str, client: HttpClient, announcement: Announcement, serving: Serving, waits: Waiting
) -> None:
    while True:
        whom, first = f"the learner at {learner}", serving.version is None
        with waits.wait(whom, quiet_s=QUIET_S, remedy=_NO_LEARNER, blocks_readiness=first) as wait:
            answer = await _announce_once(learner, client, announcement, serving, wait)
            while answer is None:
                await asyncio.sleep(_RETRY_S)
                answer = await _announce_once(learner, client, announcement, serving, wait)
        await serving.news(within_s=answer.announce_every_s)


async def _wait_until_taken_back(
    learner: str, client: HttpClient, announcement: Announcement, serving: Serving
) -> None:
    while True:
        await asyncio.sleep(_EXPELLED_RETRY_S)
        try:
            if await _announce_once(learner, client, announcement, serving) is not None:
                return
        except _ProcessRefusal as expelled:
            logger.debug("%s", expelled)


async def announce_leave(*, learner: str, client: HttpClient, announcement: Announcement) -> None:
    """Tells a learner that is there that this generator leaves, so that nobody sends it requests."""
    leaving = announcement.model_copy(update={"serving_version": None, "condition": "leaving"})
    try:
        await client.post(f"{learner.rstrip('/')}/v1/generators", leaving, AnnouncementAnswer, deadline_s=_LEAVE_S)
    except ServiceError as error:
        # Where it ended first, as at the end of a run, nobody is left to hear it.
        level = logging.DEBUG if isinstance(error, ServiceUnreachable) else logging.INFO
        logger.log(level, "could not tell the learner that this generator leaves: %s", error)


async def _announce_once(
    learner: str, client: HttpClient, announcement: Announcement, serving: Serving, wait: Wait | None = None
) -> AnnouncementAnswer | None:
    """The learner's answer; None if there is none, and why is the remedy of the `wait` that it is for."""
    condition = serving.condition
    version = serving.version if condition == "able" else None
    current = announcement.model_copy(update={"serving_version": version, "condition": condition})
    try:
        return await client.post(f"{learner.rstrip('/')}/v1/generators", current, AnnouncementAnswer, deadline_s=5.0)
    except ServiceRefused as error:
        if error.kind == "expelled":
            raise _ProcessRefusal(error.message) from error
        if error.status in _FINAL:
            refused = NeverTaken if serving.version is None else JoinRefusedByLearner
            raise refused(error.message) from error
        logger.info("the learner did not take this generator's announcement, retrying: %s", error)
        return None
    except ServiceError as error:
        logger.debug("the learner does not answer: %s", error)
        if wait is not None:
            wait.remedy = str(error) if _is_of_certificates(error) else _NO_LEARNER
        return None


def _is_of_certificates(error: ServiceError) -> bool:
    """Tells a learner that is there, at the right address, from one that is not. One that does not take our certificate
    leaves in the middle of a request.
    """
    broke = isinstance(error, ServiceUnreachable) and error.sent and error.url.startswith("https://")
    return isinstance(error, ServiceMistrusted) or broke
