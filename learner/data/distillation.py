"""Records to distil a teacher from: a prompt, a completion, and what the teacher thought likely at each of its tokens.

A record has `prompt` and `completion` (texts, or messages and a reply) or `messages`. Offline distillation with the
teacher at hand needs no more. A cache of the teacher's K most probable tokens is given in one of two ways:

- As columns `top_ids` and `top_logprobs`, lists of one row for each trained token, with K entries in each row, K being
  the same in the whole file. Convenient in Parquet.
- As a file `NAME.top.safetensors` beside the data file `NAME`, which holds `top_ids` int32 [N, K], `top_logprobs`
  float32 or float16 [N, K] and `counts` int64 [R]: R records with N trained tokens in all, in the order of the data.
  Metadata: `format` = `headway-top-logprobs-1`. `write_top_logprobs` makes it.

Row i is the teacher's distribution over what comes in the place of trained token i, given all before it; logprobs are
in nats. Trained tokens are those of the completion, with the end token that is appended.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from learner.data.examples import DataTokenizer, TokenizedExample, example_parts, tokenize
from learner.data.sources import RecordError, read_records

logger = logging.getLogger(__name__)

FORMAT = "headway-top-logprobs-1"
_ABOVE_ONE = 1e-2  # how far the K probabilities may sum above 1, by rounding of half-precision logprobs


@dataclass(frozen=True, kw_only=True)
class TopLogprobs:
    """The teacher's K most probable tokens for N trained tokens: ids int32 [N, K], logprobs float32 [N, K] in nats."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    def over(self, mask: NDArray[np.bool_]) -> "TopLogprobs":
        """The same for all T tokens, [T, K]; 0 where nothing is trained."""
        shape = (len(mask), self.token_ids.shape[1])
        token_ids, logprobs = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.float32)
        token_ids[mask], logprobs[mask] = self.token_ids, self.logprobs
        return TopLogprobs(token_ids=token_ids, logprobs=logprobs)


@dataclass(frozen=True, kw_only=True)
class DistillationExample:
    """A completion, and the teacher's cached logprobs of its trained tokens if there are any."""

    completion: TokenizedExample
    top: TopLogprobs | None = None


class _Slice(Protocol):
    def __getitem__(self, rows: slice) -> NDArray[np.generic]: ...


class _Tensors(Protocol):
    def keys(self) -> Sequence[str]: ...

    def metadata(self) -> Mapping[str, str] | None: ...

    def get_tensor(self, name: str) -> NDArray[np.generic]: ...

    def get_slice(self, name: str) -> _Slice: ...


def read_distillation(path: Path, tokenizer: DataTokenizer) -> list[DistillationExample]:
    """All records, tokenized; all of them have cached logprobs or none. Raises RecordError, FileNotFoundError."""
    examples: list[DistillationExample] = []
    with ExitStack() as stack:
        beside = cache_beside(path)
        cache = stack.enter_context(_open_cache(beside)) if beside.exists() else None
        for record in read_records(path):
            try:
                examples.append(_example(record.value, tokenizer, cache))
                _check_alike(examples)
            except ValueError as error:
                raise RecordError(f"{record.place}: {error}") from error
        if cache is not None:
            cache.check_end(records=len(examples))
    if not examples:
        raise RecordError(f"{path} holds no records: expected `prompt` and `completion`, or `messages`")
    return examples


def cache_beside(path: Path) -> Path:
    """Path of the cached logprobs of a data file."""
    return path.with_name(f"{path.name}.top.safetensors")


def write_top_logprobs(path: Path, tops: Sequence[TopLogprobs]) -> None:
    """Writes the cache of a data file's records, given in their order. The file is there whole or not at all."""
    draft = path.with_name(f"{path.name}.new")
    tensors = {
        "top_ids": np.concatenate([top.token_ids for top in tops]).astype(np.int32, copy=False),
        "top_logprobs": np.concatenate([top.logprobs for top in tops]).astype(np.float32, copy=False),
        "counts": np.array([len(top.token_ids) for top in tops], dtype=np.int64),
    }
    safetensors.numpy.save_file(tensors, draft, metadata={"format": FORMAT})
    draft.replace(path)


