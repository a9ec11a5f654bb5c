"""The undisturbed twin of a training model: does each operation once, in order, when it is made up, and so knows what a
client has to be answered, whatever happens to the learner.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from learner.tenants.work import FORWARD_BACKWARD, LOAD_WEIGHTS
from learner.training.client_operations import AdamStep, AdapterShape, ClientDatum, ForwardBackward
from protocol.tinker.messages import MESSAGES
from protocol.tinker.tensors import write_tensor
from protocol.tinker.training import read_forward_backward
from simulation.actors.tenant_trainer import POISON, MarkedAdapter

PROTOBUF, JSON = "application/x-protobuf", "application/json"
_CLOSE = 1e-6


@dataclass(frozen=True)
class ExpectedAnswer:
    """The answer of an undisturbed run: metrics and logprobs, fields of a JSON object, or the category of an error."""

    metrics: dict[str, float] = field(default_factory=dict)
    logprobs: tuple[np.ndarray[Any, Any], ...] = ()
    fields: Mapping[str, object] = field(default_factory=dict)
    error: str = ""

    def fault_of(self, content_type: str, payload: bytes) -> str:
        """The way in which an answer is another one; empty if it is this one."""
        if content_type == PROTOBUF:
            return self._fault_of_pass(MESSAGES["ForwardBackwardOutput"].FromString(payload))
        given = json.loads(payload)
        if "error" in given or self.error:
            said = given.get("category", "no error")
            return "" if said == self.error else f"{given}, expected {self.error or 'no'} error"
        if self.logprobs:
            return f"{given} in place of a pass"
        wrong = [name for name, value in self.fields.items() if given.get(name) != value]
        return _fault_of_metrics(given.get("metrics", {}), self.metrics) or (
            f"{given}, expected {self.fields}" if wrong else ""
        )

    def _fault_of_pass(self, message: Any) -> str:
        if self.error or not self.logprobs:
            return "a pass in place of something else"
        given = [np.frombuffer(record.fields["logprobs"].data, "<f4") for record in message.loss_fn_outputs]
        flat, due = np.concatenate(given), np.concatenate(self.logprobs)
        if flat.shape != due.shape or not np.allclose(flat, due, rtol=0, atol=_CLOSE):
            return f"logprobs {flat.tolist()}, expected {due.tolist()}"
        return _fault_of_metrics(dict(message.metrics), self.metrics)


def _fault_of_metrics(given: dict[str, float], due: dict[str, float]) -> str:
    wrong = {name for name in due if abs(given.get(name, np.inf) - due[name]) > _CLOSE}
    return f"{given}, expected {due}" if wrong else ""


@dataclass(eq=False)
class PlannedOperation:
    """An operation of a model, as it is sent, with what it is answered. `done`: the answer was seen."""

    model_id: str
    seq_id: int
    kind: str
    body: bytes | dict[str, Any]
    expected: ExpectedAnswer
    done: bool = False
    lost: bool = False
    """The learner's disk refused what it had to write."""

    @property
    def loads(self) -> bool:
        """True if it takes the state of a checkpoint."""
        return self.kind == LOAD_WEIGHTS

    @property
    def request_id(self) -> str:
        """The name of its future."""
        return f"{self.model_id}:{self.seq_id}"

    def sent(self) -> tuple[bytes, str]:
        """The body of a try, and its content type; a sampling session's number is counted up by each."""
        if isinstance(self.body, bytes):
            return self.body, PROTOBUF
        body = json.dumps(self.body).encode()
        if "sampling_session_seq_id" in self.body:
            self.body["sampling_session_seq_id"] += 1000
        return body, JSON


@dataclass(frozen=True)
class SavedState:
    """A checkpoint, as it has to be: the adapter at that time."""

    path: str
    state: dict[str, Any]
    by: PlannedOperation


@dataclass(frozen=True)
class SavedMark:
    """Weights that were saved for samplers: by which operation, after how many steps, with which chain."""

    seq_id: int
    steps: int
    chain: bytes


