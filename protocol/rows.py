"""The arrays of a group's trajectories as they travel and lie on disk: end to end for all of them, and narrow.

Held are 9 bytes a token. Packed, without losing a bit of it:

- `token_ids` are uint16, with the ids' third bytes in `token_ids_high` (uint8) where one of them needs it;
- `mask_runs` are the lengths (int32) of the runs of equal entries of the loss mask, in turn of zeros and of ones: the
  first one is of zeros, and may be of none;
- `sampled_logprobs` are those of the entries that the mask marks; the others are 0.

A row for which this would be no smaller, or not exact, is sent as it is held, under the name that a trajectory has for
it. What a peer sends is unpacked only after its announced lengths agree, so that it never takes more memory than its
bytes and 9 for each of its token ids.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.trajectories import ROWS

Rows = dict[str, npt.NDArray[Any]]

HIGH, RUNS, SAMPLED = "token_ids_high", "mask_runs", "sampled_logprobs"
NAMES = (*ROWS, HIGH, RUNS, SAMPLED)

_LOW_BITS = 16
_TYPES: Mapping[str, tuple[np.dtype[Any], ...]] = {
    **{name: (dtype,) for name, dtype in ROWS.items()},
    "token_ids": (ROWS["token_ids"], np.dtype("<u2")),
    HIGH: (np.dtype("u1"),),
    RUNS: (np.dtype("<i4"),),
    SAMPLED: (np.dtype("<f4"),),
}


def packed(rows: Mapping[str, npt.NDArray[Any]]) -> Rows:
    """The message for these rows, [N] each; the mask holds zeros and ones."""
    mask, logprobs = rows["loss_mask"], rows["behavior_logprobs"]
    runs, sampled = _runs_of(mask), mask.view(np.bool_)
    return {
        **_packed_ids(rows["token_ids"]),
        **({RUNS: runs} if runs.nbytes < mask.nbytes else {"loss_mask": mask}),
        **({"behavior_logprobs": logprobs} if _any_bit(logprobs[~sampled]) else {SAMPLED: logprobs[sampled]}),
    }


def unpacked(sent: Mapping[str, Any], *, tokens: int) -> Rows:
    """The rows that were packed to this, [tokens] each. Raises ValueError that names what does not fit."""
    ids = _ids_of(_taken(sent, "token_ids", tokens), _taken(sent, HIGH, tokens) if HIGH in sent else None)
    for narrow, held in ((RUNS, "loss_mask"), (SAMPLED, "behavior_logprobs")):
        if narrow in sent and held in sent:
            raise ValueError(f"{narrow} beside {held}: expected one of them")
    mask = _mask_of(_taken(sent, RUNS), tokens) if RUNS in sent else _taken(sent, "loss_mask", tokens)
    logprobs = _spread(_taken(sent, SAMPLED), mask) if SAMPLED in sent else _taken(sent, "behavior_logprobs", tokens)
    return {"token_ids": ids, "loss_mask": mask, "behavior_logprobs": logprobs}


def _taken(sent: Mapping[str, Any], name: str, length: int | None = None) -> npt.NDArray[Any]:
    """The row of this name, if it is of one of its types, and of the length that it must have."""
    row = sent.get(name)
    if not isinstance(row, np.ndarray):
        raise ValueError(f"{name}: expected a numpy array, got {type(row).__name__}")
    if row.dtype not in _TYPES[name]:
        raise ValueError(f"{name}: expected a row of {_TYPES[name][0].name}, got 1-d {row.dtype.name}")
    if length is not None and row.shape[0] != length:
        raise ValueError(f"{name} has {row.shape[0]} entries for {length} tokens")
    return row


def _any_bit(logprobs: npt.NDArray[np.float32]) -> bool:
    return bool(logprobs.view(np.uint32).any())  # -0.0 has one


def _packed_ids(ids: npt.NDArray[np.int32]) -> Rows:
    largest = int(ids.max(initial=0))
    if int(ids.min(initial=0)) < 0 or largest >= 1 << 24:
        return {"token_ids": ids}
    low: Rows = {"token_ids": ids.astype("<u2")}  # keeps the lower bits
    return low if largest < 1 << _LOW_BITS else {**low, HIGH: (ids >> _LOW_BITS).astype("u1")}


def _runs_of(mask: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
    """The lengths of runs of equal entries, in turn of zeros and of others."""
    ends = np.flatnonzero(np.diff(mask, prepend=np.uint8(0), append=mask[-1:] ^ 1))
    return np.diff(ends, prepend=0).astype("<i4")


def _ids_of(low: npt.NDArray[Any], high: npt.NDArray[np.uint8] | None) -> npt.NDArray[np.int32]:
    if high is None:
        return low.astype(np.int32, copy=False)
    if low.dtype == ROWS["token_ids"]:
        raise ValueError(f"{HIGH} beside token_ids of int32: expected the lower 16 bits there")
    return low.astype(np.int32) | high.astype(np.int32) << _LOW_BITS


def _mask_of(runs: npt.NDArray[np.int32], tokens: int) -> npt.NDArray[np.uint8]:
    if int(runs.min(initial=0)) < 0 or int(runs.sum(dtype=np.int64)) != tokens:
        raise ValueError(f"{RUNS} are of {int(runs.sum(dtype=np.int64))} entries for {tokens} tokens, or below 0")
    ones = (np.arange(runs.shape[0]) & 1).astype(np.uint8)
    return np.repeat(ones, runs)


def _spread(sampled: npt.NDArray[np.float32], mask: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    marked = np.count_nonzero(mask)
    if sampled.shape[0] != marked:
        raise ValueError(f"{SAMPLED} has {sampled.shape[0]} entries for {marked} sampled tokens")
    logprobs = np.zeros(mask.shape[0], dtype=np.float32)
    logprobs[mask.astype(np.bool_)] = sampled
    return logprobs