class _Cache:
    """Reads the rows of one record after the other."""

    def __init__(self, file: Path, tensors: _Tensors) -> None:
        found = (tensors.metadata() or {}).get("format")
        if found != FORMAT:
            raise RecordError(f"{file} has the format {found!r}, expected {FORMAT!r}; make it anew or move it away")
        missing = {"top_ids", "top_logprobs", "counts"} - set(tensors.keys())
        if missing:
            raise RecordError(f"{file} lacks {', '.join(sorted(missing))}; make it anew or move it away")
        self._file = file
        self._ids = tensors.get_slice("top_ids")
        self._logprobs = tensors.get_slice("top_logprobs")
        self._counts: list[int] = tensors.get_tensor("counts").astype(np.int64).tolist()
        self._record = self._row = 0

    def next_rows(self, *, trained: int) -> TopLogprobs:
        """Raises RecordError if the cache has another number of rows for this record than it has trained tokens."""
        if self._record == len(self._counts):
            raise RecordError(f"{self._file} has only {self._record} records; it belongs to other data")
        count = self._counts[self._record]
        rows = slice(self._row, self._row + count)
        self._record, self._row = self._record + 1, self._row + count
        return _checked(self._ids[rows], self._logprobs[rows], trained=trained)

    def check_end(self, *, records: int) -> None:
        """Raises RecordError if the data has ended before the cache."""
        if records != len(self._counts):
            raise RecordError(f"{self._file} has {len(self._counts)} records, the data {records}; they do not belong")


@contextmanager
def _open_cache(file: Path) -> Iterator[_Cache]:
    try:
        opened = safetensors.safe_open(file, framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        raise RecordError(f"{file} cannot be read: {error}; make it anew or move it away") from error
    with opened as tensors:
        yield _Cache(file, cast(_Tensors, tensors))


def _example(record: object, tokenizer: DataTokenizer, cache: _Cache | None) -> DistillationExample:
    completion = tokenize(example_parts(record, tokenizer), tokenizer).without_tail()
    trained = completion.trained_length
    top = _columns(record, trained=trained)
    if cache is not None:
        if top is not None:
            raise RecordError("cached logprobs are both in columns and in a file beside the data: remove one of them")
        top = cache.next_rows(trained=trained)
    return DistillationExample(completion=completion, top=top)


def _columns(record: object, *, trained: int) -> TopLogprobs | None:
    given = (record.get("top_ids"), record.get("top_logprobs")) if isinstance(record, Mapping) else (None, None)
    match given:
        case None, None:
            return None
        case [*ids], [*logprobs]:
            try:
                return _checked(np.array(ids), np.array(logprobs), trained=trained)
            except (TypeError, ValueError) as error:
                raise RecordError(f"`top_ids` and `top_logprobs` do not fit: {error}") from error
        case _:
            raise RecordError("`top_ids` and `top_logprobs` go together, as lists of rows; one of them is not there")


def _checked(ids: NDArray[np.generic], logprobs: NDArray[np.generic], *, trained: int) -> TopLogprobs:
    if ids.ndim != 2 or ids.shape != logprobs.shape or not ids.shape[1]:
        raise RecordError(f"top ids {ids.shape} and logprobs {logprobs.shape} are not both [N, K]")
    if len(ids) != trained:
        raise RecordError(
            f"cached logprobs for {len(ids)} tokens, but {trained} are trained (the end token included): "
            "the cache was made with another tokenizer or chat template"
        )
    if not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0:
        raise RecordError("a top id is not a token id: expected whole numbers from 0 on")
    values = logprobs.astype(np.float32)
    if not np.isfinite(values).all() or np.exp(values.astype(np.float64)).sum(axis=1).max() > 1 + _ABOVE_ONE:
        raise RecordError("top logprobs are not logprobs: not finite, or their probabilities sum to more than 1")
    return TopLogprobs(token_ids=ids.astype(np.int32), logprobs=values)


def _check_alike(examples: Sequence[DistillationExample]) -> None:
    """The newest example is like the first one."""
    first, newest = examples[0].top, examples[-1].top
    if (first is None) != (newest is None):
        raise RecordError("some records have cached logprobs and some have none")
    if first is not None and newest is not None and first.token_ids.shape[1] != newest.token_ids.shape[1]:
        raise RecordError(f"{newest.token_ids.shape[1]} cached tokens at each place, before {first.token_ids.shape[1]}")
