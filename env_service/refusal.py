"""Whose fault a failed call is."""

from env_service.failures import DataFailure, InfrastructureFailure, RolloutFailure
from services.http_client import ServiceError, ServiceRefused

_TASK_IS_WRONG = frozenset({400, 413, 422})
"""The statuses that another attempt at the same task would get again. A wrong token (401) is not the task's fault."""


def failure_of(whom: str, error: ServiceError) -> RolloutFailure:
    """The failure that a call's error stands for."""
    if isinstance(error, ServiceRefused) and error.status in _TASK_IS_WRONG:
        return DataFailure(f"{whom}: {error}")
    return InfrastructureFailure(f"{whom}: {error}")
