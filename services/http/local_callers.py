"""Refusal, by a service without a token, of callers that are no program of this machine, such as a page of the web."""

import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from prometheus_client import Counter
from starlette.types import ASGIApp, Receive, Scope, Send

from services.http.refusals import RequestRefused, send_refusal
from services.network import is_loopback

_SIMPLE_TYPES = ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
_MAX_TOLD = 200


class LocalCallers:
    """Refuses, where there is no token, what a page of the web can have a browser of this machine send.

    A page can point its own name at 127.0.0.1, and so read and write what listens there: such a request has a Host or
    an Origin that is no name of this machine. And without asking the service first a browser sends to any address a
    body that is a form or plain text: a body must say that it is JSON, or another type that pages may not send.
    """

    def __init__(
        self, app: ASGIApp, *, open_paths: Collection[str], refused: Counter, known_as: Collection[str] = ()
    ) -> None:
        self._app = app
        self._known_as = frozenset(map(str.lower, (*known_as, socket.gethostname())))
        self._open_paths = open_paths
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
        elif problem := _foreign(scope, self._known_as):
            refusal = RequestRefused(403, "foreign_caller", problem)
            await send_refusal(refusal, self._refused, scope, receive, send)
        elif problem := _simple_body(scope):
            refusal = RequestRefused(415, "content_type", problem)
            await send_refusal(refusal, self._refused, scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _foreign(scope: Scope, known_as: Collection[str]) -> str:
    """Complaint about a Host or Origin that does not mean this machine; empty if both do."""
    bound = (scope.get("server") or ("",))[0].lower()
    headers = scope["headers"]
    hosts = [(f"Host {_told(value)}", _host_in(b"//" + value)) for name, value in headers if name == b"host"]
    origins = [(f"Origin {_told(value)}", _host_in(value)) for name, value in headers if name == b"origin"]
    for shown, host in (hosts or [("a request without Host", "")]) + origins:
        if not host or not (_is_local_name(host) or host == bound or host in known_as):
            return (
                f"{shown} is no name of this machine, and without a token only callers on it are served; expected "
                f"localhost, 127.0.0.1 or {bound or '[::1]'}: call it by one of these, or set http.token, with which "
                "any name will do"
            )
    return ""


def _is_local_name(host: str) -> bool:
    return host.endswith(".localhost") or is_loopback(host)


def _host_in(address: bytes) -> str:
    try:
        return (urlsplit(address.decode("ascii")).hostname or "").removesuffix(".")
    except ValueError:
        return ""


def _simple_body(scope: Scope) -> str:
    """Complaint about a body of a type that any page may send; empty without one."""
    headers = dict(scope["headers"])
    if headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers:
        return ""
    shown = headers.get(b"content-type", b"")
    if shown.partition(b";")[0].strip().lower().decode("latin-1") not in _SIMPLE_TYPES:
        return ""
    got = f"Content-Type {_told(shown)}" if shown else "a body without Content-Type"
    return f"{got}; expected 'Content-Type: application/json' with a body, as this service has no token: send that"


def _told(value: bytes) -> str:
    return repr(value.decode("latin-1")[:_MAX_TOLD])
