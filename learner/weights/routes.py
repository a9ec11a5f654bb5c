"""The learner's HTTP routes: generators announce themselves here."""

import time
from typing import Annotated

from fastapi import Depends, FastAPI, Response

from learner.weights.fleet import Fleet, JoinRefused
from protocol.fleet import Announcement
from services.http_app import RequestRefused, json_answer, json_body


def add_routes(app: FastAPI, *, fleet: Fleet) -> None:
    """`POST /v1/generators`; refuses with 409 a generator that does not fit the run."""

    @app.post("/v1/generators")
    async def announce(announcement: Annotated[Announcement, Depends(json_body(Announcement))]) -> Response:
        try:
            return json_answer(fleet.announce(announcement, now=time.monotonic()))
        except JoinRefused as error:
            raise RequestRefused(409, "join_refused", str(error)) from error
