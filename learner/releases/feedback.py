"""Late rewards: what generators of users have answered, and what users said of it, each once and on the disk.

    generator ─ POST /v1/served ─▶ served-<n>.jsonl   the newest answers, as many as there is room for
    user ────── POST /v1/feedback ─▶ feedback.jsonl   answers with their reward and version; on the disk when it is said

Rows of `feedback.jsonl` are what `dpo` with the loss `kto` reads. They never enter the stream: what users rate is older
than `max_lag` lets a token be, and that bound is not moved. An answer that is not kept any more is not known any more,
so it cannot be rated a second time either: what is known of who was rated needs no more room than the answers.
"""

import hashlib
import hmac
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner.journal.files import anyone, end_of_lines
from protocol.feedback import Feedback, FeedbackAnswer, ServedCompletion
from services.append_file import AppendFile, make_folder, sync_folder
from services.http.refusals import RequestRefused
from services.process import WrongSettings

logger = logging.getLogger(__name__)

FILE = "feedback.jsonl"
_SEGMENTS = 16
_READ_AGAIN = frozenset(("id", "choice", "completion", "reward", "version", "until", "served_at"))
_GOOD = 0.5
"""A reward of at least this is of a good completion, for losses that know good and bad alone."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of an answer's row."""

    segment: int
    at: int
    size: int


class FeedbackDamaged(WrongSettings, ValueError):
    """A whole line of the rated answers is none; the text names file and line."""


