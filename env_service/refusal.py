"""Whose fault a failed call is, and what a breaker is told of it."""

from collections.abc import Iterator
from contextlib import contextmanager

from env_service.failures import DataFailure, InfrastructureFailure, RolloutFailure, Unavailable
from protocol.http import Readiness
from services.breaker import Call
from services.http_client import (
    HttpClient,
    ServiceError,
    ServiceFailed,
    ServiceRefused,
    ServiceTimeout,
    ServiceUnreachable,
)

_TASK_IS_WRONG = frozenset({400, 413, 422})
"""The statuses that another attempt at the same task would get again. A wrong token (401) is not the task's fault."""

_NOT_NOW = frozenset({429, 503})
"""Busy; draining, starting or without weights: the request itself was not looked at."""

_SIGN_OF_LIFE_S = 2.0


def failure_of(whom: str, error: ServiceError) -> RolloutFailure:
    """The failure that a call's error stands for."""
    text = f"{whom}: {error}"
    match error:
        case ServiceRefused(status=status) if status in _TASK_IS_WRONG:
            return DataFailure(text)
        case ServiceRefused(status=status) | ServiceFailed(status=status) if status in _NOT_NOW:
            return Unavailable(text)
        case ServiceTimeout() | ServiceUnreachable(sent=False):
            return Unavailable(text)
        case _:
            return InfrastructureFailure(text)


@contextmanager
def judged(call: Call, *, whom: str) -> Iterator[None]:
    """Raises a call's ServiceError as the failure that it stands for, and tells the breaker how the call went."""
    try:
        try:
            yield
        except ServiceError as error:
            raise failure_of(whom, error) from error
    except InfrastructureFailure as failure:
        call.failed(str(failure), silent=isinstance(failure, Unavailable))
        raise
    except DataFailure:
        call.succeeded()
        raise
    call.succeeded()


async def see_alive(http: HttpClient, url: str) -> None:
    """Before a probe: a process that hangs costs two seconds, and not the deadline of a whole request.

    Raises ServiceTimeout, ServiceUnreachable. Any answer will do: the request itself shows the rest.
    """
    try:
        await http.get(f"{url.rstrip('/')}/readyz", Readiness, deadline_s=_SIGN_OF_LIFE_S)
    except (ServiceFailed, ServiceRefused):
        return