@dataclass
class TwinModel:
    """`states` are its checkpoints by name, `marks` what it saved for samplers by kind; `versions` counts its steps as
    the learner does.
    """

    model_id: str
    adapter: MarkedAdapter
    seq_id: int = 0
    operations: list[PlannedOperation] = field(default_factory=list)
    states: dict[str, SavedState] = field(default_factory=dict)
    marks: dict[str, list[SavedMark]] = field(default_factory=lambda: {"inflight": [], "snapshot": []})

    @classmethod
    def new(cls, model_id: str, shape: AdapterShape) -> "TwinModel":
        """Of a model that is made anew."""
        return cls(model_id, MarkedAdapter.new(shape))

    @classmethod
    def loaded(cls, model_id: str, session_id: str, shape: AdapterShape, source: SavedState) -> "TwinModel":
        """Of a model that is made of a checkpoint, with its optimizer: that is operation 0."""
        model = cls(model_id, MarkedAdapter.of_state(shape, source.state, optimizer=True), seq_id=-1)
        body = {"session_id": session_id, "model_seq_id": int(model_id.rpartition(":")[2])}
        fields = {"path": source.path, "model_id": model_id}
        model._planned(LOAD_WEIGHTS, {**body, "path": source.path, "optimizer": True}, ExpectedAnswer(fields=fields))
        return model

    def forward_backward(
        self, rows: Sequence[Sequence[int]], weights: Sequence[float], *, forward_only: bool = False, trouble: str = ""
    ) -> PlannedOperation:
        """A pass over rows; `trouble`: a number that is none, or a token that breaks the trainer."""
        seq_id = self.seq_id + 1
        request = MESSAGES["ForwardBackwardRequest"](
            model_id=self.model_id, seq_id=seq_id, loss_fn="cross_entropy", forward_only=forward_only
        )
        for row, weight in zip(rows, weights, strict=True):
            row = [*row, POISON] if trouble == "poison" else row
            datum = request.data.add()
            datum.model_input.add().encoded_text.tokens = np.array(row, "<i4").tobytes()
            weight = float("nan") if trouble == "nan" else weight
            datum.loss_fn_inputs["weights"].CopyFrom(write_tensor(np.full(len(row), weight, np.float32)))
        body = bytes(request.SerializeToString())
        if trouble:
            return self._planned(FORWARD_BACKWARD, body, ExpectedAnswer(error="user" if trouble == "nan" else "server"))
        parts = read_forward_backward(body)
        data = tuple(ClientDatum(each.token_ids, each.inputs) for each in parts.data)
        result = self.adapter.run(ForwardBackward(self.model_id, data, parts.loss, forward_only=forward_only))
        logprobs = tuple(output.arrays["logprobs"] for output in result.outputs)
        return self._planned(FORWARD_BACKWARD, body, ExpectedAnswer(dict(result.metrics), logprobs))

    def step(self, *, learning_rate: float, beta1: float) -> PlannedOperation:
        """A step of the optimizer."""
        metrics = self.adapter.step(AdamStep(self.model_id, learning_rate=learning_rate, beta1=beta1))
        body = {"adam_params": {"learning_rate": learning_rate, "beta1": beta1}}
        return self._planned("optim_step", body, ExpectedAnswer(metrics))

    def save(self, name: str, *, overwrite: bool = False) -> PlannedOperation:
        """A checkpoint; an error if there is one of that name, unless it is to be overwritten."""
        path = f"tinker://{self.model_id}/weights/{name}"
        refused = name in self.states and not overwrite
        expected = ExpectedAnswer(error="user") if refused else ExpectedAnswer(fields={"path": path})
        operation = self._planned("save_weights", {"path": name, "overwrite": overwrite}, expected)
        if not refused:
            self.states[name] = SavedState(path, self.adapter.state(), operation)
        return operation

    def load(self, source: SavedState | str, *, optimizer: bool = True) -> PlannedOperation:
        """A checkpoint's state in the place of the model's; an error for the path of one that is not there."""
        path = source if isinstance(source, str) else source.path
        expected = ExpectedAnswer(error="user") if isinstance(source, str) else ExpectedAnswer(fields={"path": path})
        if not isinstance(source, str):
            self.adapter = MarkedAdapter.of_state(self.adapter.shape, source.state, optimizer=optimizer)
        return self._planned(LOAD_WEIGHTS, {"path": path, "optimizer": optimizer}, expected)

    def sampler(self, kind: str, *, number: int) -> PlannedOperation:
        """Weights for a sampling session, which the answer names."""
        body = {"kind": kind, "sampling_session_seq_id": number}
        operation = self._planned("save_weights_for_sampler", body, ExpectedAnswer())
        self.marks[kind].append(SavedMark(operation.seq_id, self.adapter.steps, self.adapter.chain))
        return operation

    def _planned(self, kind: str, body: bytes | dict[str, Any], expected: ExpectedAnswer) -> PlannedOperation:
        self.seq_id += 1
        if isinstance(body, dict) and "session_id" not in body:
            body = {"model_id": self.model_id, "seq_id": self.seq_id, **body}
        operation = PlannedOperation(self.model_id, self.seq_id, kind, body, expected)
        self.operations.append(operation)
        return operation
