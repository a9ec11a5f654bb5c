"""The learner's routes of releases, and announcements and downloads of generators of every channel."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated

from fastapi import Depends, FastAPI, Response

from learner.releases.feedback import FeedbackStore
from learner.releases.releases import Releases
from learner.weights.fleet import FleetMembers, JoinRefused
from learner.weights.published import PublishedWeights, VersionNotPublished
from protocol.feedback import Feedback, ServedAnswer, ServedCompletion
from protocol.fleet import Announcement, AnnouncementAnswer, PullPlan, WeightForm
from protocol.releases import Promote, RollBack
from services.http.bodies import json_answer, json_body
from services.http.refusals import RequestRefused

_DISK_S = 30.0


class FleetsByChannel:
    """The fleet of rollouts, and those of users if there are releases."""

    def __init__(self, latest: FleetMembers, releases: Releases | None) -> None:
        self._latest = latest
        self._releases = releases

    def announce(self, announcement: Announcement, *, now: float) -> AnnouncementAnswer:
        """Raises JoinRefused."""
        channel = announcement.channel
        if channel == "latest":
            return self._latest.announce(announcement, now=now)
        if self._releases is None:
            raise JoinRefused(
                f"generator {announcement.generator_id} has join.channel = {channel!r}, and this learner releases "
                "nothing: set learner.release.enabled to true, or join.channel to latest"
            )
        return self._releases.channel_of(channel).fleet.announce(announcement, now=now)


class ShelvesByVersion:
    """The first of several shelves that has a version."""

    def __init__(self, shelves: Sequence[PublishedWeights]) -> None:
        self._shelves = shelves

    def plan(self, version: str, form: WeightForm = "whole") -> PullPlan:
        """Raises VersionNotPublished."""
        return self._shelf(version, form).plan(version, form)

    async def chunk(self, version: str, *, index: int, offset: int, length: int, form: WeightForm = "whole") -> bytes:
        """Raises VersionNotPublished, and ServiceError if another rank does not hand it out."""
        return await self._shelf(version, form).chunk(version, index=index, offset=offset, length=length, form=form)

    def _shelf(self, version: str, form: WeightForm) -> PublishedWeights:
        for shelf in self._shelves:
            try:
                shelf.plan(version, form)
            except VersionNotPublished:
                continue
            return shelf
        return self._shelves[0]


def add_feedback_routes(app: FastAPI, *, store: FeedbackStore, counted: Callable[[str], None]) -> None:
    """`POST /v1/served` and `/v1/feedback`. `counted` is told what became of each reward."""

    @app.post("/v1/served")
    async def served(body: Annotated[ServedCompletion, Depends(json_body(ServedCompletion))]) -> Response:
        """Keep an answer that a generator has given to a user, so that it can be rated."""
        await asyncio.to_thread(store.served, body)
        return json_answer(ServedAnswer(id=body.id))

    @app.post("/v1/feedback")
    async def feedback(body: Annotated[Feedback, Depends(json_body(Feedback))]) -> Response:
        """Keep a user's reward for an answer, by its id and key; it is on the disk when this is answered."""
        try:
            answer = await asyncio.to_thread(store.rate, body)
        except RequestRefused:
            counted("refused")
            raise
        except OSError as error:
            raise RequestRefused(503, "disk", f"the reward is not kept: {error}", retry_after_s=_DISK_S) from error
        counted(answer.outcome)
        return json_answer(answer)


def add_release_routes(app: FastAPI, *, releases: Releases) -> None:
    """`GET /v1/releases`, `POST /v1/releases/rollback` and `/promote`."""

    @app.get("/v1/releases")
    async def status() -> Response:
        """The released version, former ones, a trial with users, and the generators that hold them."""
        return json_answer(releases.status())

    @app.post("/v1/releases/rollback")
    async def roll_back(body: Annotated[RollBack, Depends(json_body(RollBack))]) -> Response:
        """Release a former version again; promotions are held from then on."""
        releases.check_run(body.run)
        return json_answer(await releases.roll_back(body.version, reason=body.reason, wait_s=body.wait_s))

    @app.post("/v1/releases/promote")
    async def promote(body: Annotated[Promote, Depends(json_body(Promote))]) -> Response:
        """Let promotions go on, or release the candidate that is on trial with users."""
        releases.check_run(body.run)
        return json_answer(await releases.promote(body.version, wait_s=body.wait_s))
