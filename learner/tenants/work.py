"""Operations of training models, parsed from the bodies in which they came and stand in the journal.

A body that does not fit is an operation too, one that fails in its turn: its number is taken, and those that follow it
must not wait for ever.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import ValidationError

from learner.algorithms.client_inputs import LAGS, PRESET_SETTING, VERSIONS
from learner.tenants.catalog import LossEntry
from learner.tenants.futures import ResultFuture
from learner.tenants.operations import LoggedOperation
from learner.training.client_operations import AdamStep, AdapterShape, ClientDatum, ForwardBackward, OperationError
from protocol.codec import describe
from protocol.tinker.bodies import (
    AdamParams,
    LoadWeights,
    OptimStep,
    OrderedBody,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
    TinkerLora,
)
from protocol.tinker.tensors import TinkerWireError
from protocol.tinker.training import (
    ForwardBackwardBody,
    WireDatum,
    identify_forward_backward,
    read_forward_backward,
    with_loss_inputs,
)

if TYPE_CHECKING:
    from learner.algorithms.client_graphs import LossGraph

ALL_WEIGHTS = AdapterShape(rank=0, seed=0)
"""The shape of a model that is no adapter."""
FORWARD_BACKWARD = "forward_backward"
LOAD_WEIGHTS = "load_weights"
_UNFIT, _FAILED = "unfit", "failed"
_RESTS_ON_SAMPLES = "stable_reinforce"
"""A loss for which each sequence that a datum names has to be known."""
_COUNTED_UP = "sampling_session_seq_id"
"""Clients count it up at each try of the same request."""
_BODIES: dict[str, type[OrderedBody] | type[LoadWeights]] = {
    "optim_step": OptimStep,
    "save_weights": SaveWeights,
    "save_weights_for_sampler": SaveWeightsForSampler,
    "save_weights_external": SaveWeightsExternal,
    LOAD_WEIGHTS: LoadWeights,
}
KINDS = (FORWARD_BACKWARD, *_BODIES)


@dataclass(frozen=True)
class UnfitOperation:
    """An operation whose body did not fit, and why."""

    message: str


@dataclass(frozen=True)
class FailedOperation:
    """An operation that the learner could not do, and why. Its client was told, so that it is not done later."""

    message: str


Work = (
    ForwardBackward
    | AdamStep
    | SaveWeights
    | SaveWeightsForSampler
    | SaveWeightsExternal
    | LoadWeights
    | UnfitOperation
    | FailedOperation
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Operation:
    """An accepted operation in its model's queue. `size`: bytes of its body, or of its tensors if that is more."""

    model_id: str
    seq_id: int
    kind: str
    work: Work
    future: ResultFuture
    size: int

    @property
    def tokens(self) -> int:
        """Tokens that it runs through the model."""
        return sum(len(each.token_ids) for each in self.work.data) if isinstance(self.work, ForwardBackward) else 0

    @property
    def is_pass(self) -> bool:
        """It may share a pass with others."""
        return isinstance(self.work, ForwardBackward)


def size_of(body: bytes, work: Work) -> int:
    """The size of an operation: a few bytes of a body may stand for large tensors, which are held until its turn."""
    data = work.data if isinstance(work, ForwardBackward) else ()
    held = sum(array.nbytes for datum in data for array in (datum.token_ids, *datum.inputs.values()))
    return max(len(body), held)


def failed(operation: Operation, message: str) -> LoggedOperation:
    """The operation as it stands in the journal once it has failed: a start must not do what its client was told of."""
    return LoggedOperation(
        operation.model_id, operation.seq_id, _FAILED, operation.future.digest, message.encode(errors="replace")
    )


def identify(kind: str, body: bytes) -> LoggedOperation:
    """The operation as it stands in the journal. Raises TinkerWireError, ValueError."""
    if kind == FORWARD_BACKWARD:
        request = identify_forward_backward(body)
        digest = _digest(kind, request.canonical)
        return LoggedOperation(request.model_id, request.seq_id, kind, digest, request.canonical)
    head = OrderedBody.model_validate_json(body)
    return LoggedOperation(head.model_id, head.seq_id, kind, digest_of_json(kind, body), body)


def digest_of_json(kind: str, body: bytes) -> str:
    """The digest by which a retry is known. It leaves out the one number that clients change at a retry."""
    rest = {name: value for name, value in json.loads(body).items() if name != _COUNTED_UP}
    return _digest(kind, json.dumps(rest, sort_keys=True).encode())


def _digest(kind: str, body: bytes) -> str:
    digest: str = xxhash.xxh3_128_hexdigest(kind.encode() + b"\0" + body)
    return digest


class CheckClaims(Protocol):
    """See SequenceRecords.check."""

    def __call__(self, owner: str, number: int, datum: WireDatum, *, all_known: bool) -> None:
        """Raises TinkerWireError for a datum that claims what was not sampled."""


class SampledVersions(Protocol):
    """See SequenceRecords.versions."""

    def __call__(self, owner: str, model_id: str, datum: WireDatum) -> NDArray[np.int64] | None:
        """Of the weights that sampled each target, None where that is not known."""


