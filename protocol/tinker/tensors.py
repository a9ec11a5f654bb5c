"""Tensors of the Tinker API: dense or CSR, in protobuf or JSON, read into dense arrays and written from them."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.tinker.messages import MESSAGES

Array = NDArray[Any]

FLOAT32, INT64, INT32 = 1, 2, 3
_DTYPES: dict[int, np.dtype[Any]] = {
    FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8"), INT32: np.dtype("<i4"),
}  # fmt: skip
_NAMES = {"float32": FLOAT32, "int64": INT64}
_MAX_CELLS = 1 << 25
MAX_SPARSE_CELLS = 1 << 25
"""Of all sparse tensors of a request together: a few bytes of theirs may stand for any number of cells."""
_MAX_DIMENSIONS = 8


class TinkerWireError(ValueError):
    """A body that does not fit the protocol. Says which field, what was expected and what came."""


def read_tensor(message: Any, field: str) -> Array:
    """A protobuf Tensor as a dense array, cells that CSR leaves out as 0. Raises TinkerWireError naming `field`."""
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise TinkerWireError(f"{field}: dtype {message.dtype} is not known; expected float32 (1) or int64 (2)")
    shape = list(message.shape)
    if len(shape) > _MAX_DIMENSIONS:
        raise TinkerWireError(f"{field}: a shape of {len(shape)} sizes; expected at most {_MAX_DIMENSIONS}")
    if message.HasField("sparse_csr"):
        csr = message.sparse_csr
        values = _items(csr.values, dtype, field)
        rows = _items(csr.crow_indices, _DTYPES[INT64], f"{field}.crow_indices")
        return dense_of_csr(values, rows, _items(csr.col_indices, _DTYPES[INT64], f"{field}.col_indices"), shape, field)
    values = _items(message.dense, dtype, field)
    shape = shape or [len(values)]
    fits = min(shape) >= 0 and max(shape) <= max(len(values), _MAX_CELLS) and math.prod(shape) == len(values)
    if not fits:
        raise TinkerWireError(f"{field}: {len(values)} values came for the shape {shape}; send as many as it has cells")
    return values.reshape(shape)


def sparse_cells(message: Any) -> int:
    """The cells that a protobuf Tensor has once it is dense; 0 for one that came dense."""
    return max(0, math.prod(message.shape)) if message.HasField("sparse_csr") else 0


def dense_of_csr(
    values: Array, rows: NDArray[np.int64], columns: NDArray[np.int64], shape: Sequence[int], field: str, pad: int = 0
) -> Array:
    """The dense [R, C] array of CSR parts; cells that are left out hold `pad`. Raises TinkerWireError."""
    if len(shape) != 2 or min(shape) < 0 or max(math.prod(shape), *shape) > _MAX_CELLS:
        raise TinkerWireError(f"{field}: the shape {list(shape)}; expected two sizes of at most {_MAX_CELLS} cells")
    fits = len(rows) == shape[0] + 1 and rows[0] == 0 and rows[-1] == len(values) and bool((np.diff(rows) >= 0).all())
    if not fits:
        raise TinkerWireError(
            f"{field}: crow_indices do not divide {len(values)} values into {shape[0]} rows; expected rising numbers "
            "from 0 to the count of the values"
        )
    if len(columns) != len(values) or (len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]):
        raise TinkerWireError(
            f"{field}: col_indices; expected a column below {shape[1]} for each of {len(values)} values"
        )
    dense = np.full(shape, pad, dtype=values.dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return dense


def write_tensor(array: Array) -> Any:
    """A dense protobuf Tensor: integers as int64, others as float32."""
    kind = INT64 if np.issubdtype(array.dtype, np.integer) else FLOAT32
    return MESSAGES["Tensor"](dense=array.astype(_DTYPES[kind]).tobytes(), dtype=kind, shape=list(array.shape))


def write_csr(values: Array, rows: NDArray[np.int64], columns: NDArray[np.int64], shape: Sequence[int]) -> Any:
    """A float32 protobuf Tensor in CSR."""
    message = MESSAGES["Tensor"](dtype=FLOAT32, shape=list(shape))
    message.sparse_csr.values = values.astype(_DTYPES[FLOAT32]).tobytes()
    message.sparse_csr.crow_indices = rows.astype(_DTYPES[INT64]).tobytes()
    message.sparse_csr.col_indices = columns.astype(_DTYPES[INT64]).tobytes()
    return message


def dtype_code(array: Array) -> int:
    """The number of the array's element type on the wire; arrays of other types are sent as float32."""
    return next((code for code, dtype in _DTYPES.items() if dtype == array.dtype), FLOAT32)


def array_bytes(array: Array) -> bytes:
    """The elements as they are sent under `dtype_code`."""
    return array.astype(_DTYPES[dtype_code(array)]).tobytes()


def _items(data: bytes, dtype: np.dtype[Any], field: str) -> Array:
    if len(data) % dtype.itemsize:
        raise TinkerWireError(f"{field}: {len(data)} bytes; expected whole items of {dtype.itemsize} bytes")
    return np.frombuffer(data, dtype)
