"""Similarities by alignment: the longest common subsequence, and the edit distance.

Both keep a row of the usual table as the bits of one integer, and so take one step for each unit of the longer text and
each 64 units of the shorter.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from reward_service.verifier import DataError

MAX_CELLS = 1 << 32


def rouge_l(candidate: Sequence[str], reference: Sequence[str]) -> float:
    """ROUGE-L, F1 (Lin 2004): 2 P R / (P + R), where P and R are the common subsequence over either's words.

    Raises DataError if the texts are too long.
    """
    if not candidate or not reference:
        return float(len(candidate) == len(reference))
    # P = lcs / c and R = lcs / r, and so the harmonic mean is 2 lcs / (c + r).
    return 2 * common_subsequence(candidate, reference) / (len(candidate) + len(reference))


def edit_ratio(candidate: str, reference: str) -> float:
    """1 - distance / longer length, in characters (Levenshtein 1966). Raises DataError if the texts are too long."""
    longest = max(len(candidate), len(reference))
    return 1.0 if longest == 0 else 1.0 - edit_distance(candidate, reference) / longest


def common_subsequence(left: Sequence[str], right: Sequence[str]) -> int:
    """The length of the longest common subsequence (Hyyrö 2004). Raises DataError if the texts are too long."""
    long, short = _by_length(left, right)
    positions = _positions(short)
    full = (1 << len(short)) - 1
    row = full
    for unit in long:
        shared = row & positions.get(unit, 0)
        row = ((row + shared) | (row - shared)) & full
    return len(short) - row.bit_count()


def edit_distance(left: Sequence[str], right: Sequence[str]) -> int:
    """The least number of insertions, deletions and replacements that make one the other (Myers 1999, Hyyrö 2003).

    Raises DataError if the texts are too long.
    """
    long, short = _by_length(left, right)
    if not short:
        return len(long)
    positions = _positions(short)
    full, last = (1 << len(short)) - 1, 1 << (len(short) - 1)
    up, down, distance = full, 0, len(short)
    for unit in long:
        equal = positions.get(unit, 0)
        zero = (((equal & up) + up) ^ up) | equal | down
        right_up, right_down = down | (full & ~(zero | up)), up & zero
        distance += bool(right_up & last) - bool(right_down & last)
        right_up, right_down = (right_up << 1) | 1, right_down << 1
        up, down = (right_down | ~(zero | right_up)) & full, right_up & zero & full
    return distance


def _by_length(left: Sequence[str], right: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    if len(left) * len(right) > MAX_CELLS:
        raise DataError(
            f"texts of {len(left)} and {len(right)} units are too long to be aligned, expected a product of at most "
            f"{MAX_CELLS}; shorten them, or use bleu, chrf or jaccard"
        )
    return (left, right) if len(left) >= len(right) else (right, left)


def _positions(units: Sequence[str]) -> Mapping[str, int]:
    """For each unit, the bits of the places where it stands."""
    places = defaultdict[str, list[int]](list)
    for index, unit in enumerate(units):
        places[unit].append(index)
    return {unit: _bits(indices, size=len(units)) for unit, indices in places.items()}


def _bits(indices: Sequence[int], *, size: int) -> int:
    """Through bytes: setting bit after bit of a long integer would copy it each time."""
    buffer = bytearray(indices[-1] // 8 + 1)
    for index in indices:
        buffer[index // 8] |= 1 << (index % 8)
    return int.from_bytes(buffer, "little")
