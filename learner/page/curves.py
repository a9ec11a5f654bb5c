"""The curves and events of a run for its page, read from metrics.jsonl as it grows.

The file is the one truth: a learner that was started again, a run that has ended and a copied one are read alike. A
`Mark` is how far somebody has read: the file's identity and the byte after its last whole line.
"""

import json
import math
import os
import statistics
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = "metrics.jsonl"
NUMBERS = (
    "time_s", "reward_mean", "reward_std", "solved_share", "uniform_groups_share", "length_mean", "truncated_share",
    "entropy", "mismatch_kl", "behavior_kl", "grad_norm", "loss", "learning_rate", "effective_sample_share",
    "clip_fraction", "importance_ratio_max", "lag_mean", "lag_max", "lag_bound", "wait_s", "train_s", "copy_s",
    "forward_backward_s", "optimizer_s", "trajectories", "sampled_tokens", "groups",
)  # fmt: skip
"""What the page draws of a step; null where a line has none."""

EVENTS: Mapping[str, tuple[str, ...]] = {
    "publish": ("members", "total_s", "pause_s", "probe_gap"),
    "join": ("generator_id", "seconds", "probe_gap"),
    "leave": ("generator_id",),
    "guard": ("change", "before", "after", "measure", "value", "limit"),
    "evaluation": ("accuracy", "accuracy_low", "accuracy_high", "reward", "tasks"),
    "checkpoint": ("seconds",),
    "resume": ("incarnation",),
}
"""The kinds of lines that are events, with what is shown of each, besides when it was."""

MOST_STEPS = 20_000
"""Of a curve that is sent at once; in a longer one neighbours are made one."""

_NO_NUMBERS = ("kind", "step", "version", "lag_counts", "token_lag_counts", "lease_ids", "generator_id", "unix_s")
_CHUNK_BYTES = 4 << 20
_LARGEST = ("lag_max", "importance_ratio_max", "lag_bound")


