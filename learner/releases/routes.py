"""The learner's routes of releases, and announcements and downloads of generators of every channel."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import Depends, FastAPI, Response

from learner.releases.releases import Releases
from learner.weights.fleet import FleetMembers, JoinRefused
from learner.weights.published import PublishedWeights, VersionNotPublished
from protocol.fleet import Announcement, AnnouncementAnswer, PullPlan, WeightForm
from protocol.releases import Promote, RollBack
from services.http.bodies import json_answer, json_body


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

    def chunk(self, version: str, *, index: int, offset: int, length: int, form: WeightForm = "whole") -> bytes:
        """Raises VersionNotPublished."""
        return self._shelf(version, form).chunk(version, index=index, offset=offset, length=length, form=form)

    def _shelf(self, version: str, form: WeightForm) -> PublishedWeights:
        for shelf in self._shelves:
            try:
                shelf.plan(version, form)
            except VersionNotPublished:
                continue
            return shelf
        return self._shelves[0]


def add_release_routes(app: FastAPI, *, releases: Releases) -> None:
    """`GET /v1/releases`, `POST /v1/releases/rollback` and `/promote`."""

    @app.get("/v1/releases")
    async def status() -> Response:
        """The released version, former ones, a trial with users, and the generators that hold them."""
        return json_answer(releases.status())

    @app.post("/v1/releases/rollback")
    async def roll_back(body: Annotated[RollBack, Depends(json_body(RollBack))]) -> Response:
        """Release a former version again; promotions are held from then on."""
        return json_answer(await releases.roll_back(body.version, reason=body.reason, wait_s=body.wait_s))

    @app.post("/v1/releases/promote")
    async def promote(body: Annotated[Promote, Depends(json_body(Promote))]) -> Response:
        """Let promotions go on, or release the candidate that is on trial with users."""
        return json_answer(await releases.promote(body.version, wait_s=body.wait_s))
