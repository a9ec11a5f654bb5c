"""Bytes of weights as frames: a slice as it is, or what changed in it since a former version; exact to the bit.

A frame stands for the next bytes of a bucket, whose elements have 1, 2, 4 or 8 bytes. At the small learning rates of
reinforcement learning most elements in bfloat16 stay as they are, and those that change move to a neighbour, so of each
change there is the gap to the one before and the difference of both values as integers, folded so that small ones of
either sign are small. Streams of equal bytes of all elements (planes) are coded by their frequencies alone (deflate).

| kind   | streams                                                                    |
|--------|----------------------------------------------------------------------------|
| same   | none: nothing has changed                                                  |
| sparse | gaps, one byte each; what those above 254 have beyond 255, as planes; planes of differences |
| dense  | planes of the differences of all elements                                  |
| plain  | planes of the values of all elements; needs no former version              |

A frame: kind, bytes of an element, number of its bytes as a whole; then its streams: how each is packed, its length
packed and unpacked. Little-endian, as the weights themselves.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

SLICE_BYTES = 4 << 20
"""Bytes of weights that a frame stands for, at most."""
_FRAME = struct.Struct("<BBI")
_STREAM = struct.Struct("<BII")
_SAME, _SPARSE, _DENSE, _PLAIN = range(4)
_RAW, _DEFLATED = range(2)
_LARGEST_GAP = 255
_SPARSE_SHARE = 0.15
"""With more changes than that, a difference of every element is shorter than gaps."""
_SAMPLE = 1 << 16
_UINTS = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
_INTS = {size: np.dtype(f"<i{size}") for size in (1, 2, 4, 8)}

Bytes = npt.NDArray[np.uint8]
Elements = npt.NDArray[np.unsignedinteger]


class DeltaDamaged(ValueError):
    """Frames that cannot be read, or do not fit the weights that they are applied to."""


class EncodedSlice(NamedTuple):
    """The frame of a slice, and how many of its elements differ from the former ones."""

    frame: bytes
    changed: int


def encoded(new: Bytes, old: Bytes | None, *, itemsize: int) -> EncodedSlice:
    """A slice against its former bytes, or, without them, as it is; of a plain one all elements count as changed."""
    values = _elements(new, itemsize)
    if old is None:
        return EncodedSlice(_frame(_PLAIN, itemsize, new.nbytes, _planes(values)), len(values))
    former = _elements(old, itemsize)
    places = np.flatnonzero(values != former)
    if not len(places):
        return EncodedSlice(_frame(_SAME, itemsize, new.nbytes, []), 0)
    if len(places) > _SPARSE_SHARE * len(values):
        frame = _frame(_DENSE, itemsize, new.nbytes, _planes(_folded(values - former)))
        return EncodedSlice(frame, len(places))
    return EncodedSlice(_sparse(values, former, places, nbytes=new.nbytes), len(places))


def _sparse(values: Elements, former: Elements, places: npt.NDArray[np.int64], *, nbytes: int) -> bytes:
    gaps = np.diff(places, prepend=-1) - 1
    long = b"".join(_planes((gaps[gaps >= _LARGEST_GAP] - _LARGEST_GAP).astype("<u4")))
    short = np.minimum(gaps, _LARGEST_GAP).astype(np.uint8)
    differences = _folded(values[places] - former[places])
    return _frame(_SPARSE, values.itemsize, nbytes, [short.tobytes(), long, *_planes(differences)])


def apply_frames(frames: bytes, target: Bytes) -> None:
    """Turns `target`, which holds the former bytes, into the new ones. Raises DeltaDamaged, with some of it done."""
    start = 0
    for kind, itemsize, nbytes, streams in _read_frames(frames):
        if start + nbytes > target.nbytes:
            raise DeltaDamaged(f"frames of more than {target.nbytes} bytes, which is what they are for")
        _apply(kind, streams, _elements(target[start : start + nbytes], itemsize))
        start += nbytes
    if start != target.nbytes:
        raise DeltaDamaged(f"frames of {start} bytes, for {target.nbytes}")


def _apply(kind: int, streams: Sequence[bytes], target: Elements) -> None:
    size = target.itemsize
    if kind == _SAME and not streams:
        return
    if kind == _PLAIN and len(streams) == size:
        target[:] = _of_planes(streams, len(target))
    elif kind == _DENSE and len(streams) == size:
        target += _unfolded(_of_planes(streams, len(target)))
    elif kind == _SPARSE and len(streams) == 2 + size:
        places = _places(streams[0], streams[1], most=len(target))
        target[places] += _unfolded(_of_planes(streams[2:], len(places)))
    else:
        raise DeltaDamaged(f"a frame of kind {kind} with {len(streams)} streams, for elements of {size} bytes")


def _places(short: bytes, long: bytes, *, most: int) -> npt.NDArray[np.int64]:
    gaps = np.frombuffer(short, np.uint8).astype(np.int64)
    if len(long) % 4 or np.count_nonzero(gaps == _LARGEST_GAP) != len(long) // 4:
        raise DeltaDamaged("a frame's long gaps are not as many as its short ones say")
    size = len(long) // 4
    gaps[gaps == _LARGEST_GAP] += _of_planes([long[byte * size : (byte + 1) * size] for byte in range(4)], size)
    places = np.cumsum(gaps + 1) - 1
    if len(places) and places[-1] >= most:
        raise DeltaDamaged(f"a frame changes element {places[-1]} of {most}")
    return places


def _elements(raw: Bytes, itemsize: int) -> Elements:
    if itemsize not in _UINTS or raw.nbytes % itemsize:
        raise DeltaDamaged(f"{raw.nbytes} bytes are no elements of {itemsize}")
    return raw.view(_UINTS[itemsize])


def _folded(differences: Elements) -> Elements:
    """0, -1, 1, -2, … as 0, 1, 2, 3, …"""
    signed = differences.view(_INTS[differences.itemsize])
    bits = 8 * differences.itemsize - 1
    return ((signed << 1) ^ (signed >> bits)).view(differences.dtype)


def _unfolded(folded: Elements) -> Elements:
    one = folded.dtype.type(1)
    return (folded >> one) ^ (~(folded & one) + one)


def _planes(elements: Elements) -> list[bytes]:
    raw = np.ascontiguousarray(elements).view(np.uint8).reshape(len(elements), elements.itemsize)
    return [np.ascontiguousarray(raw[:, byte]).tobytes() for byte in range(elements.itemsize)]


def _of_planes(planes: Sequence[bytes], count: int) -> Elements:
    if any(len(plane) != count for plane in planes):
        raise DeltaDamaged(f"a frame's planes have {[len(plane) for plane in planes]} bytes, not {count} each")
    raw = np.empty((count, len(planes)), np.uint8)
    for byte, plane in enumerate(planes):
        raw[:, byte] = np.frombuffer(plane, np.uint8)
    return raw.reshape(-1).view(_UINTS[len(planes)])


def _frame(kind: int, itemsize: int, nbytes: int, streams: Sequence[bytes]) -> bytes:
    parts = [_FRAME.pack(kind | len(streams) << 2, itemsize, nbytes)]
    for stream in streams:
        packed = _deflated(stream)
        how = _RAW if packed is None else _DEFLATED
        content = stream if packed is None else packed
        parts += [_STREAM.pack(how, len(content), len(stream)), content]
    return b"".join(parts)


def _deflated(stream: bytes) -> bytes | None:
    """None where it would not be shorter, as a sample tells of a long one."""
    if len(stream) > 4 * _SAMPLE and len(_deflate(stream[:_SAMPLE])) > 0.98 * _SAMPLE:
        return None
    packed = _deflate(stream)
    return packed if len(packed) < len(stream) else None


def _deflate(stream: bytes) -> bytes:
    """By frequencies and runs alone: it is twice as fast as a search for what comes again, and nothing does."""
    deflate = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_RLE)
    return deflate.compress(stream) + deflate.flush()


def _read_frames(frames: bytes) -> Iterator[tuple[int, int, int, list[bytes]]]:
    at, view = 0, memoryview(frames)
    while at < len(view):
        if at + _FRAME.size > len(view):
            raise DeltaDamaged("a frame ends in its head")
        head, itemsize, nbytes = _FRAME.unpack_from(view, at)
        at += _FRAME.size
        streams = []
        for _ in range(head >> 2):
            if at + _STREAM.size > len(view):
                raise DeltaDamaged("a frame ends in the head of a stream")
            how, packed, length = _STREAM.unpack_from(view, at)
            at += _STREAM.size
            streams.append(_inflated(view[at : at + packed], how=how, length=length, most=4 * SLICE_BYTES))
            at += packed
        yield head & 3, itemsize, nbytes, streams
    if at != len(view):
        raise DeltaDamaged("a frame ends in a stream")


def _inflated(packed: memoryview, *, how: int, length: int, most: int) -> bytes:
    if length > most:
        raise DeltaDamaged(f"a stream of {length} bytes; expected at most {most}")
    if how == _RAW:
        content = bytes(packed)
    elif how == _DEFLATED:
        inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            content = inflate.decompress(packed, max(1, length))
        except zlib.error as error:
            raise DeltaDamaged(f"a stream cannot be unpacked: {error}") from error
    else:
        raise DeltaDamaged(f"a stream is packed in way {how}, which is not known here")
    if len(content) != length:
        raise DeltaDamaged(f"a stream has {len(content)} bytes, and its head says {length}")
    return content
