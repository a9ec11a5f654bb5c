"""`asample`: its JSON request as a record for samplers, and its protobuf answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.tinker.bodies import JsonTensor, SampleBody
from protocol.tinker.messages import MESSAGES
from protocol.tinker.tensors import TinkerWireError, dense_of_csr, write_csr, write_tensor

_MAX_INTEGER = 1 << 63
NO_TARGET = -1
_DEFAULT_MAX_TOKENS = 128
_MAX_TARGETS = 256
"""Of a place."""


@dataclass(frozen=True)
class SampleRequest:
    """Completions of a prompt that a client asks for.

    `stop`: texts or token ids; None is the model's own end, an empty tuple nothing at all. `last_n`: how many of the
    last prompt tokens are scored; None is all. `targets` int64 [len(prompt) - 1, K]: tokens to score at each position
    after the first, NO_TARGET where none is asked. `alternatives`: tokens to draw at each position after the first.
    """

    prompt: tuple[int, ...]
    samples: int = 1
    max_tokens: int = _DEFAULT_MAX_TOKENS
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] | tuple[int, ...] | None = None
    prompt_logprobs: bool = False
    last_n: int | None = None
    topk_prompt: int = 0
    topk_sample: int = 0
    targets: NDArray[np.int64] | None = None
    alternatives: int = 0


@dataclass(frozen=True)
class BestTokens:
    """The k best tokens of n places: `token_ids` and `logprobs` [n, k]."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True)
class SampledTokens:
    """A completion. `logprobs` are those that its tokens were sampled with, `versions` the policy version of each.

    `stopped` says that it ended by itself or at a stop, not at the number of tokens.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    stopped: bool
    top: BestTokens | None = None


@dataclass(frozen=True)
class SampleAnswer:
    """The answer of a sampler: as many sequences as asked for, and the scores of the prompt that were asked for.

    `prompt_logprobs` [len(prompt)], NaN at 0 and before the last n; `targets` shaped as asked, 0 where none was;
    `alternatives`: token ids and logprobs [len(prompt) - 1, k].
    """

    sequences: tuple[SampledTokens, ...]
    prompt_logprobs: Sequence[float] | None = None
    topk_prompt: BestTokens | None = None
    targets: NDArray[np.float32] | None = None
    alternatives: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None


def read_sample(body: SampleBody) -> SampleRequest:
    """The request. Raises TinkerWireError."""
    prompt = tuple(token for number, chunk in enumerate(body.prompt.chunks) for token in _tokens(chunk.tokens, number))
    if not prompt:
        raise TinkerWireError("prompt: no tokens; expected at least one")
    params = body.sampling_params
    stop = (params.stop,) if isinstance(params.stop, str) else params.stop
    last_n = body.prompt_logprobs_last_n
    if last_n is not None and not (body.prompt_logprobs and 1 <= last_n < len(prompt)):
        raise TinkerWireError(
            f"prompt_logprobs_last_n: {last_n}; expected 1 to {len(prompt) - 1}, one less than the prompt has tokens, "
            "together with prompt_logprobs"
        )
    return SampleRequest(
        prompt=prompt,
        samples=body.num_samples,
        max_tokens=_DEFAULT_MAX_TOKENS if params.max_tokens is None else params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed,
        stop=stop,
        prompt_logprobs=bool(body.prompt_logprobs),
        last_n=last_n,
        topk_prompt=body.topk_prompt_logprobs,
        topk_sample=body.topk_sample_logprobs,
        targets=_targets(body.target_prompt_logprobs, len(prompt) - 1),
        alternatives=body.prompt_alt_tokens_k,
    )


def write_sample(answer: SampleAnswer, body: SampleBody) -> bytes:
    """The answer to the request; the scores of targets in the layout that the targets came in."""
    message = MESSAGES["SampleResponse"]()
    for sequence in answer.sequences:
        _add_sequence(message, sequence)
    if answer.prompt_logprobs is not None:
        message.prompt_logprobs = np.asarray(answer.prompt_logprobs, "<f4").tobytes()
    if answer.topk_prompt is not None:
        message.topk_prompt_logprobs.CopyFrom(_top(answer.topk_prompt))
    if answer.targets is not None and body.target_prompt_logprobs is not None:
        message.target_prompt_logprobs.CopyFrom(_like(body.target_prompt_logprobs, answer.targets))
    if answer.alternatives is not None:
        token_ids, logprobs = answer.alternatives
        message.prompt_alt_tokens.tokens.CopyFrom(write_tensor(token_ids))
        message.prompt_alt_tokens.logprobs.CopyFrom(write_tensor(logprobs))
    return bytes(message.SerializeToString())


def _tokens(tokens: Sequence[int] | None, number: int) -> Sequence[int]:
    if tokens is None:
        raise TinkerWireError(f"prompt.chunks[{number}]: no tokens; this server samples from text alone")
    return tokens


def _targets(tensor: JsonTensor | None, places: int) -> NDArray[np.int64] | None:
    if tensor is None:
        return None
    field = "target_prompt_logprobs"
    shape = tensor.shape or [len(tensor.data)]
    if tensor.dtype != "int64" or len(shape) != 2 or shape[0] != places:
        raise TinkerWireError(
            f"{field}: {tensor.dtype} of shape {shape}; expected int64 [{places}, K], "
            "a row for each token after the first"
        )
    if shape[1] > _MAX_TARGETS:
        raise TinkerWireError(f"{field}: {shape[1]} tokens a place; expected at most {_MAX_TARGETS}")
    values = _integers(tensor.data, field)
    if tensor.sparse_crow_indices is not None:
        rows, columns = _csr(tensor, field)
        return dense_of_csr(values, rows, columns, shape, field, pad=NO_TARGET)
    if values.size != shape[0] * shape[1]:
        raise TinkerWireError(f"{field}: {values.size} values came for the shape {shape}")
    return values.reshape(shape)


def _csr(tensor: JsonTensor, field: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    rows = _integers(tensor.sparse_crow_indices or [], f"{field}.sparse_crow_indices")
    return rows, _integers(tensor.sparse_col_indices or [], f"{field}.sparse_col_indices")


def _integers(values: Sequence[float], field: str) -> NDArray[np.int64]:
    for number, value in enumerate(values):
        if not (isinstance(value, int) and -_MAX_INTEGER <= value < _MAX_INTEGER):
            raise TinkerWireError(f"{field}[{number}]: {value}; expected a whole number of 64 bits")
    return np.asarray(values, np.int64)


def _like(asked: JsonTensor, scores: NDArray[np.float32]) -> Any:
    if asked.sparse_crow_indices is None:
        return write_tensor(scores)
    rows, columns = _csr(asked, "target_prompt_logprobs")
    return write_csr(scores[np.repeat(np.arange(len(scores)), np.diff(rows)), columns], rows, columns, scores.shape)


def _add_sequence(message: Any, sequence: SampledTokens) -> None:
    added = message.sequences.add(stop_reason=0 if sequence.stopped else 1)
    added.tokens = np.asarray(sequence.tokens, "<i4").tobytes()
    added.logprobs = np.asarray(sequence.logprobs, "<f4").tobytes()
    added.versions = np.asarray(sequence.versions, "<i8").tobytes()
    if sequence.top is not None:
        added.topk_sampled_logprobs.CopyFrom(_top(sequence.top))


def _top(top: BestTokens) -> Any:
    length, k = top.token_ids.shape
    return MESSAGES["TopkLogprobs"](
        token_ids=top.token_ids.astype("<i4").tobytes(),
        logprobs=top.logprobs.astype("<f4").tobytes(),
        k=k,
        length=length,
    )
