"""Rows that trackers are sent: those of a line as it is written, and what a former life of the learner had not sent."""

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from learner.journal.files import end_of_lines
from learner.reports.history import Entry, RunHistory, lines_of, numbers_of

_EVALUATIONS = ("evaluation", "held_out")


class TrackedRow(NamedTuple):
    """Numbers of a step, or of the version after it. `kind` is that of the line, a step's also of one trained again.
    `noted_s` is the line's `unix_s`; None of a step of an earlier release.
    """

    kind: str
    step: int
    values: Mapping[str, float]
    noted_s: float | None

    @property
    def unix_s(self) -> float:
        """When it was; now, if that is not known."""
        return time.time() if self.noted_s is None else self.noted_s


def row_of(entry: Entry) -> TrackedRow | None:
    """The row of a line of `metrics.jsonl`; None for a line that is an event."""
    found = numbers_of(entry)
    if found is None:
        return None
    kind, unix_s = str(entry["kind"]), entry.get("unix_s")
    return TrackedRow("step" if kind == "replay" else kind, *found, None if unix_s is None else float(unix_s))


def newest_of(rows: Iterable[TrackedRow]) -> dict[str, int]:
    """The last step of each kind of row."""
    newest: dict[str, int] = {}
    for row in rows:
        newest[row.kind] = max(row.step, newest.get(row.kind, row.step))
    return newest


def is_beyond(row: TrackedRow, sent: Mapping[str, int]) -> bool:
    """True for a row that comes after the last one of its kind that was sent."""
    return row.kind not in sent or row.step > sent[row.kind]


def joined(rows: Sequence[TrackedRow], *, every_s: float) -> list[TrackedRow]:
    """At most a row for each `every_s` of the clock, with the means of its numbers at the newest of its steps. An
    evaluation is a row of its own, at its version, and so is a step of which the time is not known.
    """
    found: dict[tuple[object, ...], list[TrackedRow]] = {}
    for row in rows:
        alone = row.noted_s is None or row.kind in _EVALUATIONS
        place = (row.step, row.kind) if alone else (int(row.unix_s / every_s), "")
        found.setdefault(place, []).append(row)
    return [_mean(some) for some in found.values()]


def _mean(rows: Sequence[TrackedRow]) -> TrackedRow:
    values: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.values.items():
            values[name].append(value)
    newest = max(rows, key=lambda row: row.step)
    return newest._replace(values={name: sum(some) / len(some) for name, some in values.items()})


@dataclass(frozen=True)
class FormerLines:
    """The lines that former lives of a learner wrote: the bytes of the file before `end`."""

    path: Path
    end: int

    @classmethod
    def in_folder(cls, folder: Path) -> "FormerLines":
        """The rows that are there now."""
        path = folder / "metrics.jsonl"
        return cls(path, end_of_lines(path))

    def rows(self, *, version: int | None = None) -> Iterator[TrackedRow]:
        """The rows of the history of the present weights, which goes on from `version`; from the last step if None."""
        place = 0
        history = RunHistory(lambda _: place, lambda kind, entry: {"place": place} if numbers_of(entry) else None)
        for place, line in enumerate(self._lines()):  # noqa: B007 - the two above look at it
            history.add(line)
        if version is not None:
            history.cut(version)
        wanted = {*history.steps.values(), *(event["place"] for event in history.events)}
        for number, line in enumerate(self._lines()):
            if number in wanted and (row := row_of(json.loads(line))) is not None:
                yield row

    def _lines(self) -> Iterator[bytes]:
        at = 0
        for line in lines_of(self.path):
            at += len(line)
            if at > self.end:
                return
            yield line
