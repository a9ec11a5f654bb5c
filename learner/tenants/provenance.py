"""Sampled sequences, remembered for a day, and checks of datums that claim to hold their tokens.

    <folder>/sequences-<hour>.log    records of learner.journal.records, one a sequence; a file goes after a day

They outlive the process, but are not synced: of a machine that loses power some may be gone. Those that were
sampled without record_stability_info are remembered in memory alone, the last ones: clients name them, too, and only a
loss that rests on them may refuse a name that is not known.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from learner.journal.records import JournalDamaged, record, scan
from protocol.tinker.sampling import SampledTokens, SampleRequest
from protocol.tinker.tensors import TinkerWireError
from protocol.tinker.training import ProvenanceSpan, WireDatum
from services.append_file import AppendFile

logger = logging.getLogger(__name__)

_HOUR_S = 3600
_KEEP_HOURS = 25
_SEQUENCE, _STAMPED_SEQUENCE = 1, 2
_NOBODY = "?"
_LOGPROB_TOLERANCE = 1e-3
_RECENT_TOKENS = 1 << 22
"""Of sequences that are remembered in memory alone, with their prompts."""


@dataclass(frozen=True)
class SequenceRecord:
    """A sequence as it was sampled. `logprobs` are those of `tokens`, when they were sampled, `versions` the steps that
    the weights of each had taken; `model_id`: whose weights they were, empty for the base model.
    """

    owner: str
    model_id: str
    prompt: NDArray[np.int64]
    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int64]
    hour: int


class SequenceRecords:
    """All sequences of the last day. `clock` is in seconds since 1970. Any thread may check."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._clock, self._lock = folder, clock, threading.Lock()
        self._records: dict[str, SequenceRecord] = {}
        for path in sorted(folder.glob("sequences-*.log")):
            self._read(path)
        self._hour, self._file = self._open(self._now())
        self._recent: dict[str, SequenceRecord] = {}  # the oldest first
        self._recent_tokens = 0

    def remember(
        self,
        owner: str,
        names: Iterable[str],
        request: SampleRequest,
        sampled: Iterable[SampledTokens],
        *,
        model_id: str = "",
        recorded: bool = True,
    ) -> None:
        """Remember the sequences of a sample by their names, in files too if they are `recorded`. Raises OSError."""
        with self._lock:
            self._forget_old()
            prompt = np.asarray(request.prompt, np.int64)
            for name, sequence in zip(names, sampled, strict=True):
                found = SequenceRecord(
                    owner=owner,
                    model_id=model_id,
                    prompt=prompt,
                    tokens=np.asarray(sequence.tokens, np.int64),
                    logprobs=np.asarray(sequence.logprobs, np.float32),
                    versions=np.asarray(sequence.versions, np.int64),
                    hour=self._hour,
                )
                if recorded:
                    self._file.append(*_written(name, found))
                    self._records[name] = found
                else:
                    self._remember_lately(name, found)

    def _remember_lately(self, name: str, found: SequenceRecord) -> None:
        self._recent[name] = found
        self._recent_tokens += _size(found)
        while self._recent_tokens > _RECENT_TOKENS:
            self._recent_tokens -= _size(self._recent.pop(next(iter(self._recent))))

    def check(self, owner: str, number: int, datum: WireDatum, *, all_known: bool) -> None:
        """Raises TinkerWireError if the spans of a datum do not tile it, claim what was not sampled, or name a sequence
        that is not known where `all_known` have to be.

        Targets at the places of a prompt stand for nothing, and may be any tokens.
        """
        field = f"data[{number}]"
        if not datum.input_spans and not datum.target_spans:
            return
        targets = datum.inputs.get("target_tokens")
        if not datum.input_spans or not datum.target_spans or targets is None or targets.ndim != 1:
            raise TinkerWireError(
                f"{field}: spans of one part alone; expected model_input_spans and loss_fn_input_spans, or neither"
            )
        logprobs = datum.inputs.get("logprobs")
        if logprobs is not None and logprobs.shape != targets.shape:
            raise TinkerWireError(
                f"{field}: logprobs of the shape {list(logprobs.shape)}; expected {list(targets.shape)}, one for each "
                "of the target_tokens that the spans name"
            )
        rows = (
            ("model_input_spans", datum.input_spans, datum.token_ids, None, True),
            ("loss_fn_input_spans", datum.target_spans, targets, logprobs, False),
        )
        for name, spans, row, given, with_prompt in rows:
            _check_tiles(f"{field}.{name}", spans, row)
            bounds = pairwise(accumulate((span.length for span in spans), initial=0))
            for place, (span, (start, end)) in enumerate(zip(spans, bounds, strict=True)):
                found = self._found(span.sequence_id, owner, f"{field}.{name}[{place}]", all_known=all_known)
                if found is None or not (span.sampled or with_prompt):
                    continue
                had = (found.tokens if span.sampled else found.prompt)[span.offset : span.offset + span.length]
                _compare(f"{field}.{name}[{place}]", start, row[start:end], had)
                if span.sampled and given is not None:
                    _compare_logprobs(
                        f"{field}.{name}[{place}]", start, given[start:end], found.logprobs[span.offset :]
                    )

    def versions(self, owner: str, model_id: str, datum: WireDatum) -> NDArray[np.int64] | None:
        """The steps that the weights had taken which sampled each target of a datum, 0 at those of a prompt.

        None if it does not name its sequences, one of them is not known, or another model sampled it.
        """
        targets, lengths = datum.inputs.get("target_tokens"), [span.length for span in datum.target_spans]
        if targets is None or min(lengths, default=-1) < 0 or sum(lengths) != targets.size:
            return None  # `check` says what is wrong with them
        parts: list[NDArray[np.int64]] = []
        for span in datum.target_spans:
            if not span.sampled:
                parts.append(np.zeros(span.length, np.int64))
                continue
            found = self._records.get(span.sequence_id) or self._recent.get(span.sequence_id)
            if found is None or found.owner != owner or found.model_id not in ("", model_id):
                return None
            parts.append(found.versions[span.offset : span.offset + span.length])
        return np.concatenate(parts)

    def _found(self, name: str, owner: str, field: str, *, all_known: bool) -> SequenceRecord | None:
        found = self._records.get(name) or self._recent.get(name)
        if found is not None and found.owner == owner:
            return found
        if all_known:
            raise TinkerWireError(
                f"{field}: no sequence {name}; it was sampled without record_stability_info, or more than a day ago"
            )
        return None

    def _now(self) -> int:
        return int(self._clock()) // _HOUR_S

    def _open(self, hour: int) -> tuple[int, AppendFile]:
        return hour, AppendFile(self._folder / f"sequences-{hour:08d}.log")

    def _forget_old(self) -> None:
        if self._now() == self._hour:
            return
        former = self._file
        try:
            self._hour, self._file = self._open(self._now())
        except OSError as error:
            logger.warning("the file of sequences goes on beyond its hour, since no other can be opened: %s", error)
            return
        former.close()
        oldest = self._hour - _KEEP_HOURS
        for path in self._folder.glob("sequences-*.log"):
            if int(path.stem.partition("-")[2]) < oldest:
                path.unlink()
        self._records = {name: each for name, each in self._records.items() if each.hour >= oldest}

    def _read(self, path: Path) -> None:
        end = 0
        hour = int(path.stem.partition("-")[2])
        try:
            for kind, payload, _, following in scan(path):
                name, found = _as_read(payload, hour, stamped=kind == _STAMPED_SEQUENCE)
                self._records[name] = found
                end = following
        except JournalDamaged as error:  # nobody waited for its sync, so that it is no reason not to start
            logger.warning("sequences from there on are not known any more: %s", error)
        AppendFile(path, end=end).close()


