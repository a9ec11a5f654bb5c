"""Messages to frames and back: a msgpack header, one raw frame for each array, and a checksum; and how bytes can fail.

The header is `[protocol version, kind, body]`. An array in the body is a msgpack extension of type 1 that holds
`[frame, element code, length]`; its bytes are that frame, little-endian, and are neither copied nor parsed. The arrays
of a group's trajectories lie end to end, one frame for each kind of row, narrow (`rows`), and the group's `lengths` say
where each of them ends: what a group costs does not grow with the number of its arrays, and they are checked together.
The last frame is the xxh3-64 of all others, one after the other, in 8 bytes, big-endian: TCP's own checksum lets one
damaged segment through in some 65,000. It needs no lengths, since the header tells its own end and the length of each
array.
"""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import JsonValue, ValidationError

from protocol import messages
from protocol.messages import FinishedLease, Message
from protocol.model import DTYPES, PROTOCOL_VERSION, ROWS_APART, code_of
from protocol.rows import NAMES, Rows, packed, unpacked
from protocol.trajectories import ROWS, TOGETHER, fits

_ARRAY = 1
_CHECKSUM_BYTES = 8
_LENGTHS = "lengths"
_KINDS = {message.kind: message for message in messages.ALL}


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


Frame = bytes | memoryview


@dataclass(frozen=True)
class MessageLimits:
    """Limits of what a receiver takes from one peer in one message."""

    header_bytes: int = 4 << 20
    frames: int = 1 << 16
    total_bytes: int = 256 << 20


DEFAULT_LIMITS = MessageLimits()


def encode(message: Message) -> list[Frame]:
    """The frames of a message."""
    arrays: list[Frame] = []

    def as_extension(value: object) -> msgpack.ExtType:
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{type(value).__name__} cannot be sent; a message holds plain values and arrays")
        row = np.ascontiguousarray(value)
        arrays.append(row.data.cast("B") if row.size else b"")
        return msgpack.ExtType(_ARRAY, msgpack.packb([len(arrays), code_of(row), row.shape[0]]))

    body = message.model_dump()
    if isinstance(message, FinishedLease):
        _put_end_to_end(body["group"])
    header = msgpack.packb([PROTOCOL_VERSION, message.kind, body], default=as_extension)
    return sealed([header, *arrays])


def _put_end_to_end(group: dict[str, Any]) -> None:
    """Takes the rows out of a group's trajectories, and puts them into the group."""
    trajectories = group["trajectories"]
    group[_LENGTHS] = [len(trajectory["token_ids"]) for trajectory in trajectories]
    group.update(packed({name: np.concatenate([each.pop(name) for each in trajectories]) for name in ROWS}))


def sealed(frames: Sequence[Frame]) -> list[Frame]:
    """The frames of a header and its arrays, followed by their checksum."""
    return [*frames, _checksum(frames)]


def decode(frames: Sequence[Frame], *, limits: MessageLimits = DEFAULT_LIMITS, stored: bool = False) -> Message:
    """The message that the frames hold. Its arrays are read-only.

    One that was `stored` may be of a former version of the protocol. Raises a ProtocolError that says what does not
    fit; nothing but bytes is looked at before the limits are checked.
    """
    _check_limits(frames, limits)
    version, kind, body = _unpack_header(_unsealed(frames), oldest=ROWS_APART if stored else PROTOCOL_VERSION)
    message_type = _KINDS.get(kind)
    if message_type is None:
        raise MalformedMessage(f"unknown message kind {_shown(kind)}; expected one of {sorted(_KINDS)}")
    try:
        if message_type is FinishedLease and version > ROWS_APART:
            return _finished(body)
        return message_type.model_validate(body)
    except ValidationError as error:
        raise MalformedMessage(f"{kind}: {describe(error)}") from error


def _finished(body: object) -> FinishedLease:
    """A group whose rows lie end to end. Each trajectory is looked at by itself only where something is wrong."""
    group = body.get("group") if isinstance(body, dict) else None
    if not isinstance(group, dict):
        return FinishedLease.model_validate(body)
    sent = {name: group.pop(name) for name in NAMES if name in group}
    lengths = group.pop(_LENGTHS, None)
    trajectories = group.get("trajectories")
    rows: Rows = {}
    if isinstance(trajectories, tuple) and trajectories:
        rows = _hand_out(sent, lengths, trajectories)
    message = FinishedLease.model_validate(body, context=TOGETHER)
    return message if fits(message.group, rows, lengths) else FinishedLease.model_validate(body)


