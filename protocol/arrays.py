"""One-dimensional numpy arrays as fields of a message. They travel as frames of their own, without a copy."""

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import PlainValidator, WithJsonSchema

S = TypeVar("S", bound=np.generic)


def _is_row(dtype: type[S]) -> Callable[[object], npt.NDArray[S]]:
    def check(value: object) -> npt.NDArray[S]:
        if not isinstance(value, np.ndarray):
            raise ValueError(f"expected a numpy array, got {type(value).__name__}")
        if value.dtype != np.dtype(dtype) or value.ndim != 1:
            raise ValueError(f"expected a row of {np.dtype(dtype).name}, got {value.ndim}-d {value.dtype.name}")
        value.flags.writeable = False
        return value

    return check


def _schema(what: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "format": "binary", "description": what})


Int32Row = Annotated[npt.NDArray[np.int32], PlainValidator(_is_row(np.int32)), _schema("little-endian int32")]
Float32Row = Annotated[npt.NDArray[np.float32], PlainValidator(_is_row(np.float32)), _schema("little-endian float32")]
ByteRow = Annotated[npt.NDArray[np.uint8], PlainValidator(_is_row(np.uint8)), _schema("bytes")]

DTYPES: dict[str, np.dtype[Any]] = {"i4": np.dtype("<i4"), "f4": np.dtype("<f4"), "u1": np.dtype("u1")}
"""The codes that a header may name. Anything else is refused."""


def code_of(array: npt.NDArray[Any]) -> str:
    """The wire code of an array's element type. Raises TypeError for a type that has none."""
    for code, dtype in DTYPES.items():
        if array.dtype == dtype:
            return code
    raise TypeError(f"no wire code for arrays of {array.dtype.name}; expected one of {sorted(DTYPES)}")
