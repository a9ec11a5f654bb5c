"""The experts of a mixture that tokens were sent to while a policy was sampled, as they travel and lie on disk.

A token has a row once it was an input of the model: those of a prompt do, and each sampled one as soon as another was
sampled behind it. So the last token of a context has none, and each token behind it is predicted by rows that are
known. Spans say which tokens have one.
"""

import base64
import binascii
import zlib
from collections.abc import Sequence
from typing import Annotated, Any, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, PlainSerializer, PlainValidator, WithJsonSchema, model_validator

from protocol.model import WireModel

ExpertRows = npt.NDArray[np.unsignedinteger[Any]]
"""[tokens, layers, chosen], uint8 or uint16."""

MAX_LAYERS = 1024
MAX_CHOSEN = 64
NARROW = 256
"""Most experts of a layer whose numbers are a byte each; those of more are two."""
_MAX_TOKEN_BYTES = 1 << 14
_FASTEST = 1


def _as_bytes(value: object) -> npt.NDArray[np.uint8]:
    if isinstance(value, str):
        try:
            value = np.frombuffer(base64.b64decode(value, validate=True), dtype=np.uint8)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"expected bytes in base64: {error}") from error
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.ndim != 1:
        raise ValueError(f"expected a row of bytes, got {type(value).__name__}")
    value.flags.writeable = False
    return value


def _as_text(value: npt.NDArray[np.uint8]) -> str:
    return base64.b64encode(value.tobytes()).decode("ascii")


PackedBytes = Annotated[
    npt.NDArray[np.uint8],
    PlainValidator(_as_bytes),
    PlainSerializer(_as_text, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "format": "base64", "description": "bytes, in JSON as base64"}),
]


class RoutedExperts(WireModel):
    """Of the tokens `[start, end)` of each span, in order, the `chosen` experts of each of a model's `layers`.

    All hidden layers count; of one without experts the numbers mean nothing. `packed` are the rows, end to end for all
    spans, `[layers, chosen, tokens]`, compressed by zlib: numbers of a byte, or of two, little-endian, if they are
    `wide`. Within a row they rise, since their order means nothing.
    """

    spans: tuple[tuple[int, int], ...] = Field(min_length=1, max_length=4096)
    layers: int = Field(ge=1, le=MAX_LAYERS)
    chosen: int = Field(ge=1, le=MAX_CHOSEN)
    wide: bool = Field(default=False, exclude_if=lambda wide: not wide)
    packed: PackedBytes

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        end = 0
        for start, stop in self.spans:
            if not end <= start < stop:
                raise ValueError(f"routed experts of tokens [{start}, {stop}) behind those up to {end}")
            end = stop
        if self.layers * self.chosen * self._width > _MAX_TOKEN_BYTES:
            raise ValueError(
                f"routed experts of {self.layers} layers, {self.chosen} in each; at most {_MAX_TOKEN_BYTES} bytes a "
                "token are taken"
            )
        return self

    @classmethod
    def of(cls, pieces: Sequence[tuple[int, ExpertRows]]) -> Self:
        """Of rows [n, layers, chosen], each with the place of its first token; pieces that meet become one span."""
        spans: list[tuple[int, int]] = []
        for start, rows in pieces:
            if spans and spans[-1][1] == start:
                spans[-1] = (spans[-1][0], start + len(rows))
            else:
                spans.append((start, start + len(rows)))
        whole = np.concatenate([rows for _, rows in pieces])
        columns = np.ascontiguousarray(np.sort(whole, axis=2).transpose(1, 2, 0))
        packed = zlib.compress(columns.astype(columns.dtype.newbyteorder("<"), copy=False).tobytes(), _FASTEST)
        return cls(
            spans=tuple(spans),
            layers=whole.shape[1],
            chosen=whole.shape[2],
            wide=whole.dtype == np.uint16,
            packed=np.frombuffer(packed, dtype=np.uint8),
        )

    @property
    def tokens(self) -> int:
        """Number of tokens that have a row."""
        return sum(end - start for start, end in self.spans)

    @property
    def end(self) -> int:
        """Place behind the last token that has one."""
        return self.spans[-1][1]

    def rows(self) -> ExpertRows:
        """The rows of all spans, end to end, [tokens, layers, chosen]. Raises ValueError for other bytes."""
        size = self.tokens * self.layers * self.chosen * self._width
        unpacking = zlib.decompressobj()
        try:
            found = unpacking.decompress(self.packed.tobytes(), size + 1)
        except zlib.error as error:
            raise ValueError(f"routed experts do not unpack: {error}") from error
        if len(found) != size:
            got = f"more than {size}" if len(found) > size else str(len(found))
            raise ValueError(
                f"routed experts unpack to {got} bytes; expected {size}, of {self.tokens} tokens in {self.layers} "
                f"layers with {self.chosen} experts each"
            )
        dtype: np.dtype[Any] = np.dtype("<u2" if self.wide else "u1")
        columns = np.frombuffer(found, dtype=dtype).reshape(self.layers, self.chosen, self.tokens)
        return np.ascontiguousarray(columns.transpose(2, 0, 1))

    def pieces(self) -> list[tuple[int, ExpertRows]]:
        """The rows of each span, with the place of its first token. Raises ValueError as `rows` does."""
        rows, found, begun = self.rows(), [], 0
        for start, end in self.spans:
            found.append((start, rows[begun : begun + end - start]))
            begun += end - start
        return found

    @property
    def _width(self) -> int:
        return 2 if self.wide else 1
