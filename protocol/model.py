"""The base of everything on the wire (frozen, strict, closed to unknown fields), its versions, and arrays as fields."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, PlainValidator, StringConstraints, WithJsonSchema

PROTOCOL_VERSION = 7
"""Rises with every change that an older peer would misread."""
ROWS_APART = 4
"""The newest version whose groups have arrays for each trajectory; files of groups may be of it."""
S = TypeVar("S", bound=np.generic)
DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(f"<{name}") for name in ("i4", "f4", "u1", "u2")}
"""The codes that a header may name. Anything else is refused."""


class WireModel(BaseModel):
    """A frozen record. An unknown field, or a value of another type, is an error and never coerced."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", ser_json_inf_nan="constants")


VersionText = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})$")]
"""A policy version as it stands on the wire: `incarnation.number`, such as `1.42`. Both parts fit an int32."""


@lru_cache(maxsize=4096)
def _parts(text: str) -> tuple[int, int]:
    incarnation, dot, number = text.partition(".")
    if not (dot and incarnation.isdecimal() and number.isdecimal()):
        raise ValueError(f"policy version {text!r} is not of the form incarnation.number, such as '1.42'")
    return int(incarnation), int(number)


@dataclass(frozen=True, order=True)
class PolicyVersion:
    """Names weights: the start of the learner that published them, and the number of steps they were trained for.

    Lag counts numbers only: a restarted learner replays its batch log, so a number names the same policy in every
    incarnation. The incarnation keeps caches and late replies of an earlier life apart.
    """

    incarnation: int
    number: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `str()`. Raises ValueError that names the text."""
        return cls(*_parts(text))

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.number}"


def _is_row(dtype: type[S]) -> Callable[[object], npt.NDArray[S]]:
    expected = np.dtype(dtype)

    def check(value: object) -> npt.NDArray[S]:
        if not isinstance(value, np.ndarray):
            raise ValueError(f"expected a numpy array, got {type(value).__name__}")
        if value.dtype != expected or value.ndim != 1:
            raise ValueError(f"expected a row of {expected.name}, got {value.ndim}-d {value.dtype.name}")
        value.flags.writeable = False
        return value

    return check


def _schema(what: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "format": "binary", "description": what})


Int32Row = Annotated[npt.NDArray[np.int32], PlainValidator(_is_row(np.int32)), _schema("little-endian int32")]
Float32Row = Annotated[npt.NDArray[np.float32], PlainValidator(_is_row(np.float32)), _schema("little-endian float32")]
ByteRow = Annotated[npt.NDArray[np.uint8], PlainValidator(_is_row(np.uint8)), _schema("bytes")]


def code_of(array: npt.NDArray[Any]) -> str:
    """The wire code of an array's element type. Raises TypeError for a type that has none."""
    for code, dtype in DTYPES.items():
        if array.dtype == dtype:
            return code
    raise TypeError(f"no wire code for arrays of {array.dtype.name}; expected one of {sorted(DTYPES)}")
