"""`forward_backward`: its protobuf request, and its answer, in records of datums whose outputs have one shape."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from protocol.tinker.messages import MESSAGES
from protocol.tinker.tensors import (
    MAX_SPARSE_CELLS,
    Array,
    TinkerWireError,
    array_bytes,
    dtype_code,
    read_tensor,
    sparse_cells,
    write_tensor,
)


@dataclass(frozen=True)
class ProvenanceSpan:
    """A run of tokens that a client says to be tokens of a sequence: of its prompt, or `sampled`."""

    sequence_id: str
    offset: int
    length: int
    sampled: bool


@dataclass(frozen=True)
class WireDatum:
    """A sequence with the inputs of its loss, dense; the spans tile `token_ids` and the target tokens, or are empty."""

    token_ids: NDArray[np.int64]
    inputs: Mapping[str, Array]
    input_spans: tuple[ProvenanceSpan, ...] = ()
    target_spans: tuple[ProvenanceSpan, ...] = ()


@dataclass(frozen=True)
class ForwardBackwardBody:
    """A request of forward_backward."""

    model_id: str
    seq_id: int
    data: tuple[WireDatum, ...]
    loss: str
    config: Mapping[str, float | str]
    forward_only: bool

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(len(datum.token_ids) for datum in self.data)


@dataclass(frozen=True)
class IdentifiedRequest:
    """A request's model and number, and its bytes in the one order that does not change from try to try."""

    model_id: str
    seq_id: int
    canonical: bytes


def identify_forward_backward(body: bytes) -> IdentifiedRequest:
    """The identity of a request. Each try of a client serializes its maps in another order. Raises TinkerWireError."""
    request = _parsed(body)
    if request.seq_id < 1:
        raise TinkerWireError(f"seq_id: {request.seq_id}; expected the model's next number, 1 for its first operation")
    return IdentifiedRequest(request.model_id, request.seq_id, bytes(request.SerializeToString(deterministic=True)))


def read_forward_backward(body: bytes) -> ForwardBackwardBody:
    """The request. Raises TinkerWireError."""
    request = _parsed(body)
    _check_cells(request)
    return ForwardBackwardBody(
        model_id=request.model_id,
        seq_id=request.seq_id,
        data=tuple(_datum(datum, f"data[{number}]") for number, datum in enumerate(request.data)),
        loss=request.loss_fn,
        config=_config(request),
        forward_only=request.forward_only,
    )


def with_loss_inputs(body: bytes, name: str, values: Mapping[int, Array]) -> bytes:
    """The request with one more input of its loss, for the data with these numbers."""
    request = _parsed(body)
    for number, array in values.items():
        request.data[number].loss_fn_inputs[name].CopyFrom(write_tensor(array))
    return bytes(request.SerializeToString(deterministic=True))


def write_forward_backward(outputs: Sequence[Mapping[str, Array]], metrics: Mapping[str, float]) -> bytes:
    """The answer. Neighbours with the same fields, types and trailing shapes share a record."""
    message = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord", metrics=dict(metrics))
    for layout, group in itertools.groupby(outputs, key=_layout):
        _add_record(message, layout, list(group))
    return bytes(message.SerializeToString())


def _parsed(body: bytes) -> Any:
    try:
        return MESSAGES["ForwardBackwardRequest"].FromString(body)
    except DecodeError as error:
        raise TinkerWireError(
            f"body: not a protobuf ForwardBackwardRequest: {error}; use an SDK of the release that this server serves"
        ) from error


def _check_cells(request: Any) -> None:
    """Before any tensor is unpacked: all of them are held together."""
    cells = sum(sparse_cells(tensor) for datum in request.data for tensor in datum.loss_fn_inputs.values())
    if cells > MAX_SPARSE_CELLS:
        raise TinkerWireError(
            f"data: sparse tensors of {cells} cells in all; expected at most {MAX_SPARSE_CELLS}. Send fewer data in a "
            "call, or tensors of fewer columns"
        )


def _config(request: Any) -> dict[str, float | str]:
    """The newer map wins: only it has texts."""
    config: dict[str, float | str] = dict(request.loss_fn_config)
    for name, value in request.loss_fn_config_v2.items():
        config[name] = value.text if value.HasField("text") else value.number
    return config


def _datum(datum: Any, field: str) -> WireDatum:
    return WireDatum(
        token_ids=_token_ids(datum, field),
        inputs={
            name: read_tensor(tensor, f"{field}.loss_fn_inputs.{name}") for name, tensor in datum.loss_fn_inputs.items()
        },
        input_spans=tuple(_span(span) for span in datum.model_input_spans),
        target_spans=tuple(_span(span) for span in datum.loss_fn_input_spans),
    )


def _token_ids(datum: Any, field: str) -> NDArray[np.int64]:
    chunks = []
    for number, chunk in enumerate(datum.model_input):
        if not chunk.HasField("encoded_text"):
            raise TinkerWireError(f"{field}.model_input[{number}]: an image or audio; this server trains text alone")
        if len(chunk.encoded_text.tokens) % 4:
            raise TinkerWireError(f"{field}.model_input[{number}].tokens: not whole int32 items")
        chunks.append(np.frombuffer(chunk.encoded_text.tokens, "<i4"))
    if not sum(map(len, chunks)):
        raise TinkerWireError(f"{field}.model_input: no tokens; expected at least one")
    token_ids: NDArray[np.int64] = np.concatenate(chunks).astype(np.int64)
    return token_ids


def _span(span: Any) -> ProvenanceSpan:
    sampled = span.HasField("sampled_tokens")
    part = span.sampled_tokens if sampled else span.prompt_tokens
    return ProvenanceSpan(part.sequence_id, part.offset, part.length, sampled)


_Layout = tuple[tuple[str, int, tuple[int, ...]], ...]


def _layout(output: Mapping[str, Array]) -> _Layout:
    return tuple((name, dtype_code(array), array.shape[1:]) for name, array in sorted(output.items()))


def _add_record(message: Any, layout: _Layout, outputs: Sequence[Mapping[str, Array]]) -> None:
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(outputs))
    for name, code, trailing in layout:
        parts = [array_bytes(output[name]) for output in outputs]
        tensor = record.fields[name]
        tensor.data, tensor.dtype = b"".join(parts), code
        tensor.offsets = np.cumsum([0, *map(len, parts)], dtype="<i8").tobytes()
        tensor.trailing_shape.extend(trailing)
