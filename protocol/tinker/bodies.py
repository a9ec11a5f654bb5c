"""The JSON bodies of the Tinker API that a server reads. Fields that later SDKs add are ignored."""

import json
from collections.abc import Callable
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue

Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9._:=+@-]+$")]
"""A name of a checkpoint: one part of a path."""
_MIN_TTL_S, _MAX_TTL_S = 3600, 10 * 366 * 86_400
Ttl = Annotated[int | None, Field(ge=_MIN_TTL_S, le=_MAX_TTL_S)]
"""Seconds until a checkpoint goes; None is never."""
_MAX_SEQ = 2**62
SeqId = Annotated[int, Field(ge=0, le=_MAX_SEQ)]
_MAX_SAMPLES = 4096
_MAX_TOP = 1024
_MAX_NOTE_BYTES, _MAX_GRAPH_BYTES = 1 << 14, 1 << 20
_MAX_DEPTH = 64
"""Of what a client may put in as it likes. It is kept within other JSON, whose readers have a bound of depth, too."""
T = TypeVar("T")


def _at_most(most: int) -> Callable[[T], T]:
    """A check of JSON of any form, which is kept: its bytes, and how deep it is."""

    def check(value: T) -> T:
        if _depth(value) > _MAX_DEPTH:
            raise ValueError(f"too deep: expected at most {_MAX_DEPTH} objects or arrays in one another")
        if (size := len(json.dumps(value))) > most:
            raise ValueError(f"{size} bytes of JSON: expected at most {most}")
        return value

    return check


def _depth(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return 1 + max(map(_depth, inner), default=0) if isinstance(value, dict | list | tuple) else 0


Note = Annotated[JsonValue, AfterValidator(_at_most(_MAX_NOTE_BYTES))]
"""Something that a client wants to be remembered."""
Notes = Annotated[dict[str, JsonValue], AfterValidator(_at_most(_MAX_NOTE_BYTES))]
TextNotes = Annotated[dict[str, str], AfterValidator(_at_most(_MAX_NOTE_BYTES))]
Title = Annotated[str, Field(max_length=1024)]


class TinkerBody(BaseModel):
    """A body of the SDK."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class CreateSession(TinkerBody):
    tags: tuple[str, ...] = ()
    user_metadata: Notes | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: Title | None = None


class SessionBody(TinkerBody):
    """Names a session."""

    session_id: str


class FinishSession(TinkerBody):
    status: Note = None
    detail: Annotated[str, Field(max_length=_MAX_NOTE_BYTES)] | None = None


class TinkerLora(TinkerBody):
    rank: int = Field(default=32, ge=0, le=1024)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class TinkerOptimizer(TinkerBody):
    type: str = "adamw"


class CreateModel(TinkerBody):
    session_id: str
    model_seq_id: SeqId
    base_model: str
    user_metadata: Notes | None = None
    lora_config: TinkerLora | None = None
    optimizer_config: TinkerOptimizer = TinkerOptimizer()


class ModelBody(TinkerBody):
    """Names a training model."""

    model_id: str


class OrderedBody(ModelBody):
    """An operation that has its turn in a model's sequence."""

    seq_id: SeqId


class AdamParams(TinkerBody):
    learning_rate: float = Field(default=1e-4, allow_inf_nan=False)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, ge=0, allow_inf_nan=False)
    weight_decay: float = Field(default=0.0, allow_inf_nan=False)
    grad_clip_norm: float = Field(default=0.0, allow_inf_nan=False)


class OptimStep(OrderedBody):
    """`optimizer_params` are those of an optimizer that is not Adam."""

    adam_params: AdamParams | None = None
    optimizer_params: TinkerOptimizer | None = None


class SaveWeights(OrderedBody):
    path: Name
    ttl_seconds: Ttl = None
    overwrite: bool = False
    user_metadata: TextNotes | None = None


class SaveWeightsExternal(OrderedBody):
    path: Name
    ttl_seconds: Ttl = None
    age_encryption_recipients: tuple[str, ...] | None = None