class WorkReader:
    """Parses operations. `parse_graph` makes the graph of a custom loss, `loss_used` is told which operation uses it,
    and says if it is still there; `check` is the trainer's, `check_claims` and `sampled_versions` those of the sampled
    sequences.
    """

    def __init__(
        self,
        *,
        losses: Mapping[str, LossEntry],
        parse_graph: Callable[[LossEntry], "LossGraph"],
        loss_used: Callable[[str, str, int], bool],
        check: Callable[[ForwardBackward], None],
        check_claims: CheckClaims,
        sampled_versions: SampledVersions,
    ) -> None:
        self._losses, self._parse_graph, self._loss_used = losses, parse_graph, loss_used
        self._check, self._check_claims, self._sampled_versions = check, check_claims, sampled_versions

    def accept(self, logged: LoggedOperation, *, owner: str) -> tuple[LoggedOperation, Work]:
        """A new operation, and as it is to stand in the journal: a replay may not judge it in another way, nor find
        the sequences gone that it names.
        """
        if logged.kind == FORWARD_BACKWARD:
            logged = replace(logged, body=self._with_versions(logged.body, owner))
        work = self.read(logged.kind, logged.body, owner=owner, new=True)
        if isinstance(work, UnfitOperation):
            return replace(logged, kind=_UNFIT, body=work.message.encode()), work
        return logged, work

    def _with_versions(self, body: bytes, owner: str) -> bytes:
        """The body, with the versions of the sequences that its data name where their loss may rest on them."""
        if PRESET_SETTING.encode() not in body:
            return body  # which saves parsing it
        try:
            parts = read_forward_backward(body)
        except TinkerWireError:
            return body  # is refused when it is read
        if PRESET_SETTING not in parts.config:
            return body
        found = {
            number: versions
            for number, datum in enumerate(parts.data)
            if not {LAGS, VERSIONS} & set(datum.inputs)
            and (versions := self._sampled_versions(owner, parts.model_id, datum)) is not None
        }
        return with_loss_inputs(body, VERSIONS, found) if found else body

    def read(self, kind: str, body: bytes, *, owner: str, new: bool = False) -> Work:
        """The operation, UnfitOperation for one that cannot be done. What a `new` one claims was sampled is checked."""
        if kind in (_UNFIT, _FAILED):
            return (UnfitOperation if kind == _UNFIT else FailedOperation)(body.decode())
        try:
            if kind == FORWARD_BACKWARD:
                parts = read_forward_backward(body)
                for number, datum in enumerate(parts.data if new else ()):
                    self._check_claims(owner, number, datum, all_known=parts.loss == _RESTS_ON_SAMPLES)
                operation = self._forward_backward(parts, owner)
                self._check(operation)
                return operation
            parsed = _BODIES[kind].model_validate_json(body)
            if isinstance(parsed, OptimStep):
                return _adam_step(parsed)
            assert isinstance(parsed, SaveWeights | SaveWeightsForSampler | SaveWeightsExternal | LoadWeights), kind
            return parsed
        except (TinkerWireError, OperationError) as error:
            return UnfitOperation(str(error))
        except ValidationError as error:
            return UnfitOperation(f"{kind}: {describe(error)}")

    def _forward_backward(self, body: ForwardBackwardBody, owner: str) -> ForwardBackward:
        return ForwardBackward(
            model_id=body.model_id,
            data=tuple(ClientDatum(each.token_ids, each.inputs) for each in body.data),
            loss=body.loss,
            config=body.config,
            forward_only=body.forward_only,
            graph=self._graph(body, owner),
        )

    def _graph(self, body: ForwardBackwardBody, owner: str) -> "LossGraph | None":
        if body.loss != "custom":
            return None
        loss_id = str(body.config.get("loss_id", ""))
        loss = self._losses.get(loss_id)
        if loss is None or loss.owner != owner or not self._loss_used(loss_id, body.model_id, body.seq_id):
            raise TinkerWireError(
                f"loss_fn_config.loss_id: no custom loss {loss_id!r}; make it with create_custom_loss"
            )
        return self._parse_graph(loss)


def shape_of(lora: TinkerLora, *, seed: int) -> AdapterShape:
    """The adapter that a client asks for; `seed` if it names none."""
    return AdapterShape(
        rank=lora.rank,
        seed=seed if lora.seed is None else lora.seed,
        attention=lora.train_attn,
        mlp=lora.train_mlp,
        unembed=lora.train_unembed,
    )


def _adam_step(body: OptimStep) -> AdamStep:
    if body.optimizer_params is not None:
        raise TinkerWireError(
            f"optimizer_params.type: {body.optimizer_params.type!r}; this server has AdamW alone: send adam_params"
        )
    params = body.adam_params or AdamParams()
    names = {field.name for field in fields(AdamStep)}
    return AdamStep(model_id=body.model_id, **{k: v for k, v in params.model_dump().items() if k in names})