class FeedbackStore:
    """Answers and rewards in the folder of releases; any thread may call it. `room_bytes` bounds the answers. Of the
    rewards that are in the file already those of `versions` alone are held in memory, as by `keep_rewards`; of all if
    none are given.
    """

    def __init__(
        self,
        folder: Path,
        *,
        room_bytes: int,
        may_write: Callable[[], None] = anyone,
        versions: Collection[str] | None = None,
    ) -> None:
        self._folder = folder
        self._segment_bytes = max(1, room_bytes // _SEGMENTS)
        self._may_write = may_write
        self._writing = threading.Lock()
        """Held while a row is written, until it is on the disk."""
        self._lock = threading.Lock()
        """Held for moments only: by who reads rewards, as the event loop does."""
        self._places: dict[str, _Place] = {}
        self._rated: dict[tuple[str, int], float] = {}
        self._rewards: dict[str, list[tuple[float, float]]] = {}
        """By version: times of its answers, and users' rewards, in the order they came."""
        make_folder(folder)
        for segment in self._segments():
            self._index(segment)
        self._open = self._opened(max(self._segments(), default=1))
        self._rows = AppendFile(folder / FILE, end=end_of_lines(folder / FILE))
        self._rows.sync()  # a row that a kill left unacknowledged is acknowledged when it is told again
        for row in rows_in(folder / FILE):
            self._note(row, wanted=versions is None or row["version"] in versions)

    def _segments(self) -> list[int]:
        found = (path.stem.removeprefix("served-") for path in self._folder.glob("served-*.jsonl"))
        return sorted(int(number) for number in found if number.isdecimal())

    def _path(self, segment: int) -> Path:
        return self._folder / f"served-{segment}.jsonl"

    def _opened(self, segment: int) -> tuple[int, AppendFile]:
        path = self._path(segment)
        return segment, AppendFile(path, end=end_of_lines(path))

    def _index(self, segment: int) -> None:
        at = 0
        with self._path(segment).open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    with suppress(ValueError, KeyError):
                        self._places[json.loads(line)["id"]] = _Place(segment, at, len(line))
                at += len(line)

    def _note(self, row: dict[str, Any], *, wanted: bool = True) -> None:
        if row["id"] in self._places:
            self._rated[row["id"], row["choice"]] = row["reward"]
        if wanted and row["version"] == row["until"]:
            with self._lock:
                self._rewards.setdefault(row["version"], []).append((row["served_at"], row["reward"]))

    def served(self, answer: ServedCompletion) -> None:
        """Keeps an answer; one that is there already stays as it was. Raises OSError."""
        self._may_write()
        line = (answer.model_dump_json() + "\n").encode()
        with self._writing:
            if answer.id in self._places:
                return
            segment, file = self._open
            if file.end and file.end + len(line) > self._segment_bytes:
                self._open = self._opened(segment + 1)
                file.close()
                self._forget(below=segment + 2 - _SEGMENTS)
                segment, file = self._open
            at = file.end
            file.append(line)
            self._places[answer.id] = _Place(segment, at, len(line))

    def _forget(self, *, below: int) -> None:
        for segment in self._segments():
            if segment < below:
                self._path(segment).unlink()
        gone = {name for name, place in self._places.items() if place.segment < below}
        if gone:
            self._places = {name: place for name, place in self._places.items() if name not in gone}
            self._rated = {rated: reward for rated, reward in self._rated.items() if rated[0] not in gone}

    def rate(self, told: Feedback) -> FeedbackAnswer:
        """Keeps a reward: it is on the disk when this returns. Raises RequestRefused, and OSError: then it is not."""
        self._may_write()
        with self._writing:
            answer = self._answer(told)
            before = self._rated.get((told.id, told.choice))
            if before is not None:
                if before != told.reward:
                    raise RequestRefused(
                        409, "rated_already", f"completion {told.id} has the reward {before:g} already: it stays",
                        field="reward", expected=before, got=told.reward,
                    )  # fmt: skip
                return FeedbackAnswer(id=told.id, version=answer.version, outcome="repeated")
            row = _row(answer, told)
            former = self._rows.end
            try:
                self._rows.append((json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", errors="replace"))
                self._rows.sync()
                sync_folder(self._folder)
            except OSError:
                self._rows = _cut(self._rows, self._folder / FILE, end=former)
                raise
            self._note(row)
            return FeedbackAnswer(id=told.id, version=answer.version, outcome="kept")

    def _answer(self, told: Feedback) -> ServedCompletion:
        place = self._places.get(told.id)
        if place is None:
            raise RequestRefused(
                404, "unknown_completion",
                f"completion {told.id} is not known: it was never answered here, or so long ago that it is not kept "
                "any more (learner.release.feedback_mb), or its generator has not told of it yet; then try again",
                field="id",
            )  # fmt: skip
        with self._path(place.segment).open("rb") as file:
            file.seek(place.at)
            answer = ServedCompletion.model_validate_json(file.read(place.size))
        if not hmac.compare_digest(answer.key_hash, key_hash(told.key)):
            message = f"the key is not that of completion {told.id}: it came with the answer"
            raise RequestRefused(403, "wrong_key", message, field="key")
        if told.choice >= len(answer.choices):
            raise RequestRefused(
                422, "no_such_choice", f"completion {told.id} has {len(answer.choices)} choices",
                field="choice", expected=f"below {len(answer.choices)}", got=told.choice,
            )  # fmt: skip
        return answer

    def rewards(self, version: str, since: float) -> list[float]:
        """Users' rewards for answers of a version alone that were given since that time, in the order they came."""
        with self._lock:
            return [reward for at, reward in self._rewards.get(version, ()) if at >= since]

    def keep_rewards(self, versions: Collection[str]) -> None:
        """Holds those of other versions in memory no more; they are in the file."""
        with self._lock:
            self._rewards = {version: self._rewards[version] for version in versions if version in self._rewards}

    def close(self) -> None:
        """Closes the files."""
        with self._writing:
            self._open[1].close()
            self._rows.close()


def key_hash(key: str) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(key.encode()).hexdigest()


def rows_in(path: Path) -> Iterator[dict[str, Any]]:
    """The rated answers in a file; a torn last one was never acknowledged. Raises FeedbackDamaged."""
    if path.exists():
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    yield rated_in(line, place=f"{path}, line {number},")


def rated_in(line: bytes, *, place: str) -> dict[str, Any]:
    """The rated answer of a whole line. Raises FeedbackDamaged, which names the place."""
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not row.keys() >= _READ_AGAIN:
        raise FeedbackDamaged(
            f"{place} is no rated answer: expected an object with {', '.join(sorted(_READ_AGAIN))}, as it was written; "
            "put the line back, or take it out"
        )
    return row


def _row(answer: ServedCompletion, told: Feedback) -> dict[str, Any]:
    return {
        "id": told.id,
        "choice": told.choice,
        "prompt": answer.prompt,
        "completion": answer.choices[told.choice],
        "cut_off": told.choice in answer.cut_off,
        "label": told.reward >= _GOOD,
        "reward": told.reward,
        "comment": told.comment,
        "version": answer.version,
        "until": answer.until,
        "served_at": answer.served_at,
        "rated_at": time.time(),
    }


def _cut(file: AppendFile, path: Path, *, end: int) -> AppendFile:
    """Takes back what is not known to be on the disk, or it would be there twice when it is told again."""
    with suppress(OSError):
        file.close()
    return AppendFile(path, end=end)
