"""The curve of a training run: its numbers at each optimizer step, in room that does not grow with the run.

Beyond `MOST_POINTS` neighbours are made one, their mean, so that a curve always reaches from the first step to the
newest one. Columns are arrays of float64; what is not known is NaN.
"""

import math
from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

from pydantic import JsonValue

MOST_POINTS = 512
MOST_NUMBERS = 16
"""Of each point: a client's own loss may give numbers by any name."""
_NAME_CHARS = 64

Column = Sequence[float | None]


class _OpenPoint:
    """The newest steps, before there are enough of them for a point: their count, and of each number that has a column
    or gets one the sum, and how many steps have it.
    """

    def __init__(self) -> None:
        self.count, self.step, self.unix_s = 0, 0, 0.0
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, step: int, unix_s: float, numbers: Mapping[str, float], *, columns: Collection[str]) -> None:
        """Takes a step. `columns` are those of the curve, of which no more than `MOST_NUMBERS` are made."""
        self.count, self.step, self.unix_s = self.count + 1, step, unix_s
        for name, value in numbers.items():
            if name not in self._sums and not self._has_room(name, columns):
                continue
            total, known = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + value, known + 1) if math.isfinite(value) else (total, known)

    def means(self) -> dict[str, float]:
        """Of each number its mean over the steps that have it, NaN if it was never finite."""
        return {name: total / known if known else math.nan for name, (total, known) in self._sums.items()}

    def state(self) -> dict[str, JsonValue]:
        """All of it for JSON, of which `of` makes it again."""
        sums: dict[str, JsonValue] = {name: [total, known] for name, (total, known) in self._sums.items()}
        return {"count": self.count, "step": self.step, "unix_s": self.unix_s, "sums": sums}

    @classmethod
    def of(cls, state: Any, *, columns: Collection[str]) -> "_OpenPoint":
        """The point of a `state`; files of former releases have the steps one by one instead."""
        made = cls()
        if isinstance(state, list):
            for step, unix_s, numbers in state:
                made.add(int(step), float(unix_s), dict(numbers), columns=columns)
            return made
        made.count, made.step, made.unix_s = int(state["count"]), int(state["step"]), float(state["unix_s"])
        made._sums = {str(name): (float(total), int(known)) for name, (total, known) in state["sums"].items()}
        return made

    def _has_room(self, name: str, columns: Collection[str]) -> bool:
        if name in columns:
            return True
        made = len(columns) + sum(each not in columns for each in self._sums)
        return made < MOST_NUMBERS and len(name) <= _NAME_CHARS


class RunCurve:
    """Numbers by name over steps. The names that come first are kept, `MOST_NUMBERS` of them."""

    def __init__(self, *, most: int = MOST_POINTS) -> None:
        self._most = most
        self._width = 1
        self._steps, self._times = array("q"), array("d")
        self._columns: dict[str, array[float]] = {}
        self._open = _OpenPoint()

    def add(self, step: int, unix_s: float, numbers: Mapping[str, float]) -> None:
        """Takes a point; `step` rises from one to the next."""
        self._open.add(step, unix_s, numbers, columns=self._columns)
        if self._open.count >= self._width:
            self._close()
        if len(self._steps) >= self._most:
            self._halve()

    def columns(self) -> dict[str, list[int] | Column]:
        """All as JSON has it: `step`, `unix_s`, and a column for each number, null where it is not known."""
        found: dict[str, list[int] | Column] = {"step": list(self._steps), "unix_s": list(self._times)}
        found |= {name: [_known(value) for value in column] for name, column in self._columns.items()}
        if self._open.count:  # the newest steps, before there are enough of them for a point
            numbers = self._open.means()
            for name, value in {"step": self._open.step, "unix_s": self._open.unix_s}.items():
                found[name] = [*found[name], value]
            for name in self._columns:
                found[name] = [*found[name], _known(numbers.get(name, math.nan))]
        return found

    def state(self) -> dict[str, JsonValue]:
        """All of it for JSON, of which `of` makes it again."""
        told: dict[str, JsonValue] = {name: [_known(each) for each in column] for name, column in self._columns.items()}
        return {
            "width": self._width,
            "steps": list(self._steps),
            "times": list(self._times),
            "columns": told,
            "open": self._open.state(),
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Self:
        """The curve of a `state`. Raises ValueError, KeyError or TypeError for what is none."""
        made = cls()
        made._width = int(state["width"])
        made._steps, made._times = array("q", state["steps"]), array("d", state["times"])
        for name, column in state["columns"].items():
            made._columns[str(name)] = array("d", [math.nan if each is None else each for each in column])
        made._open = _OpenPoint.of(state["open"], columns=made._columns)
        if made._width < 1 or any(len(each) != len(made._steps) for each in (made._times, *made._columns.values())):
            raise ValueError("its columns are not of one length")
        return made

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its numbers."""
        return tuple(self._columns)

    def _close(self) -> None:
        point, self._open = self._open, _OpenPoint()
        numbers = point.means()
        for name in numbers:
            if name not in self._columns:
                self._columns[name] = array("d", [math.nan] * len(self._steps))
        self._steps.append(point.step)
        self._times.append(point.unix_s)
        for name, column in self._columns.items():
            column.append(numbers.get(name, math.nan))

    def _halve(self) -> None:
        """A point of each two: the later one's place, the mean of their numbers."""
        if len(self._steps) % 2:
            return  # at the next one
        self._width *= 2
        self._steps, self._times = self._steps[1::2], self._times[1::2]
        self._columns = {
            name: array("d", [_mean(column[at : at + 2]) for at in range(0, len(column), 2)])
            for name, column in self._columns.items()
        }


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


def _known(value: float) -> float | None:
    """Six digits are enough to draw; JSON has no NaN."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
