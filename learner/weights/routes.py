"""The learner's HTTP routes for generators: they announce themselves here, and download published weights."""

import time
from typing import Annotated

import xxhash
from fastapi import Depends, FastAPI, Query, Response

from learner.weights.fleet import Fleet, JoinRefused
from learner.weights.shelf import NotOnTheShelf, Shelf
from protocol.fleet import CHUNK_HASH_HEADER, Announcement
from services.http_app import json_answer, json_body
from services.refusals import RequestRefused


def add_routes(app: FastAPI, *, fleet: Fleet, shelf: Shelf) -> None:
    """`POST /v1/generators`, which refuses with 409 a generator that does not fit the run; the published weights."""

    @app.post("/v1/generators")
    async def announce(announcement: Annotated[Announcement, Depends(json_body(Announcement))]) -> Response:
        try:
            return json_answer(fleet.announce(announcement, now=time.monotonic()))
        except JoinRefused as error:
            raise RequestRefused(409, error.kind, str(error)) from error

    add_weight_routes(app, shelf=shelf)


def add_weight_routes(app: FastAPI, *, shelf: Shelf) -> None:
    """`GET /v1/weights/{version}/plan`, and the chunks of its buckets; 404 for what is not kept."""

    @app.get("/v1/weights/{version}/plan")
    async def plan(version: str) -> Response:
        try:
            return json_answer(shelf.plan(version))
        except NotOnTheShelf as error:
            raise RequestRefused(404, "not_kept", str(error)) from error

    @app.get("/v1/weights/{version}/buckets/{index}")
    async def chunk(
        version: str, index: int, offset: Annotated[int, Query()], length: Annotated[int, Query()]
    ) -> Response:
        try:
            data = shelf.chunk(version, index=index, offset=offset, length=length)
        except NotOnTheShelf as error:
            raise RequestRefused(404, "not_kept", str(error)) from error
        headers = {CHUNK_HASH_HEADER: xxhash.xxh3_64_hexdigest(data)}
        return Response(data, media_type="application/octet-stream", headers=headers)
