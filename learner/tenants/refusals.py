"""Refusals of the service of tenants: errors as HTTP statuses that make the SDK do the right thing."""

from services.http.refusals import RequestRefused


class QueueFull(RequestRefused):
    """The tenant has as much under way as it may have; the SDK comes again by itself."""

    def __init__(self, message: str) -> None:
        super().__init__(429, "busy", message, retry_after_s=1.0)


def unknown(kind: str, name: str) -> RequestRefused:
    """Nothing of that name is the caller's: another's is answered like one that is not there."""
    return RequestRefused(404, "unknown_name", f"no {kind} {name}; it is not there, or belongs to another key")


def unfit(message: str) -> RequestRefused:
    """The client's mistake."""
    return RequestRefused(422, "invalid_field", message)


def not_durable(error: OSError) -> RequestRefused:
    """A request that could not be put on the disk has not been accepted; the SDK comes again by itself."""
    return RequestRefused(503, "disk", f"not accepted: {error.strerror or error}", retry_after_s=5.0)