def _hand_out(sent: Mapping[str, Any], lengths: Any, trajectories: tuple[Any, ...]) -> Rows:
    """Gives each trajectory its part of each row, a view. Raises MalformedMessage for what cannot be divided."""
    total = _total(lengths, trajectories)
    try:
        rows = unpacked(sent, tokens=total)
    except ValueError as error:
        raise MalformedMessage(f"finished: group.{error}") from error
    token_ids, loss_mask, behavior_logprobs = rows.values()
    for number, (start, end) in enumerate(pairwise(accumulate(lengths, initial=0))):
        trajectory = trajectories[number]
        fields = len(trajectory)
        trajectory["token_ids"] = token_ids[start:end]
        trajectory["loss_mask"] = loss_mask[start:end]
        trajectory["behavior_logprobs"] = behavior_logprobs[start:end]
        if len(trajectory) != fields + len(rows):
            raise MalformedMessage(
                f"finished: group.trajectories.{number}: arrays of its own; expected them in the group, end to end"
            )
    return rows


def _total(lengths: Any, trajectories: tuple[Any, ...]) -> int:
    """The tokens of all trajectories. Raises MalformedMessage if these are not the lengths of these trajectories."""
    if not (isinstance(lengths, tuple) and all(type(length) is int and length >= 0 for length in lengths)):
        raise MalformedMessage(f"finished: group.{_LENGTHS}: expected numbers of tokens, got {_shown(lengths)}")
    if len(lengths) != len(trajectories):
        raise MalformedMessage(
            f"finished: group.{_LENGTHS}: {len(lengths)} lengths for {len(trajectories)} trajectories"
        )
    strange = [number for number, trajectory in enumerate(trajectories) if not isinstance(trajectory, dict)]
    if strange:
        got = type(trajectories[strange[0]]).__name__
        raise MalformedMessage(f"finished: group.trajectories.{strange[0]}: expected a dictionary, got {got}")
    return sum(lengths)


def pack_value(value: JsonValue) -> bytes:
    """Plain values in msgpack, for a server of somebody else's."""
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def unpack_value(data: Frame) -> object:
    """Unpacks the msgpack of a server of somebody else's. Raises MalformedMessage."""
    try:
        _check_whole(data)
        return msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"not msgpack: {str(error) or type(error).__name__:.200}") from error


def describe(error: ValidationError) -> str:
    """The first few complaints of a validation, each with its field; short, whatever the peer sent."""
    complaints = [
        f"{'.'.join(str(part) for part in item['loc']) or 'message':.100}: {item['msg']:.200}"
        for item in error.errors(include_url=False, include_context=False, include_input=False)
    ]
    more = f" (and {len(complaints) - 3} more)" if len(complaints) > 3 else ""
    return "; ".join(complaints[:3]) + more


def _checksum(frames: Sequence[Frame]) -> bytes:
    digest = xxhash.xxh3_64()
    for frame in frames:
        digest.update(frame)
    value: bytes = digest.digest()
    return value


def _unsealed(frames: Sequence[Frame]) -> Sequence[Frame]:
    """The frames without their checksum. Raises a ProtocolError if they do not match it."""
    *rest, checksum = frames
    if rest and len(checksum) == _CHECKSUM_BYTES and _checksum(rest) == checksum:
        return rest
    # Another release may seal its messages in another way, and its version is then the clearer complaint.
    version = _version_in(frames[0])
    if type(version) is int:
        _check_version(version, oldest=PROTOCOL_VERSION)
    if rest and len(checksum) == _CHECKSUM_BYTES:
        raise DamagedMessage("the message does not match its checksum: it was damaged on the way; send it again")
    raise MalformedMessage(
        f"the last of {len(frames)} frames has {len(checksum)} bytes; expected a header, its arrays, and a checksum of "
        f"{_CHECKSUM_BYTES} bytes: run the same release of Headway on both sides"
    )


