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

Below are the logprobs of the frozen reference, too, computed once for a data set and kept on disk: one file,
`reference-<fingerprint>.safetensors`, for one reference model, data set, temperature and precision. It holds
`logprobs` float32 [N], the N trained tokens of all sequences end to end, and `lengths` int64 [S], how many each has.
A file that is damaged or belongs to something else is named in the log, and made anew.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import safetensors
import safetensors.numpy
import xxhash
from numpy.typing import NDArray

from learner.data.examples import Tokenized, Tokenizer, example_parts, tokenize
from learner.data.sources import DataError, read_records
from learner.journal.files import sync_folder

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

    completion: Tokenized
    top: TopLogprobs | None = None


class _Slice(Protocol):
    def __getitem__(self, rows: slice) -> NDArray[np.generic]: ...


class _Tensors(Protocol):
    def keys(self) -> Sequence[str]: ...

    def metadata(self) -> Mapping[str, str] | None: ...

    def get_tensor(self, name: str) -> NDArray[np.generic]: ...

    def get_slice(self, name: str) -> _Slice: ...


def read_distillation(path: Path, tokenizer: Tokenizer) -> list[DistillationExample]:
    """All records, tokenized; either all of them have cached logprobs or none. Raises DataError, FileNotFoundError."""
    examples: list[DistillationExample] = []
    with ExitStack() as stack:
        beside = cache_beside(path)
        cache = stack.enter_context(_open_cache(beside)) if beside.exists() else None
        for record in read_records(path):
            try:
                examples.append(_example(record.value, tokenizer, cache))
                _check_alike(examples)
            except ValueError as error:
                raise DataError(f"{record.place}: {error}") from error
        if cache is not None:
            cache.check_end(records=len(examples))
    if not examples:
        raise DataError(f"{path} holds no records: expected `prompt` and `completion`, or `messages`")
    return examples


def cache_beside(path: Path) -> Path:
    """Where the cached logprobs of a data file are."""
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
            raise DataError(f"{file} has the format {found!r}, expected {FORMAT!r}; make it anew or move it away")
        missing = {"top_ids", "top_logprobs", "counts"} - set(tensors.keys())
        if missing:
            raise DataError(f"{file} lacks {', '.join(sorted(missing))}; make it anew or move it away")
        self._file = file
        self._ids = tensors.get_slice("top_ids")
        self._logprobs = tensors.get_slice("top_logprobs")
        self._counts: list[int] = tensors.get_tensor("counts").astype(np.int64).tolist()
        self._record = self._row = 0

    def next_rows(self, *, trained: int) -> TopLogprobs:
        """Raises DataError if the cache has another number of rows for this record than it has trained tokens."""
        if self._record == len(self._counts):
            raise DataError(f"{self._file} has only {self._record} records; it belongs to other data")
        count = self._counts[self._record]
        rows = slice(self._row, self._row + count)
        self._record, self._row = self._record + 1, self._row + count
        return _checked(self._ids[rows], self._logprobs[rows], trained=trained)

    def check_end(self, *, records: int) -> None:
        """Raises DataError if the data has ended before the cache."""
        if records != len(self._counts):
            raise DataError(f"{self._file} has {len(self._counts)} records, the data {records}; they do not belong")


