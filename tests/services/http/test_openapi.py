"""The OpenAPI document says what a process takes now: bodies of handlers, and where a token is wanted."""

from typing import Annotated, Any

import aiohttp
from fastapi import Depends, FastAPI
from pydantic import SecretStr

from protocol.model import WireModel
from protocol.status import Readiness
from services.http.app import OPEN_PATHS, create_app
from services.http.bodies import json_answer, json_body
from services.http.metrics import Metrics
from tests.services.http.test_app import AUTHORIZED, TOKEN, Ask, serving


class Replacement(WireModel):
    text: str


def app_of(token: SecretStr | None = TOKEN, open_paths: frozenset[str] = OPEN_PATHS) -> FastAPI:
    app = create_app(
        service="learner", version="1", token=token, readiness=lambda: Readiness(ready=True),
        metrics=Metrics("learner"), open_paths=open_paths,
    )  # fmt: skip

    @app.post("/v1/things/{name:path}")
    async def add(name: str, body: Annotated[Ask, Depends(json_body(Ask))]) -> object:
        return json_answer(body)

    @app.put("/v1/things/{name:path}")
    async def replace(name: str, body: Annotated[Replacement, Depends(json_body(Replacement))]) -> object:
        return json_answer(body)

    @app.get("/v1/things/{name:path}")
    async def read(name: str) -> object:
        return {}

    return app


def body_of(document: dict[str, Any], path: str, method: str) -> object:
    body = document["paths"][path][method].get("requestBody")
    return body and body["content"]["application/json"]["schema"]


def test_each_method_has_the_body_that_it_reads() -> None:
    document = app_of().openapi()
    path = "/v1/things/{name}"
    assert body_of(document, path, "post") == {"$ref": "#/components/schemas/Ask"}
    assert body_of(document, path, "put") == {"$ref": "#/components/schemas/Replacement"}
    assert body_of(document, path, "get") is None
    assert document["components"]["schemas"]["Ask"]["required"] == ["tokens"]
    assert document["paths"][path]["post"]["responses"]["4XX"]["content"]["application/json"]["schema"][
        "$ref"
    ].endswith("/ErrorBody")


async def test_a_route_that_comes_after_the_first_request_is_described() -> None:
    app = app_of()
    async with serving(app) as url, aiohttp.ClientSession(base_url=url, headers=AUTHORIZED) as session:
        async with session.get("/openapi.json") as answer:
            assert "/v1/later" not in (await answer.json())["paths"]

        @app.post("/v1/later")
        async def later(body: Annotated[Ask, Depends(json_body(Ask))]) -> object:
            return json_answer(body)

        async with session.get("/openapi.json") as answer:
            assert body_of(await answer.json(), "/v1/later", "post") == {"$ref": "#/components/schemas/Ask"}


def test_the_token_is_wanted_but_at_open_paths_and_below_open_folders() -> None:
    document = app_of(open_paths=OPEN_PATHS | {"/", "/v1/things/"}).openapi()
    assert document["security"] == [{"token": []}]
    wanted = {
        path for path, operations in document["paths"].items() for each in operations.values() if "security" not in each
    }
    assert wanted == set()
    closed = app_of().openapi()
    assert closed["paths"]["/healthz"]["get"]["security"] == []
    assert "security" not in closed["paths"]["/v1/things/{name}"]["post"]
    assert "security" not in app_of(token=None).openapi()
