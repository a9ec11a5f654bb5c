"""Frames of weights: what comes out is what went in, bit by bit, and damage is found."""

import numpy as np
import pytest
from numpy.typing import NDArray

from protocol.weight_deltas import SLICE_BYTES, DeltaDamaged, apply_frames, encoded

COUNT = 20_000


def weights(itemsize: int, *, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, COUNT * itemsize, dtype=np.uint8)


def moved(old: NDArray[np.uint8], itemsize: int, share: float) -> NDArray[np.uint8]:
    """Elements at random places have other bits at random."""
    random = np.random.default_rng(1)
    new = old.copy()
    elements = new.view(f"<u{itemsize}")
    places = random.random(COUNT) < share
    elements[places] = random.integers(0, 256, (int(places.sum()), itemsize), dtype=np.uint8).view(f"<u{itemsize}")[
        :, 0
    ]
    return new


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.0, 1e-4, 1e-2, 0.1, 0.5, 1.0])
def test_what_is_made_of_a_frame_is_the_new_weights_bit_by_bit(itemsize: int, share: float) -> None:
    old = weights(itemsize)
    new = moved(old, itemsize, share)
    found = old.copy()
    piece = encoded(new, old, itemsize=itemsize)
    apply_frames(piece.frame, found)
    assert (found == new).all()
    assert piece.changed == np.count_nonzero(old.view(f"<u{itemsize}") != new.view(f"<u{itemsize}"))


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_a_plain_frame_needs_no_former_weights(itemsize: int) -> None:
    new = weights(itemsize)
    found = weights(itemsize, seed=5)
    apply_frames(encoded(new, None, itemsize=itemsize).frame, found)
    assert (found == new).all()


def test_neighbours_of_one_in_a_hundred_weights_take_less_than_ten_bits_each() -> None:
    random = np.random.default_rng(0)
    old = (random.standard_normal(1 << 20).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    places = random.random(len(old)) < 0.01
    new = np.where(places, old + np.where(random.random(len(old)) < 0.5, 1, -1), old).astype(np.uint16)
    piece = encoded(new.view(np.uint8), old.view(np.uint8), itemsize=2)
    assert 8 * len(piece.frame) / piece.changed < 10
    plain = encoded(new.view(np.uint8), None, itemsize=2)
    assert len(plain.frame) < 0.8 * new.nbytes


def test_frames_follow_each_other_in_one_object() -> None:
    old, new = weights(2), moved(weights(2), 2, 0.01)
    half = COUNT
    frames = encoded(new[:half], old[:half], itemsize=2).frame + encoded(new[half:], old[half:], itemsize=2).frame
    found = old.copy()
    apply_frames(frames, found)
    assert (found == new).all()


def _frame() -> bytes:
    return encoded(moved(weights(2), 2, 0.01), weights(2), itemsize=2).frame


@pytest.mark.parametrize(
    ("frames", "what"),
    [
        (_frame()[:3], "ends in its head"),
        (_frame()[:8], "ends in the head of a stream"),
        (_frame()[:-1], "stream"),
        (_frame() * 2, "frames of more than 40000 bytes"),
        (encoded(weights(2)[:100], None, itemsize=2).frame, "frames of 100 bytes, for 40000"),
        (bytes([_frame()[0], 3]) + _frame()[2:], "no elements of 3"),
        (bytes([_frame()[0] & ~3]) + _frame()[1:], "a frame of kind 0 with 4 streams"),
        (b"\x07\x02\x04\0\0\0" + b"\x00" + (2 * SLICE_BYTES * 10).to_bytes(4, "little") * 2, "expected at most"),
        (b"\x07\x02\x04\0\0\0" + b"\x07" + (2).to_bytes(4, "little") * 2 + b"ab", "packed in way 7"),
        (b"\x07\x02\x04\0\0\0" + b"\x01" + (2).to_bytes(4, "little") * 2 + b"ab", "cannot be unpacked|has"),
    ],
)  # fmt: skip
def test_damaged_frames_are_refused(frames: bytes, what: str) -> None:
    with pytest.raises(DeltaDamaged, match=what):
        apply_frames(frames, weights(2))


def test_a_place_beyond_the_weights_is_refused() -> None:
    old = weights(2)
    new = old.copy()
    new[-1] ^= 1
    frame = bytearray(encoded(new, old, itemsize=2).frame)
    frame[2:6] = (200).to_bytes(4, "little")
    with pytest.raises(DeltaDamaged, match="changes element 19999 of 100"):
        apply_frames(bytes(frame), old[:200])
