"""Rows of the record of a lease: its turns, each when it was sampled, and what the environment answered to them.

    lease                  the lease itself, and what its conversations depend on besides
    turn   conversation 0  tokens, versions, logprobs, routed experts
    answer conversation 0  observation, reward, end, as the environment gave them
    turn   conversation 1  …
    resumed                a process began to go through all that is above

A row is a line: a checksum, then JSON. A crash can tear the last one only, which is cut off; so is all that follows a
row that is damaged.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import xxhash
from pydantic import Field, TypeAdapter, ValidationError

from protocol.messages import Lease
from protocol.model import PolicyVersion, WireModel
from protocol.routed_experts import RoutedExperts
from protocol.trajectories import FinishReason, VersionSpan

_SUM_CHARS = 16


class LeaseRow(WireModel):
    """The first row. `rules` is a digest of its environment's; `now` is the date that its chat template shows."""

    row: Literal["lease"] = "lease"
    run: str
    lease: Lease
    rules: str
    now: datetime


class TurnRow(WireModel):
    """A turn of a conversation as it was sampled. `prompt` is a digest of the tokens that stood before it. Times are in
    seconds since the rollout began. `is_trained`: the age of its tokens counts.
    """

    row: Literal["turn"] = "turn"
    conversation: int
    prompt: str
    token_ids: tuple[int, ...]
    behavior_logprobs: tuple[float, ...]
    version_spans: tuple[VersionSpan, ...]
    generator_ids: tuple[str, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    routed_from: int = 0
    routed_experts: RoutedExperts | None = None
    asked_s: float | None = None
    ended_s: float | None = None
    is_trained: bool = True


class AnswerRow(WireModel):
    """The answer of the environment to a conversation's newest turn, as JSON."""

    row: Literal["answer"] = "answer"
    conversation: int
    step: str


class ResumedRow(WireModel):
    """A process began to go on with the lease."""

    row: Literal["resumed"] = "resumed"


@dataclass(frozen=True)
class EnvironmentState:
    """State of a conversation's environment after so many `answers`, as it gave it."""

    answers: int
    data: bytes

    def packed(self) -> bytes:
        """As it stands in a file of its own."""
        body = b"%d\n%s" % (self.answers, self.data)
        return b"%s %s" % (_sum_of(body), body)

    @classmethod
    def unpacked(cls, packed: bytes) -> "EnvironmentState | None":
        """The state in a file; None if it is not whole."""
        body = packed[_SUM_CHARS + 1 :]
        answers, newline, data = body.partition(b"\n")
        if packed[:_SUM_CHARS] != _sum_of(body) or not newline:
            return None
        return cls(int(answers), data)


Row = LeaseRow | TurnRow | AnswerRow | ResumedRow
_ROW: TypeAdapter[Row] = TypeAdapter(Annotated[Row, Field(discriminator="row")])


@dataclass
class RecordedTurn:
    """A turn, and what the environment answered to it; None if the process died before it did."""

    turn: TurnRow
    step: str | None = None


@dataclass
class RecordedLease:
    """A lease as it was when its process died. Its turns are by conversation; `end` is the byte behind its last whole
    row, of `size` in the file. `resumptions` counts the processes that went on with it, `resumed` those since its last
    turn.
    """

    first: LeaseRow
    turns: dict[int, deque[RecordedTurn]] = field(default_factory=lambda: defaultdict(deque))
    resumed: int = 0
    resumptions: int = 0
    end: int = 0
    size: int = 0

    @property
    def oldest_version(self) -> str | None:
        """The oldest version that sampled a token of what is trained."""
        rows = (each.turn for turns in self.turns.values() for each in turns)
        versions = {span.version for row in rows if row.is_trained for span in row.version_spans}
        return min(versions, key=lambda text: (PolicyVersion.parse(text).number, text), default=None)

    @property
    def elapsed_s(self) -> float:
        """Seconds of the rollout up to its newest turn."""
        return max((each.turn.ended_s or 0.0 for turns in self.turns.values() for each in turns), default=0.0)

    def take(self, row: Row) -> None:
        """Adds a row, the first one apart."""
        match row:
            case TurnRow():
                self.turns[row.conversation].append(RecordedTurn(row))
                self.resumed = 0
            case AnswerRow():
                self.turns[row.conversation][-1].step = row.step
            case ResumedRow():
                self.resumed += 1
                self.resumptions += 1
            case LeaseRow():
                raise ValueError("a second row of a lease")


def line_of(row: Row) -> bytes:
    """A row as it stands in the file."""
    body = row.model_dump_json().encode()
    return b"%s %s\n" % (_sum_of(body), body)


def read_record(path: Path) -> RecordedLease | None:
    """The record in a file up to its first torn or damaged row; None if not even its lease is whole."""
    data = path.read_bytes()
    found: RecordedLease | None = None
    for row, end in _rows(data):
        if found is None:
            if not isinstance(row, LeaseRow):
                return None
            found = RecordedLease(row, size=len(data))
        else:
            try:
                found.take(row)
            except (ValueError, IndexError):  # a step before its turn: rows that nobody wrote in this order
                break
        found.end = end
    return found


def _rows(data: bytes) -> Iterator[tuple[Row, int]]:
    """The whole rows, each with the byte behind it."""
    start = 0
    while (newline := data.find(b"\n", start)) >= 0:
        line = data[start:newline]
        body = line[_SUM_CHARS + 1 :]
        if line[:_SUM_CHARS] != _sum_of(body):
            return
        try:
            yield _ROW.validate_json(body), newline + 1
        except ValidationError:  # of another release
            return
        start = newline + 1


def _sum_of(body: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(body).encode()
