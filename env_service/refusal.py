"""Whose fault a failed call is, and what a breaker is told of it."""

from collections.abc import Iterator
from contextlib import contextmanager

from env_service.failures import DataFailure, InfrastructureFailure, RolloutFailure, Unavailable
from services.breaker import Call
from services.http_client import ServiceError
from services.verdicts import fault_of


def failure_of(whom: str, error: ServiceError) -> RolloutFailure:
    """The failure that a call's error stands for."""
    text = f"{whom}: {error}"
    match fault_of(error):
        case "request":
            return DataFailure(text)
        case "unavailable":
            return Unavailable(text)
        case "counterpart":
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