@dataclass
class Curves:
    """Steps as columns, in order, and events. `cuts` are versions at which a later life began: what was after them is
    lost, and has left the columns already.
    """

    steps: list[int] = field(default_factory=list)
    numbers: dict[str, list[float | None]] = field(default_factory=lambda: {name: [] for name in NUMBERS})
    lags: list[dict[str, int]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    unread: int = 0

    def add(self, line: bytes) -> None:
        """Takes a line; one that cannot be read is counted."""
        try:
            entry = json.loads(line)
            kind = entry["kind"]
            if kind in ("step", "replay"):
                self._add_step(entry, again=kind == "replay")
            elif kind in EVENTS:
                self._add_event(kind, entry)
        except (ValueError, KeyError, TypeError):
            self.unread += 1

    def _add_step(self, entry: Mapping[str, Any], *, again: bool) -> None:
        step = int(entry["step"])
        if self.steps and step <= self.steps[-1]:
            if again:
                return
            self._cut(step - 1)
        self.steps.append(step)
        for name in NUMBERS:
            self.numbers[name].append(_short(entry.get(name)))
        self.lags.append(dict(entry.get("lag_counts") or {}))

    def _add_event(self, kind: str, entry: Mapping[str, Any]) -> None:
        at = int(entry["step"] if kind == "guard" else entry["version"])
        if kind == "resume":
            self._cut(at)
            self.cuts.append(at)
            self.events = [one for one in self.events if one["step"] <= at or one["kind"] == "resume"]
        shown = {name: _short(entry.get(name)) for name in EVENTS[kind]}
        self.events.append({"kind": kind, "step": at, "unix_s": entry.get("unix_s"), **shown})

    def _cut(self, version: int) -> None:
        keep = len(self.steps)
        while keep and self.steps[keep - 1] > version:
            keep -= 1
        del self.steps[keep:], self.lags[keep:]
        for column in self.numbers.values():
            del column[keep:]

    def message(self, *, most: int = MOST_STEPS) -> dict[str, Any]:
        """As the page takes it; of more than `most` steps, equally many in a row are made one."""
        width = -(-len(self.steps) // most) if self.steps else 1
        if width == 1:
            columns: dict[str, Any] = {"step": self.steps, **self.numbers, "lags": self.lags}
        else:
            at = range(0, len(self.steps), width)
            columns = {"step": [self.steps[i] for i in at]}
            columns |= {
                name: [_joined(name, column[i : i + width]) for i in at] for name, column in self.numbers.items()
            }
            columns["lags"] = [_summed(self.lags[i : i + width]) for i in at]
        return {"columns": columns, "events": self.events, "cuts": self.cuts, "width": width, "unread": self.unread}


def _short(value: Any) -> Any:
    """Six digits are enough to draw; JSON has no infinity."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if value - value == 0 else None
    return value


def _joined(name: str, values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return max(known) if name in _LARGEST else _short(sum(known) / len(known))


def _summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in counts:
        for lag, count in each.items():
            found[lag] = found.get(lag, 0) + count
    return found


@dataclass(frozen=True)
class Mark:
    """How far a reader is: `inode` 0 before the file was there."""

    inode: int = 0
    at: int = 0

    def __str__(self) -> str:
        return f"{self.inode}-{self.at}"

    @classmethod
    def parse(cls, text: str) -> "Mark":
        """What `str` made. Raises ValueError."""
        inode, at = text.split("-")
        return cls(int(inode), int(at))


class Restarted(Exception):
    """The file is another one, or shorter than what was read of it: begin anew."""


def lines_after(path: Path, mark: Mark) -> tuple[list[bytes], Mark]:
    """The whole lines after a mark, at most some MiB of them, and the new mark. Raises Restarted.

    A half-written line waits for its end; a file that is not there is an empty one.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if mark.inode and (status.st_ino != mark.inode or status.st_size < mark.at):
                raise Restarted
            file.seek(mark.at)
            data = file.read(_CHUNK_BYTES)
            while data and b"\n" not in data and len(data) % _CHUNK_BYTES == 0 and (more := file.read(_CHUNK_BYTES)):
                data += more
    except FileNotFoundError:
        if mark.inode:
            raise Restarted from None
        return [], mark
    end = data.rfind(b"\n") + 1
    return data[:end].splitlines(), Mark(status.st_ino, mark.at + end)


class RunCurves:
    """The curves of one run, kept in memory as far as they were read. For any thread."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._lock = threading.Lock()
        self._curves = Curves()
        self._mark = Mark()

    def catch_up(self) -> tuple[bytes, Mark]:
        """Reads what is new; returns all as JSON, and how far that is. After a long run the first one is slow."""
        with self._lock:
            while True:
                try:
                    lines, mark = lines_after(self._path, self._mark)
                except Restarted:
                    self._curves, self._mark = Curves(), Mark()
                    continue
                for line in lines:
                    self._curves.add(line)
                self._mark = mark
                if not lines:
                    break
            return json.dumps({**self._curves.message(), "at": str(self._mark)}).encode(), self._mark

    def news(self, mark: Mark) -> tuple[bytes | None, Mark]:
        """What came after a mark, as JSON; None if nothing did. Raises Restarted."""
        lines, after = lines_after(self._path, mark)
        if not lines:
            return None, after
        curves = Curves()
        for line in lines:
            curves.add(line)
        return json.dumps(curves.message(most=len(curves.steps) + 1)).encode(), after


def numbers_of(entry: Mapping[str, Any]) -> tuple[int, dict[str, float]] | None:
    """Step and numbers of a line of `metrics.jsonl`; None for a line that is an event, or has none."""
    kind, step = entry["kind"], entry.get("step", entry.get("version"))
    if kind not in ("step", "replay", "publish", "evaluation", "held_out") or step is None:
        return None
    prefix = "" if kind in ("step", "replay") else f"{kind}/"
    return int(step), {f"{prefix}{name}": value for name, value in _numbers(entry)}


def _numbers(entry: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in entry.items():
        if name in _NO_NUMBERS:
            continue
        if isinstance(value, Mapping):
            yield from ((f"{name}/{inner}", number) for inner, number in _numbers(value))
        elif isinstance(value, int | float) and math.isfinite(value):
            yield name, float(value)


def mean_of(rows: Sequence[tuple[int, Mapping[str, float]]]) -> tuple[int, dict[str, float]]:
    """The newest step, and of each number the mean of those that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for _, row in rows:
        for name, value in row.items():
            values[name].append(value)
    return max(step for step, _ in rows), {name: statistics.fmean(found) for name, found in values.items()}
