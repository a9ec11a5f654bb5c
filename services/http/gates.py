"""Gates before an application's routes: the token, the size of the body, and room for the request."""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack

from prometheus_client import Counter
from pydantic import SecretStr
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.http.refusals import RequestRefused, send_refusal
from services.rotating_secrets import is_shown

Door = Callable[[int], AbstractContextManager[None]]
"""Given the announced bytes of a body before it is read, it raises RequestRefused or lets the request in. What it
returns is open until the body has been read, or nobody will read it.
"""


def is_open(path: str, open_paths: Collection[str]) -> bool:
    """True if `path` is one of the open paths, or below one that ends in a slash; "/" opens only itself."""
    return path in open_paths or any(
        path.startswith(folder) for folder in open_paths if folder.endswith("/") and folder != "/"
    )


class BearerToken:
    """Refuse with 401 a request without the token, except at the open paths. An open path ending in / opens all below
    it, but "/" opens only itself. `readers` are tokens by the folder that each lets be read, by GET alone.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: SecretStr,
        readers: Mapping[str, SecretStr],
        open_paths: Collection[str],
        refused: Counter,
    ) -> None:
        self._app = app
        self._open_paths = open_paths
        self._token = token
        self._readers = readers
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or is_open(scope["path"], self._open_paths):
            await self._app(scope, receive, send)
            return
        shown = next((value for name, value in scope["headers"] if name == b"authorization"), None)
        if shown is not None and (is_shown(shown, self._token, prefix="Bearer ") or self._may_read(shown, scope)):
            await self._app(scope, receive, send)
            return
        got = "none" if shown is None else "another"
        message = f"this service wants 'Authorization: Bearer <token>' with its configured token; got {got}"
        await send_refusal(RequestRefused(401, "unauthorized", message), self._refused, scope, receive, send)

    def _may_read(self, shown: bytes, scope: Scope) -> bool:
        path: str = scope["path"]
        tokens = [token for folder, token in self._readers.items() if path.startswith(folder) and ".." not in path]
        return scope.get("method") == "GET" and any(is_shown(shown, token, prefix="Bearer ") for token in tokens)


class Doors:
    """Refuses a request to a path with a door at once, which costs far less than to route it and to read it.

    The connection is kept: a client that is told to come again will.
    """

    def __init__(self, app: ASGIApp, *, doors: Mapping[str, Door], refused: Counter) -> None:
        self._app = app
        self._doors = doors
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        door = self._doors.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if door is None:
            await self._app(scope, receive, send)
            return
        with ExitStack() as arriving:
            try:
                arriving.enter_context(door(_announced_bytes(scope)))
            except RequestRefused as refusal:
                await send_refusal(refusal, self._refused, scope, receive, send, close=False)
                return

            async def received() -> Message:
                message = await receive()
                if not message.get("more_body", False):
                    arriving.close()
                return message

            await self._app(scope, received, send)


def _announced_bytes(scope: Scope) -> int:
    announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    return int(announced) if announced.isdigit() else 0


class BodyLimit:
    """Refuses with 413 a body over the limit, announced or not."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, refused: Counter) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if (announced := _announced_bytes(scope)) > self._max_bytes:
            await send_refusal(self._too_large(announced), self._refused, scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_bytes:
                raise self._too_large(seen)
            return message

        await self._app(scope, counted, send)

    def _too_large(self, size: int) -> RequestRefused:
        message = f"a body of at least {size} bytes; at most {self._max_bytes} are taken"
        return RequestRefused(413, "body_too_large", message, expected=self._max_bytes, got=size)