class SaveWeightsForSampler(OrderedBody):
    """With `path` a checkpoint, else a sampling session; clients count `sampling_session_seq_id` up at each try."""

    path: Name | None = None
    sampling_session_seq_id: SeqId | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Ttl = None
    user_metadata: TextNotes | None = None


class LoadWeights(TinkerBody):
    """Into a model, or with a session into a new one, whose operation 0 it is."""

    model_id: str | None = None
    seq_id: SeqId | None = None
    session_id: str | None = None
    model_seq_id: SeqId | None = None
    base_model: str | None = None
    user_metadata: Notes | None = None
    path: str
    optimizer: bool
    optimizer_config: TinkerOptimizer | None = None


class CopyWeights(TinkerBody):
    source_path: str
    session_id: str | None = None
    model_seq_id: SeqId | None = None
    destination_project_id: str | None = None
    ttl_seconds: Ttl = None


class CustomLossInput(TinkerBody):
    name: Title
    rank: int = Field(ge=0, le=8)


class CreateCustomLoss(TinkerBody):
    session_id: str
    custom_loss_seq_id: SeqId
    name: Title = ""
    inputs: Annotated[tuple[CustomLossInput, ...], Field(max_length=64)]
    graph: Annotated[dict[str, JsonValue], AfterValidator(_at_most(_MAX_GRAPH_BYTES))]


class CreateSamplingSession(TinkerBody):
    session_id: str
    sampling_session_seq_id: SeqId
    base_model: str | None = None
    model_path: str | None = None


class SamplingSessionBody(TinkerBody):
    """Names a sampling session."""

    sampling_session_id: str


class PromptChunk(TinkerBody):
    type: str = "encoded_text"
    tokens: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...] | None = None


class Prompt(TinkerBody):
    chunks: tuple[PromptChunk, ...]


class SamplingParams(TinkerBody):
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | tuple[str, ...] | tuple[int, ...] | None = None
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_k: int = Field(default=-1, ge=-1)
    top_p: float = Field(default=1.0, gt=0, le=1)


class JsonTensor(TinkerBody):
    """A tensor; with `sparse_crow_indices` it is CSR."""

    data: list[int] | list[float]
    dtype: Literal["int64", "float32"]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class SampleBody(TinkerBody):
    sampling_session_id: str
    seq_id: SeqId
    num_samples: int = Field(default=1, ge=1, le=_MAX_SAMPLES)
    prompt: Prompt
    sampling_params: SamplingParams
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(default=0, ge=0, le=_MAX_TOP)
    topk_sample_logprobs: int = Field(default=0, ge=0, le=_MAX_TOP)
    target_prompt_logprobs: JsonTensor | None = None
    prompt_alt_tokens_k: int = Field(default=0, ge=0, le=_MAX_TOP)
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


class RetrieveFuture(TinkerBody):
    request_id: str
    allow_metadata_only: bool = False


class FutureBody(TinkerBody):
    """Names a request."""

    request_id: str


class FuturesTarget(TinkerBody):
    sampling_session_id: str
    cloned_sampler_id: SeqId = 0


class RetrieveFutures(TinkerBody):
    """`prev_cursor` is that of the former answer; with `timeout` 0 retrieved requests are acknowledged alone."""

    target: FuturesTarget
    prev_cursor: int = Field(default=0, ge=0)
    timeout: float | None = Field(default=None, ge=0)
    retrieved_request_ids: tuple[str, ...] = ()


class WeightsPath(TinkerBody):
    tinker_path: str


class CheckpointTtl(TinkerBody):
    ttl_seconds: Ttl = None


class SearchCursor(TinkerBody):
    last_created_at: str
    last_session_id: str


class SearchSessions(TinkerBody):
    session_id: str | None = None
    user_metadata: dict[str, str] = {}
    display_name: str | None = None
    limit: int = Field(default=50, ge=1, le=200)
    cursor: SearchCursor | None = None