def _version_in(header: Frame) -> object:
    """The value in the version's place, None if that cannot be read."""
    try:
        _check_whole(header)
        unpacker = _unpacker(header, msgpack.ExtType)
        unpacker.read_array_header()
        return unpacker.unpack()
    except (ValueError, TypeError, msgpack.UnpackException):
        return None


def _check_limits(frames: Sequence[Frame], limits: MessageLimits) -> None:
    if not frames:
        raise MalformedMessage("a message has at least one frame, got none")
    if len(frames) > limits.frames:
        raise MessageTooLarge(f"{len(frames)} frames in one message; at most {limits.frames} are taken")
    if len(frames[0]) > limits.header_bytes:
        raise MessageTooLarge(f"a header of {len(frames[0])} bytes; at most {limits.header_bytes} are taken")
    total = sum(len(frame) for frame in frames)
    if total > limits.total_bytes:
        raise MessageTooLarge(f"a message of {total} bytes; at most {limits.total_bytes} are taken")


def _unpack_header(frames: Sequence[Frame], *, oldest: int) -> tuple[int, str, object]:
    """Version, kind and body. The version is read before anything that another version may have changed."""
    used: set[int] = set()

    def as_array(code: int, data: bytes) -> npt.NDArray[Any]:
        if code != _ARRAY:
            raise ValueError(f"extension type {code} is not known")
        return _array(frames, msgpack.unpackb(data), used)

    try:
        _check_whole(frames[0])
        unpacker = _unpacker(frames[0], as_array)
        parts, version = unpacker.read_array_header(), unpacker.unpack()
        _check_version(version, oldest=oldest)
        if parts != 3:
            raise MalformedMessage(f"the header has {parts} parts, expected [version, kind, body]")
        kind, body = unpacker.unpack(), unpacker.unpack()
    except ProtocolError:
        raise
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        complaint = str(error) or type(error).__name__
        raise MalformedMessage(f"the header is not [version, kind, body] in msgpack: {complaint:.200}") from error
    if len(used) != len(frames) - 1:
        raise MalformedMessage(f"{len(frames) - 1} array frames arrived, the header names {len(used)}")
    if not isinstance(kind, str):
        raise MalformedMessage(f"the message kind is {_shown(kind)}, expected one of {sorted(_KINDS)}")
    return version, kind, body


def _check_whole(header: Frame) -> None:
    """Walks the header without building it: afterwards no container can announce more elements than there are bytes."""
    unpacker = _unpacker(header, msgpack.ExtType)
    unpacker.skip()
    if unpacker.tell() != len(header):
        raise ValueError(f"{len(header) - unpacker.tell()} bytes follow it")


def _check_version(version: object, *, oldest: int) -> None:
    if type(version) is int and oldest <= version <= PROTOCOL_VERSION:
        return
    if oldest < PROTOCOL_VERSION:
        raise WrongProtocolVersion(
            f"it was stored by a release that speaks protocol version {_shown(version)}; this one reads {oldest} to "
            f"{PROTOCOL_VERSION}: use the release that stored it"
        )
    raise WrongProtocolVersion(
        f"the peer speaks protocol version {_shown(version)}, this process {PROTOCOL_VERSION}: "
        "run the same release on both"
    )


def _unpacker(header: Frame, extension: Callable[[int, bytes], object]) -> Any:
    size = max(len(header), 1)
    unpacker = msgpack.Unpacker(use_list=False, ext_hook=extension, strict_map_key=True, max_buffer_size=size)
    unpacker.feed(header)
    return unpacker


def _shown(value: object) -> str:
    """A short form of anything, whatever its depth and size."""
    return reprlib.repr(value)


def _array(frames: Sequence[Frame], reference: object, used: set[int]) -> npt.NDArray[Any]:
    match reference:
        case [int(index), str(code), int(length)] if 0 < index < len(frames) and code in DTYPES and index not in used:
            used.add(index)
        case _:
            raise ValueError(f"{_shown(reference)} does not name an array frame of this message")
    if len(frames[index]) != length * DTYPES[code].itemsize:
        raise ValueError(f"frame {index} has {len(frames[index])} bytes, {length} elements of {code} were announced")
    return np.frombuffer(frames[index], dtype=DTYPES[code])
