"""Requests that vLLM refuses, and how it says so: one that is wrong is told from one that comes at the wrong time."""

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.v1.engine.exceptions import EngineGenerateError


class RequestUnfit(ValueError):
    """A request that the engine refuses, and would refuse again."""


class RequestUntimely(Exception):
    """A request that the engine does not take now."""


@contextmanager
def engine_refusals() -> Iterator[None]:
    """Turns vLLM's refusals within it into RequestUnfit and RequestUntimely.

    What vLLM finds wrong itself is a VLLMClientError, which is no ValueError; any other ValueError on the way into the
    engine comes wrapped in an EngineGenerateError.
    """
    try:
        yield
    except VLLMClientError as error:
        raise RequestUnfit(str(error)) from error
    except GracefulHTTPError as error:
        raise RequestUntimely(str(error)) from error
    except EngineGenerateError as error:
        if isinstance(error.__cause__, ValueError | VLLMClientError):
            raise RequestUnfit(str(error.__cause__)) from error
        raise
