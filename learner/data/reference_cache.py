"""Logprobs of the frozen reference, computed once for a data set and kept on disk.

One file, `reference-<fingerprint>.safetensors`, is for one reference model, data set, temperature and precision. It
holds `logprobs` float32 [N], the N trained tokens of all sequences end to end, and `lengths` int64 [S], how many each
has. A file that is damaged or belongs to something else is named in the log, and made anew.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy
import xxhash
from numpy.typing import NDArray

from learner.data.examples import TokenizedExample
from learner.data.fingerprints import fingerprint_files
from services.append_file import sync_folder

logger = logging.getLogger(__name__)

_REFERENCE_FORMAT = "headway-reference-logprobs-1"

Compute = Callable[[Sequence[TokenizedExample]], Sequence[NDArray[np.float32]]]


@dataclass(frozen=True, kw_only=True)
class CacheKey:
    """Everything that the logprobs depend on. `model` and `data` are fingerprints; `precision` is that of the
    forward pass.
    """

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
    """Over the configuration and the weights of a Hugging Face directory, byte by byte: those that transformers takes,
    which are pickled ones only where there are no others.
    """
    weights = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    return fingerprint_files([folder / "config.json", *weights])


def fingerprint_sequences(sequences: Iterable[TokenizedExample]) -> str:
    """Over token ids and loss masks, in order."""
    digest = xxhash.xxh3_128()
    for sequence in sequences:
        digest.update(len(sequence.token_ids).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(sequence.token_ids, dtype="<i4").data)
        digest.update(np.ascontiguousarray(sequence.loss_mask, dtype=np.bool_).data)
    return str(digest.hexdigest())


def cache_file(folder: Path, key: CacheKey) -> Path:
    """Path of the logprobs of a key."""
    return folder / f"reference-{key.fingerprint()}.safetensors"


def cached_reference_logprobs(
    sequences: Sequence[TokenizedExample], *, folder: Path, key: CacheKey, compute: Compute
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
            logger.warning("%s is not used and is rebuilt: %s", file, fault)
    logprobs = [_masked(values, sequence) for values, sequence in zip(compute(sequences), sequences, strict=True)]
    try:
        store_cache(file, key=key, sequences=sequences, logprobs=logprobs)
    except OSError as error:
        logger.warning(
            "reference logprobs cannot be kept in %s, they will be computed again next time: %s", file, error
        )
    return logprobs


def load_cache(file: Path, *, key: CacheKey, sequences: Sequence[TokenizedExample]) -> list[NDArray[np.float32]]:
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
    file: Path, *, key: CacheKey, sequences: Sequence[TokenizedExample], logprobs: Sequence[NDArray[np.float32]]
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


def _masked(values: NDArray[np.float32], sequence: TokenizedExample) -> NDArray[np.float32]:
    assert values.shape == sequence.loss_mask.shape, f"{values.shape} logprobs of {len(sequence.loss_mask)} tokens"
    return np.where(sequence.loss_mask, values, 0).astype(np.float32)


def _spread(values: NDArray[np.float32], sequence: TokenizedExample) -> NDArray[np.float32]:
    logprobs = np.zeros(len(sequence.loss_mask), dtype=np.float32)
    logprobs[sequence.loss_mask] = values
    return logprobs
