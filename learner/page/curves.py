"""The curves and events of a run for its page, read from metrics.jsonl as it grows.

The file is the one truth: a learner that was started again, a run that has ended and a copied one are read alike.
"""

import gzip
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from learner.reports.growing import FileRestarted, Mark, lines_after
from learner.reports.history import CURVES, FIGURES, CurveSpec, Entry, RunHistory, curves_in, is_number
from learner.reports.marks import marks_in

FILE = "metrics.jsonl"
EVENTS: Mapping[str, tuple[str, ...]] = {
    "publish": ("members", "total_s", "pause_s", "probe_gap"),
    "join": ("generator_id", "seconds", "probe_gap"),
    "leave": ("generator_id", "expelled"),
    "suspicion": ("generator_id", "test", "evidence", "quarantined"),
    "guard": ("change", "before", "after", "measure", "value", "limit"),
    "evaluation": ("accuracy", "accuracy_low", "accuracy_high", "reward", "nll", "tasks"),
    "checkpoint": ("seconds",),
    "resume": ("incarnation",),
    "verdict": ("state", "cause", "who", "sentence", "remedy"),
}
"""The kinds of lines that are events, with what is shown of each, besides when it was."""

_PLACES = {curve.name: place for place, curve in enumerate(CURVES)}

MAX_STEPS = 20_000
"""Of a curve that is sent at once; in a longer one neighbours are made one."""


def figures() -> list[dict[str, Any]]:
    """The figures of the page, with their curves. Those that are not drawn unless asked for have one each: numbers of
    a group may have nothing in common but their kind.
    """
    found = []
    for figure in FIGURES:
        curves = [asdict(curve) for curve in curves_in(figure.id)]
        if figure.drawn:
            found.append({**asdict(figure), "heading": figure.heading, "curves": curves})
            continue
        for curve in curves:
            heading = f"{figure.heading}: {curve['title']}"
            found.append({**asdict(figure), "id": curve["name"], "heading": heading, "curves": [curve]})
    return found


@dataclass(frozen=True)
class StepRow:
    """The numbers of a step in the order of CURVES, null where a line has none, its trajectories by lag, and when it
    ended.

    Those of a curve by name are objects.
    """

    numbers: Sequence[Any]
    lags: Mapping[str, int]
    unix_s: float | None


@dataclass(frozen=True)
class PublishMoment:
    """A version, and when all generators had it, in seconds since 1970."""

    version: int
    unix_s: float


@dataclass(frozen=True, kw_only=True)
class RunMoments:
    """Times around a step, in seconds since 1970: when it ended and how long it took; None where no line says so."""

    published: Sequence[PublishMoment] = ()
    ended_unix_s: float | None = None
    took_s: float | None = None


def _moments(row: StepRow) -> dict[str, float | None]:
    ended = row.unix_s if is_number(row.unix_s) else None
    parts = [row.numbers[_PLACES[name]] for name in ("train_s", "copy_s")]
    return {"ended_unix_s": ended, "took_s": sum(parts) if all(map(is_number, parts)) else None}


def _history() -> RunHistory[StepRow]:
    return RunHistory(_row, _event)


def _row(entry: Entry) -> StepRow:
    numbers = [_short(entry.get(curve.name)) for curve in CURVES]
    return StepRow(numbers, dict(entry.get("lag_counts") or {}), entry.get("unix_s"))


def _event(kind: str, entry: Entry) -> Entry | None:
    if kind not in EVENTS:
        return None
    return {"unix_s": entry.get("unix_s"), **{name: _short(entry.get(name)) for name in EVENTS[kind]}}


def message(history: RunHistory[StepRow], *, most: int = MAX_STEPS) -> dict[str, Any]:
    """Columns, events and marks, as the page takes them; of more than `most` steps, equally many in a row are one."""
    rows = list(history.steps.values())
    width = max(1, -(-len(rows) // most))
    at = range(0, len(rows), width)
    columns: dict[str, Sequence[Any]] = {"step": list(history.steps)[::width]}
    by_curve = list(zip(*(row.numbers for row in rows), strict=True)) or [()] * len(CURVES)
    for curve, column in zip(CURVES, by_curve, strict=True):
        columns[curve.name] = column if width == 1 else [_joined(curve, column[i : i + width]) for i in at]
    columns["unix_s"] = [row.unix_s for row in rows[::width]]
    columns["lags"] = [_summed(row.lags for row in rows[i : i + width]) for i in at]
    marks = [asdict(mark) for mark in marks_in(history.events)]
    return {
        "columns": columns, "events": history.events, "marks": marks, "width": width, "unread": history.unread,
    }  # fmt: skip


def _short(value: Any) -> Any:
    """Six digits are enough to draw; JSON has no infinity."""
    if isinstance(value, dict):
        return {name: _short(part) for name, part in value.items()}
    if isinstance(value, float):
        return float(f"{value:.6g}") if value - value == 0 else None
    return value


def _joined(curve: CurveSpec, values: Iterable[Any]) -> Any:
    known = [value for value in values if value is not None]
    if not known:
        return None
    if curve.by_name:
        part = replace(curve, by_name=False)
        return {name: _joined(part, (value.get(name) for value in known)) for name in dict.fromkeys(chain(*known))}
    return max(known) if curve.largest else _short(sum(known) / len(known))


def _summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in counts:
        for lag, count in each.items():
            found[lag] = found.get(lag, 0) + count
    return found


class RunCurves:
    """The curves of one run, kept in memory as far as they were read. For any thread."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._lock = threading.Lock()
        self._history = _history()
        self._mark = Mark()

    def catch_up(self) -> tuple[bytes, Mark]:
        """Reads what is new; returns all as JSON, and how far that is. After a long run the first one is slow."""
        with self._lock:
            self._follow()
            return json.dumps({**message(self._history), "at": str(self._mark)}).encode(), self._mark

    def _follow(self) -> None:
        while True:
            try:
                lines, mark = lines_after(self._path, self._mark)
            except FileRestarted:
                self._history, self._mark = _history(), Mark()
                continue
            for line in lines:
                self._history.add(line)
            self._mark = mark
            if not lines:
                return

    def whole(self, *, packed: bool) -> bytes:
        """All as `catch_up` has it; `packed` by gzip, which leaves a fifth of a long run."""
        data, _ = self.catch_up()
        return gzip.compress(data, 1) if packed else data

    def moments(self, step: int, *, back: int = 256) -> "RunMoments":
        """Times around a step: its own, and the publishes of it and of so many versions before it."""
        with self._lock:
            self._follow()
            row = self._history.steps.get(step)
            published = tuple(
                PublishMoment(event["step"], event["unix_s"])
                for event in self._history.events
                if event["kind"] == "publish" and step - back <= event["step"] <= step and is_number(event["unix_s"])
            )
        return RunMoments(published=published, **({} if row is None else _moments(row)))

    def news(self, mark: Mark) -> tuple[bytes | None, Mark]:
        """Everything after a mark, as JSON; None if nothing did. Raises Restarted."""
        lines, after = lines_after(self._path, mark)
        if not lines:
            return None, after
        history = _history()
        for line in lines:
            history.add(line)
        if any(event["kind"] == "resume" for event in history.events):
            raise FileRestarted
        return json.dumps(message(history, most=len(lines))).encode(), after
