"""The product's routes without FastAPI: the same handlers and bodies, a tenth of the time to make and to call them."""

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from fastapi import Request, Response
from fastapi.params import Depends, Query
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse

Endpoint = Callable[..., Awaitable[Any]]
Make = Callable[[Request, Mapping[str, str]], Awaitable[Any]]


@dataclass(frozen=True)
class LightRoute:
    """A route, and how each argument of its handler is made."""

    method: str
    pattern: re.Pattern[str]
    endpoint: Endpoint
    makers: Mapping[str, Make]


@dataclass
class LightRouter:
    """`routes` may also hold Starlette's, which take any path."""

    routes: list[Any] = field(default_factory=list)


class LightApp:
    """As much of FastAPI as the processes use."""

    def __init__(self) -> None:
        self.router = LightRouter()
        self.state = type("State", (), {})()
        self._handlers: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {}

    def get(self, path: str, **_: object) -> Callable[[Endpoint], Endpoint]:
        """See FastAPI."""
        return lambda endpoint: self._add("GET", path, endpoint)

    def post(self, path: str, **_: object) -> Callable[[Endpoint], Endpoint]:
        """See FastAPI."""
        return lambda endpoint: self._add("POST", path, endpoint)

    def put(self, path: str, **_: object) -> Callable[[Endpoint], Endpoint]:
        """See FastAPI."""
        return lambda endpoint: self._add("PUT", path, endpoint)

    def delete(self, path: str, **_: object) -> Callable[[Endpoint], Endpoint]:
        """See FastAPI."""
        return lambda endpoint: self._add("DELETE", path, endpoint)

    def add_api_route(self, path: str, endpoint: Endpoint, *, methods: Sequence[str], **_: object) -> None:
        """See FastAPI."""
        for method in methods:
            self._add(method, path, endpoint)

    def add_exception_handler(
        self, kind: type[Exception], handler: Callable[[Request, Exception], Awaitable[Response]]
    ) -> None:
        """See FastAPI."""
        self._handlers[kind] = handler

    def _add(self, method: str, path: str, endpoint: Endpoint) -> Endpoint:
        pattern = re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path))
        self.router.routes.append(LightRoute(method, pattern, endpoint, _makers(endpoint)))
        return endpoint

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from services.http.refusals import as_refusal, refused_answer

        request = Request(scope, receive, send)
        try:
            response = await self._respond(request)
        except HTTPException as error:
            handler = self._handlers.get(type(error))
            response = refused_answer(as_refusal(error, request)) if handler is None else await handler(request, error)
        await response(scope, receive, send)

    async def _respond(self, request: Request) -> Response:
        path, method = request.scope["path"], request.scope["method"]
        for route in self.router.routes:
            if not isinstance(route, LightRoute):
                return await route.endpoint(request)  # type: ignore[no-any-return]
            if route.method == method and (found := route.pattern.fullmatch(path)) is not None:
                named = found.groupdict()
                arguments = {name: await make(request, named) for name, make in route.makers.items()}
                answer = await route.endpoint(**arguments)
                return _whole(answer) if isinstance(answer, Response) else JSONResponse(answer)
        raise HTTPException(404, "no such route")


def _whole(answer: Response) -> Response:
    """The answer; that of a file in one piece, since starlette's would read it in threads of its own."""
    if not isinstance(answer, FileResponse):
        return answer
    return Response(Path(answer.path).read_bytes(), media_type=answer.media_type)


def create_app(**_: object) -> LightApp:
    """Stands for services.http.app.create_app."""
    app = LightApp()

    @app.get("/readyz")
    async def readyz() -> Response:
        from services.http.bodies import json_answer

        readiness: Any = _["readiness"]
        state = readiness()
        return json_answer(state, status=200 if state.ready else 503)

    return app


def _makers(endpoint: Endpoint) -> Mapping[str, Make]:
    hints = get_type_hints(endpoint, include_extras=True)
    parameters = inspect.signature(endpoint).parameters
    return {name: _maker(name, hints.get(name), parameter.default) for name, parameter in parameters.items()}


def _maker(name: str, hint: Any, default: Any) -> Make:
    if hint is Request:
        return _itself
    metadata = get_args(hint)[1:] if get_args(hint) else ()
    for each in metadata:
        if isinstance(each, Depends):
            return _depending(each.dependency)
        if isinstance(each, Query):
            return _queried(name, get_args(hint)[0], default)
    return _named(name, hint if hint is int else str)


async def _itself(request: Request, path: Mapping[str, str]) -> Request:
    return request


def _depending(dependency: Any) -> Make:
    async def make(request: Request, path: Mapping[str, str]) -> Any:
        return await dependency(request)

    return make


@lru_cache
def _queried(name: str, kind: Any, default: Any) -> Make:
    value = TypeAdapter(kind)

    async def make(request: Request, path: Mapping[str, str]) -> Any:
        given = request.query_params.get(name)
        return default if given is None and default is not inspect.Parameter.empty else value.validate_python(given)

    return make


@lru_cache
def _named(name: str, kind: Any) -> Make:
    async def make(request: Request, path: Mapping[str, str]) -> Any:
        return kind(path[name])

    return make