@contextmanager
def _open_cache(file: Path) -> Iterator[_Cache]:
    try:
        opened = safetensors.safe_open(file, framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        raise DataError(f"{file} cannot be read: {error}; make it anew or move it away") from error
    with opened as tensors:
        yield _Cache(file, cast(_Tensors, tensors))


def _example(record: object, tokenizer: Tokenizer, cache: _Cache | None) -> DistillationExample:
    completion = tokenize(example_parts(record, tokenizer), tokenizer).without_tail()
    trained = completion.trained_length
    top = _columns(record, trained=trained)
    if cache is not None:
        if top is not None:
            raise DataError("cached logprobs are both in columns and in a file beside the data: remove one of them")
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
                raise DataError(f"`top_ids` and `top_logprobs` do not fit: {error}") from error
        case _:
            raise DataError("`top_ids` and `top_logprobs` go together, as lists of rows; one of them is not there")


def _checked(ids: NDArray[np.generic], logprobs: NDArray[np.generic], *, trained: int) -> TopLogprobs:
    if ids.ndim != 2 or ids.shape != logprobs.shape or not ids.shape[1]:
        raise DataError(f"top ids {ids.shape} and logprobs {logprobs.shape} are not both [N, K]")
    if len(ids) != trained:
        raise DataError(
            f"cached logprobs for {len(ids)} tokens, but {trained} are trained (the end token included): "
            "the cache was made with another tokenizer or chat template"
        )
    if not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0:
        raise DataError("a top id is not a token id: expected whole numbers from 0 on")
    values = logprobs.astype(np.float32)
    if not np.isfinite(values).all() or np.exp(values.astype(np.float64)).sum(axis=1).max() > 1 + _ABOVE_ONE:
        raise DataError("top logprobs are not logprobs: not finite, or their probabilities sum to more than 1")
    return TopLogprobs(token_ids=ids.astype(np.int32), logprobs=values)


def _check_alike(examples: Sequence[DistillationExample]) -> None:
    """The newest example is like the first one."""
    first, newest = examples[0].top, examples[-1].top
    if (first is None) != (newest is None):
        raise DataError("some records have cached logprobs and some have none")
    if first is not None and newest is not None and first.token_ids.shape[1] != newest.token_ids.shape[1]:
        raise DataError(f"{newest.token_ids.shape[1]} cached tokens at each place, before {first.token_ids.shape[1]}")


_REFERENCE_FORMAT = "headway-reference-logprobs-1"
_CHUNK_BYTES = 1 << 24

Compute = Callable[[Sequence[Tokenized]], Sequence[NDArray[np.float32]]]


@dataclass(frozen=True, kw_only=True)
class CacheKey:
    """What the logprobs depend on. `model` and `data` are fingerprints; `precision` is that of the forward pass."""

    model: str
    data: str
    temperature: float
    precision: str

    def fingerprint(self) -> str:
        """Equal for equal keys only."""
        return xxhash.xxh3_128_hexdigest(self.text().encode())

    def text(self) -> str:
        """The key as JSON; numbers are written so that no two are alike."""
        return dumps(asdict(self), sort_keys=True)


class CacheUnusable(Exception):
    """The file is damaged, or belongs to something else; the text says which."""


def fingerprint_model(folder: Path) -> str:
    """Over the configuration and the weights of a Hugging Face directory, byte by byte."""
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    digest = xxhash.xxh3_128()
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as opened:
            while chunk := opened.read(_CHUNK_BYTES):
                digest.update(chunk)
    return str(digest.hexdigest())


def fingerprint_sequences(sequences: Iterable[Tokenized]) -> str:
    """Over token ids and loss masks, in order."""
    digest = xxhash.xxh3_128()
    for sequence in sequences:
        digest.update(len(sequence.token_ids).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(sequence.token_ids, dtype="<i4").data)
        digest.update(np.ascontiguousarray(sequence.loss_mask, dtype=np.bool_).data)
    return str(digest.hexdigest())


def cache_file(folder: Path, key: CacheKey) -> Path:
    """Where the logprobs of a key are kept."""
    return folder / f"reference-{key.fingerprint()}.safetensors"


def cached_reference_logprobs(
    sequences: Sequence[Tokenized], *, folder: Path, key: CacheKey, compute: Compute
) -> list[NDArray[np.float32]]:
    """For each sequence of T tokens its reference logprobs, float32 [T], 0 outside the mask.

    From the cache, or else from `compute`, which returns the same arrays, and then kept. A cache that cannot be written
    is a warning: the logprobs are right all the same.
    """
    file = cache_file(folder, key)
    if file.exists():
        try:
            return load_cache(file, key=key, sequences=sequences)
        except CacheUnusable as fault:
            logger.warning("%s is not used, and made anew: %s", file, fault)
    logprobs = [_masked(values, sequence) for values, sequence in zip(compute(sequences), sequences, strict=True)]
    try:
        store_cache(file, key=key, sequences=sequences, logprobs=logprobs)
    except OSError as error:
        logger.warning("reference logprobs cannot be kept in %s, and are computed again next time: %s", file, error)
    return logprobs


def load_cache(file: Path, *, key: CacheKey, sequences: Sequence[Tokenized]) -> list[NDArray[np.float32]]:
    """The kept logprobs, [T] for each sequence. Raises CacheUnusable."""
    try:
        with safetensors.safe_open(file, framework="numpy") as opened:
            metadata: dict[str, str] = opened.metadata() or {}
            names: list[str] = opened.keys()
            tensors: dict[str, NDArray[np.generic]] = {name: opened.get_tensor(name) for name in names}
    except (safetensors.SafetensorError, OSError) as error:
        raise CacheUnusable(f"damaged: {error}") from error
    if metadata.get("format") != _REFERENCE_FORMAT or set(tensors) != {"logprobs", "lengths"}:
        raise CacheUnusable("foreign: it is no cache of reference logprobs")
    if metadata.get("key") != key.text():
        raise CacheUnusable(f"foreign: it belongs to {metadata.get('key')}, expected {key.text()}")
    values, lengths = tensors["logprobs"].astype(np.float32), tensors["lengths"].astype(np.int64)
    if metadata.get("checksum") != _checksum(values, lengths):
        raise CacheUnusable("damaged: its checksum is another one")
    if lengths.tolist() != [sequence.trained_length for sequence in sequences]:
        raise CacheUnusable("foreign: its sequences have other lengths")
    parts = np.split(values, np.cumsum(lengths)[:-1])
    return [_spread(part, sequence) for part, sequence in zip(parts, sequences, strict=True)]


def store_cache(
    file: Path, *, key: CacheKey, sequences: Sequence[Tokenized], logprobs: Sequence[NDArray[np.float32]]
) -> None:
    """Keeps logprobs, [T] for each sequence. The file is there whole or not at all. Raises OSError."""
    pairs = zip(logprobs, sequences, strict=True)
    values = np.concatenate([values[sequence.loss_mask] for values, sequence in pairs]).astype(np.float32)
    lengths = np.array([sequence.trained_length for sequence in sequences], dtype=np.int64)
    metadata = {"format": _REFERENCE_FORMAT, "key": key.text(), "checksum": _checksum(values, lengths)}
    data = safetensors.numpy.save({"logprobs": values, "lengths": lengths}, metadata=metadata)
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f"{file.name}.new")
    draft.write_bytes(data)
    draft.replace(file)
    sync_folder(file.parent)


def _checksum(values: NDArray[np.float32], lengths: NDArray[np.int64]) -> str:
    return xxhash.xxh3_128_hexdigest(values.tobytes() + lengths.tobytes())


def _masked(values: NDArray[np.float32], sequence: Tokenized) -> NDArray[np.float32]:
    assert values.shape == sequence.loss_mask.shape, f"{values.shape} logprobs of {len(sequence.loss_mask)} tokens"
    return np.where(sequence.loss_mask, values, 0).astype(np.float32)


def _spread(values: NDArray[np.float32], sequence: Tokenized) -> NDArray[np.float32]:
    logprobs = np.zeros(len(sequence.loss_mask), dtype=np.float32)
    logprobs[sequence.loss_mask] = values
    return logprobs
