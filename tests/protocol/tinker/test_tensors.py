from typing import Any

import numpy as np
import pytest

from protocol.tinker.messages import MESSAGES
from protocol.tinker.tensors import (
    FLOAT32,
    INT64,
    Array,
    TinkerWireError,
    dense_of_csr,
    read_tensor,
    write_csr,
    write_tensor,
)


def message(**fields: Any) -> Any:
    return MESSAGES["Tensor"](**fields)


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_a_dense_tensor_comes_back_as_it_was(dtype: type) -> None:
    array: Array = np.arange(6).reshape(2, 3).astype(dtype)
    read = read_tensor(write_tensor(array), "x")
    assert read.dtype == dtype
    np.testing.assert_array_equal(read, array)


def test_a_sparse_tensor_comes_back_dense() -> None:
    rows, columns = np.array([0, 1, 1, 3]), np.array([2, 0, 1])
    read = read_tensor(write_csr(np.array([0.5, 1.5, 2.5]), rows, columns, (3, 4)), "x")
    np.testing.assert_array_equal(read, [[0, 0, 0.5, 0], [0, 0, 0, 0], [1.5, 2.5, 0, 0]])


@pytest.mark.parametrize(
    ("tensor", "complaint"),
    [
        (message(dense=b"\0" * 4, dtype=9), "dtype 9"),
        (message(dense=b"\0" * 5, dtype=FLOAT32), "5 bytes"),
        (message(dense=b"\0" * 8, dtype=FLOAT32, shape=[3]), r"2 values came for the shape \[3\]"),
        (message(dense=b"\0" * 8, dtype=FLOAT32, shape=[-1, -2]), "2 values came for the shape"),
        (message(dense=b"", dtype=INT64, shape=[1 << 40]), "0 values came"),
        (message(dense=b"", dtype=INT64, shape=[0, 1 << 62, 1 << 62]), "0 values came"),
        (message(dense=b"\0" * 4, dtype=FLOAT32, shape=[1] * 70), "a shape of 70 sizes"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_its_field(tensor: Any, complaint: str) -> None:
    with pytest.raises(TinkerWireError, match=rf"data\[0\]\.weights: .*{complaint}|data\[0\]\.weights: {complaint}"):
        read_tensor(tensor, "data[0].weights")


@pytest.mark.parametrize(
    ("values", "rows", "columns", "shape"),
    [
        ([1.0], [0, 1], [0], (1 << 20, 1 << 20)),
        ([1.0], [0, 1], [0], (1,)),
        ([1.0], [0, 2], [0], (1, 2)),
        ([1.0, 2.0], [0, 2, 1, 2], [0, 1], (3, 2)),
        ([1.0], [0, 1], [2], (1, 2)),
        ([1.0], [0, 1], [-1], (1, 2)),
        ([1.0], [0, 1], [], (1, 2)),
        ([1.0], [], [0], (0, 2)),
        ([], [0], [], (0, 1 << 62)),
    ],
)
def test_csr_parts_that_do_not_fit_are_refused(values: Any, rows: Any, columns: Any, shape: Any) -> None:
    with pytest.raises(TinkerWireError, match="field: "):
        dense_of_csr(np.array(values), np.array(rows, np.int64), np.array(columns, np.int64), shape, "field")
