"""Whatever a peer sends: a message, or a ProtocolError that says what does not fit. Nothing else."""

import contextlib
from pathlib import Path

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol.codec import (
    DamagedMessage,
    Frame,
    MalformedMessage,
    MessageLimits,
    MessageTooLarge,
    ProtocolError,
    WrongProtocolVersion,
    decode,
    sealed,
)
from protocol.model import PROTOCOL_VERSION

VECTORS = {
    file.stem: [bytes.fromhex(line) for line in file.read_text(encoding="ascii").splitlines()][:-1]
    for file in sorted((Path(__file__).parent / "golden").glob("*.hex"))
}
"""The frames of valid messages without their checksums, so that a test can spoil them and seal them again."""

NEWER = PROTOCOL_VERSION + 1


def finished(*, version: object = PROTOCOL_VERSION, kind: object = "finished") -> list[Frame]:
    """A valid group under another version or another name."""
    header, *arrays = VECTORS["finished"]
    return sealed([msgpack.packb([version, kind, msgpack.unpackb(header)[2]]), *arrays])


@pytest.mark.parametrize("version", [0, 1, NEWER, 1 << 63, -1, True, 1.0, "1", None, [1], {"a": 1}, b"1"])
def test_another_protocol_version_is_named_in_the_refusal(version: object) -> None:
    with pytest.raises(WrongProtocolVersion, match="run the same release on both"):
        decode(finished(version=version))


def test_a_message_of_another_version_need_not_have_our_form() -> None:
    newer = msgpack.packb([NEWER, "finished", {}, "a fourth part", msgpack.ExtType(9, b"new")])
    with pytest.raises(WrongProtocolVersion, match=f"speaks protocol version {NEWER}, this process {PROTOCOL_VERSION}"):
        decode(sealed([newer, b"surplus"]))


@pytest.mark.parametrize("surplus", [[], [b"surplus"], [b"8 bytes."]], ids=len)
def test_a_message_of_another_version_need_not_have_our_checksum(surplus: list[bytes]) -> None:
    with pytest.raises(WrongProtocolVersion, match=f"speaks protocol version {NEWER}, this process {PROTOCOL_VERSION}"):
        decode([msgpack.packb([NEWER, "finished", {}]), *surplus])


@pytest.mark.parametrize("kind", VECTORS)
def test_a_message_without_its_checksum_is_refused(kind: str) -> None:
    with pytest.raises((MalformedMessage, DamagedMessage)):
        decode(VECTORS[kind])


@pytest.mark.parametrize("kind", VECTORS)
def test_a_flip_of_any_bit_is_refused(kind: str) -> None:
    whole = [bytes(frame) for frame in sealed(VECTORS[kind])]
    for number, frame in enumerate(whole):
        for position in range(len(frame)):
            for bit in range(8):
                flipped = bytearray(frame)
                flipped[position] ^= 1 << bit
                with pytest.raises((DamagedMessage, WrongProtocolVersion)):
                    decode([*whole[:number], bytes(flipped), *whole[number + 1 :]])


def test_arrays_that_changed_places_are_refused() -> None:
    header, first, *rest, last, checksum = sealed(VECTORS["finished"])
    with pytest.raises(DamagedMessage, match="damaged on the way; send it again"):
        decode([header, last, *rest, first, checksum])


@pytest.mark.parametrize("kind", ["", "Finished", "hello\n", "x" * 10_000, 7, None, [], {}])
def test_an_unknown_kind_is_refused_and_the_known_ones_are_named(kind: object) -> None:
    with pytest.raises(MalformedMessage, match=r"expected one of \['acknowledged', .*'welcome'\]") as caught:
        decode(finished(kind=kind))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        b"GET / HTTP/1.1\r\n\r\n",
        msgpack.packb(1),
        msgpack.packb({}),
        msgpack.packb([]),
        msgpack.packb([1]),
        msgpack.packb([1, "goodbye"]),
        msgpack.packb([1, "goodbye", {"reason": "x"}, 4]),
        msgpack.packb([1, "goodbye", {"reason": "x"}]) + b"\0",
        b"\x93\x01\xa7goodbye\x81\xa6reason\xa1\xff",
        b"\x93\x01\xa7goodbye\x81\x01\xa1x",
        b"\x93\x01\xa7goodbye\x81\x90\xa1x",
        b"\x93\x01\xa7goodbye\x81\xa6reason\xd7\xff" + b"\xff" * 8,
        b"\x93\x01\xa7goodbye\xc7\x00\x01",
        b"\x91" * 5000,
        b"\x81\xa1a" * 5000,
        b"\x93\x01\xa7goodbye" + b"\x91" * 900 + b"\x90",
        b"\x93" + b"\x91" * 900 + b"\x90\xa7goodbye\x80",
        b"\x93\x01" + b"\x91" * 900 + b"\x90\x80",
    ],
    ids=lambda header: header[:24].hex() or "empty",
)
def test_a_header_that_is_no_header_is_refused(header: bytes) -> None:
    for frames in ([header], sealed([header])):
        with pytest.raises(ProtocolError, match=r"."):
            decode(frames)


