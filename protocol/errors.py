"""The ways in which bytes from a peer can fail to be a message."""


class ProtocolError(ValueError):
    """A message that does not fit. The text says what was wrong, what was expected and what to do.

    `reason` is a short label for counters.
    """

    reason = "protocol"


class MalformedMessage(ProtocolError):
    """The frames are not a message of ours, or a field of it has the wrong type or value."""

    reason = "malformed"


class WrongProtocolVersion(ProtocolError):
    """The peer speaks another version of the protocol."""

    reason = "protocol_version"


class MessageTooLarge(ProtocolError):
    """A frame, or the whole message, is over the limits."""

    reason = "too_large"


class DamagedMessage(ProtocolError):
    """The frames do not match their checksum. The same message, sent again, may be whole."""

    reason = "checksum"


class ConnectionRefused(ProtocolError):
    """A peer broke the rules before its first message: its key is not authorized, or it has none."""

    reason = "connection"