def _size(found: SequenceRecord) -> int:
    return len(found.prompt) + len(found.tokens)


def _check_tiles(field: str, spans: Sequence[ProvenanceSpan], row: NDArray[np.int64]) -> None:
    total = sum(span.length for span in spans)
    if total != len(row) or any(span.length < 0 or span.offset < 0 for span in spans):
        raise TinkerWireError(f"{field}: spans of {total} tokens; expected to tile {len(row)} tokens")


def _compare(field: str, start: int, row: NDArray[np.int64], had: NDArray[np.int64]) -> None:
    if len(row) != len(had):
        raise TinkerWireError(f"{field}: {len(row)} tokens from its offset on; the sequence has {len(had)} there")
    wrong = np.flatnonzero(row != had)
    if len(wrong):
        place = int(wrong[0])
        raise TinkerWireError(
            f"{field}: position {start + place} holds token {int(row[place])}; the sequence had {int(had[place])} there"
        )


def _compare_logprobs(field: str, start: int, given: NDArray[np.float32], had: NDArray[np.float32]) -> None:
    gaps = np.abs(given - had[: len(given)])
    wrong = np.flatnonzero(~(gaps <= _LOGPROB_TOLERANCE))
    if len(wrong):
        place = int(wrong[0])
        raise TinkerWireError(
            f"{field}: position {start + place} has the logprob {float(given[place]):.4f}; it was sampled with "
            f"{float(had[place]):.4f}"
        )


def _written(name: str, found: SequenceRecord) -> list[bytes | memoryview]:
    head = json.dumps([name, found.owner, len(found.prompt), len(found.tokens), found.model_id]).encode() + b"\n"
    integers = (found.prompt, found.tokens, found.versions)
    parts = [head, *(array.astype("<i8").tobytes() for array in integers), found.logprobs.astype("<f4").tobytes()]
    return record(_STAMPED_SEQUENCE, parts)


def _as_read(payload: bytes, hour: int, *, stamped: bool) -> tuple[str, SequenceRecord]:
    """Records of former releases have no versions: they are as of a model that nobody has."""
    head, _, rest = payload.partition(b"\n")
    name, owner, prompt, tokens, *more = json.loads(head)
    integers = prompt + (2 if stamped else 1) * tokens
    ids = np.frombuffer(rest, "<i8", count=integers)
    return name, SequenceRecord(
        owner=owner,
        model_id=more[0] if stamped else _NOBODY,
        prompt=ids[:prompt],
        tokens=ids[prompt : prompt + tokens],
        logprobs=np.frombuffer(rest, "<f4", offset=8 * integers),
        versions=ids[prompt + tokens :],
        hour=hour,
    )