@pytest.mark.parametrize("kind", VECTORS)
def test_a_header_cut_off_anywhere_is_refused(kind: str) -> None:
    header, *arrays = VECTORS[kind]
    for length in range(len(header)):
        with pytest.raises(MalformedMessage):
            decode(sealed([header[:length], *arrays]))


def test_a_header_that_announces_more_than_it_holds_is_not_built() -> None:
    layers = b"\x93\x01\xa7goodbye" + b"\xdd\x00\x0f\xff\xff" * 500
    with pytest.raises(MalformedMessage):
        decode(sealed([layers + b"\0" * (1 << 20)]))


def test_a_message_without_frames_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="got none"):
        decode([])


@pytest.mark.parametrize(
    ("limits", "complaint"),
    [
        (MessageLimits(frames=5), "6 frames in one message; at most 5"),
        (MessageLimits(header_bytes=100), "a header of .* bytes; at most 100"),
        (MessageLimits(total_bytes=500), "a message of .* bytes; at most 500"),
    ],
)
def test_a_message_over_a_limit_is_refused_with_the_limit(limits: MessageLimits, complaint: str) -> None:
    with pytest.raises(MessageTooLarge, match=complaint):
        decode(finished(), limits=limits)


def test_a_message_at_the_limits_is_taken() -> None:
    frames = finished()
    exact = MessageLimits(frames=6, header_bytes=len(frames[0]), total_bytes=sum(map(len, frames)))
    decode(frames, limits=exact)


def refused_or_decoded(frames: list[Frame]) -> None:
    """Any other exception than a ProtocolError fails the test. The frames are tried with a good checksum, too."""
    for tried in (frames, sealed(frames)):
        with contextlib.suppress(ProtocolError):
            decode(tried)


@settings(deadline=None)
@given(frames=st.lists(st.binary(max_size=64), max_size=4))
@example(frames=[b"\x93\x01\xa5hello\x80"])
def test_random_bytes_do_no_harm(frames: list[Frame]) -> None:
    refused_or_decoded(frames)


LEAVES = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary()
REFERENCES = st.lists(st.integers(-2, 9) | st.sampled_from(["i4", "f4", "u1"]), max_size=4).map(msgpack.packb)
EXTENSIONS = st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=12) | REFERENCES)
VALUES = st.recursive(
    LEAVES | EXTENSIONS | st.builds(msgpack.ExtType, st.just(1), REFERENCES),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(kind=st.sampled_from(sorted(VECTORS)), body=VALUES, arrays=st.lists(st.binary(max_size=12), max_size=2))
def test_random_bodies_of_known_kinds_do_no_harm(kind: str, body: object, arrays: list[bytes]) -> None:
    refused_or_decoded([msgpack.packb([PROTOCOL_VERSION, kind, body]), *arrays])


@settings(deadline=None)
@given(data=st.data(), kind=st.sampled_from(sorted(VECTORS)), value=VALUES)
def test_a_valid_message_with_one_value_exchanged_does_no_harm(data: st.DataObject, kind: str, value: object) -> None:
    header, *arrays = VECTORS[kind]
    body = msgpack.unpackb(header)[2]
    place = body
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not (isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans())):
            break
        place = place[key]
    place[key] = value
    refused_or_decoded([msgpack.packb([PROTOCOL_VERSION, kind, body]), *arrays])


@settings(deadline=None, max_examples=300)
@given(
    kind=st.sampled_from(sorted(VECTORS)),
    flips=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4096), st.integers(0, 255)), min_size=1, max_size=6),
)
def test_a_valid_message_with_bytes_changed_does_no_harm(kind: str, flips: list[tuple[int, int, int]]) -> None:
    frames = [bytearray(frame) for frame in VECTORS[kind]]
    for frame, position, byte in flips:
        target = frames[frame % len(frames)]
        target[position % len(target)] = byte
    refused_or_decoded([bytes(frame) for frame in frames])
