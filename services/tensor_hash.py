"""A hash of a tensor's bytes that torch computes where they lie, with one value on every device.

For weights in a GPU's memory: any hash of the CPU's has all of them copied to the host before. On a CPU XXH3 is six
times as fast (benchmarks/results/tensor_hash.md), and is used there. Not for strangers' data: it finds damage, and
resists nobody.

The bytes are words of 64 bits, the last one filled up with zeros; words make rows of `ROW_WORDS`, and the last row has
what is left. A row's sum over its words, modulo 2^64, is

    (u ^ u >> 29) * odd[i]      with u = word + start[i]

with constants of each place, and the sums of the rows are the words of the next turn, until there is one. At each place
a word and its term determine each other, so that a change within one word is always found; and places differ by more
than a factor, so that what is exchanged or shifted has another sum.
"""

from functools import cache

import numpy as np
import torch

ROW_WORDS = 1 << 15
_HOST_ROWS = 1
"""Rows in one turn on a CPU, whose words and terms stay in its cache."""
_DEVICE_ROWS = 256
_SHIFT = 29
_SHIFTED = (1 << (64 - _SHIFT)) - 1
"""Mask of the bits that a shift of unsigned words leaves: torch's fills up with the sign."""
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_WORD_BYTES = 8


def tensor_hash(tensor: torch.Tensor) -> str:
    """The hash of a tensor's values in row-major order, and of their number of bytes: 16 hexadecimal digits."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    sums = _row_sums(flat)
    while sums.numel() > 1:
        sums = _row_sums(sums.view(torch.uint8))
    total = int(sums.item()) if sums.numel() else 0
    return f"{_mixed((total ^ (flat.numel() * _GOLDEN)) & _MASK):016x}"


def _row_sums(flat: torch.Tensor) -> torch.Tensor:
    """The sums of the rows of these bytes [bytes] uint8, as [rows] int64 on their device."""
    row_bytes = ROW_WORDS * _WORD_BYTES
    whole = flat.numel() // row_bytes * row_bytes
    parts = []
    if whole:
        words = _aligned(flat[:whole]).view(torch.int64).view(-1, ROW_WORDS)
        at_once = _HOST_ROWS if flat.device.type == "cpu" else _DEVICE_ROWS
        room = torch.empty((2, min(at_once, len(words)), ROW_WORDS), dtype=torch.int64, device=flat.device)
        for at in range(0, len(words), at_once):
            rows = words[at : at + at_once]
            parts.append(_sums_of(rows, room[:, : len(rows)]))
    if left := flat.numel() - whole:
        last = torch.zeros(-(-left // _WORD_BYTES) * _WORD_BYTES, dtype=torch.uint8, device=flat.device)
        last[:left] = flat[whole:]
        words = last.view(torch.int64).view(1, -1)
        parts.append(_sums_of(words, torch.empty((2, *words.shape), dtype=torch.int64, device=flat.device)))
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def _aligned(flat: torch.Tensor) -> torch.Tensor:
    """The bytes where words can be read: a tensor may begin in the middle of one."""
    return flat if flat.data_ptr() % _WORD_BYTES == 0 and flat.storage_offset() % _WORD_BYTES == 0 else flat.clone()


def _sums_of(words: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """Of `words` [rows, length]; `room` [2, rows, length] is written to."""
    starts, odds = (constants[: words.shape[1]] for constants in _constants(words.device))
    moved, shifted = room
    torch.add(words, starts, out=moved)
    torch.bitwise_right_shift(moved, _SHIFT, out=shifted)
    sums: torch.Tensor = shifted.bitwise_and_(_SHIFTED).bitwise_xor_(moved).mul_(odds).sum(1)
    return sums


@cache
def _constants(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The number that is added at each place of a row, and the odd factor there; each [ROW_WORDS] int64."""
    counted = np.arange(1, 2 * ROW_WORDS + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    mixed = counted ^ (counted >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    drawn = torch.from_numpy(mixed.view(np.int64)).to(device)
    return drawn[:ROW_WORDS], drawn[ROW_WORDS:] | 1


def _mixed(total: int) -> int:
    """The last step of SplitMix64, as for the constants: each bit of the sum moves half of the hash's."""
    total = ((total ^ (total >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    total = ((total ^ (total >> 27)) * 0x94D049BB133111EB) & _MASK
    return total ^ (total >> 31)
