"""Blame for a call that failed: the request's, the peer's, or nobody's because no peer took it up."""

from typing import Literal

from protocol.status import Readiness
from services.http.client import (
    HttpClient,
    ServiceError,
    ServiceFailed,
    ServiceRefused,
    ServiceTimeout,
    ServiceUnreachable,
)

Fault = Literal["request", "unavailable", "counterpart"]
"""`request`: it would be refused again. `unavailable`: nobody took it up, or nobody answers, which says nothing about
it. `counterpart`: it was taken up, and the counterpart broke over it or answered nonsense.
"""

_REQUEST_IS_WRONG = frozenset({400, 413, 422})
"""The statuses that another attempt at the same request would get again. A wrong token (401) is not its fault."""

_NOT_NOW = frozenset({408, 429, 503})
"""Sent too slowly; busy; draining, starting or without weights: the request itself was not looked at."""

_SIGN_OF_LIFE_S = 2.0


def fault_of(error: ServiceError) -> Fault:
    """Side to blame for a call that failed."""
    match error:
        case ServiceRefused(status=status) if status in _REQUEST_IS_WRONG:
            return "request"
        case ServiceRefused(status=status) | ServiceFailed(status=status) if status in _NOT_NOW:
            return "unavailable"
        case ServiceTimeout() | ServiceUnreachable(sent=False):
            return "unavailable"
        case _:
            return "counterpart"


def is_busy(error: ServiceError) -> bool:
    """True if the counterpart has more to do than it can take, and says so (status 429)."""
    return isinstance(error, ServiceRefused) and error.status == 429


def is_too_large(error: ServiceError) -> bool:
    """True if the request was refused for its size (status 413)."""
    return isinstance(error, ServiceRefused) and error.status == 413


async def see_alive(http: HttpClient, url: str) -> None:
    """Before a probe: a process that hangs costs two seconds, and not the deadline of a whole request.

    Raises ServiceTimeout, ServiceUnreachable. Any answer will do: the request itself shows the rest.
    """
    try:
        await http.get(f"{url.rstrip('/')}/readyz", Readiness, deadline_s=_SIGN_OF_LIFE_S)
    except (ServiceFailed, ServiceRefused):
        return
