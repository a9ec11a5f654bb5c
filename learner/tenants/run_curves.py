"""The curve of a training run: its numbers at each optimizer step, in room that does not grow with the run.

Beyond `MOST_POINTS` neighbours are made one, their mean, so that a curve always reaches from the first step to the
newest one. Columns are arrays of float64; what is not known is NaN.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import JsonValue

MOST_POINTS = 512
MOST_NUMBERS = 16
"""Of each point: a client's own loss may give numbers by any name."""
_NAME_CHARS = 64

Column = Sequence[float | None]


class RunCurve:
    """Numbers by name over steps. The names that come first are kept, `MOST_NUMBERS` of them."""

    def __init__(self, *, most: int = MOST_POINTS) -> None:
        self._most = most
        self._width = 1
        self._steps, self._times = array("q"), array("d")
        self._columns: dict[str, array[float]] = {}
        self._open: list[tuple[int, float, dict[str, float]]] = []

    def add(self, step: int, unix_s: float, numbers: Mapping[str, float]) -> None:
        """Takes a point; `step` rises from one to the next."""
        self._open.append((step, unix_s, dict(numbers)))
        if len(self._open) == self._width:
            self._close()
        if len(self._steps) >= self._most:
            self._halve()

    def columns(self) -> dict[str, list[int] | Column]:
        """All as JSON has it: `step`, `unix_s`, and a column for each number, null where it is not known."""
        found: dict[str, list[int] | Column] = {"step": list(self._steps), "unix_s": list(self._times)}
        found |= {name: [_known(value) for value in column] for name, column in self._columns.items()}
        if self._open:  # the newest steps, before there are enough of them for a point
            step, unix_s, numbers = self._joined()
            for name, value in {"step": step, "unix_s": unix_s}.items():
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
            "open": [[step, unix_s, dict(numbers)] for step, unix_s, numbers in self._open],
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Self:
        """The curve of a `state`. Raises ValueError, KeyError or TypeError for what is none."""
        made = cls()
        made._width = int(state["width"])
        made._steps, made._times = array("q", state["steps"]), array("d", state["times"])
        for name, column in state["columns"].items():
            made._columns[str(name)] = array("d", [math.nan if each is None else each for each in column])
        made._open = [(int(step), float(unix_s), dict(numbers)) for step, unix_s, numbers in state["open"]]
        if made._width < 1 or any(len(each) != len(made._steps) for each in (made._times, *made._columns.values())):
            raise ValueError("its columns are not of one length")
        return made

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its numbers."""
        return tuple(self._columns)

    def _joined(self) -> tuple[int, float, dict[str, float]]:
        step, unix_s, _ = self._open[-1]
        names = dict.fromkeys(name for _, _, numbers in self._open for name in numbers)
        values = {name: [numbers[name] for _, _, numbers in self._open if name in numbers] for name in names}
        return step, unix_s, {name: _mean(several) for name, several in values.items()}

    def _close(self) -> None:
        step, unix_s, numbers = self._joined()
        self._open.clear()
        for name in numbers:
            if name not in self._columns and len(self._columns) < MOST_NUMBERS and len(name) <= _NAME_CHARS:
                self._columns[name] = array("d", [math.nan] * len(self._steps))
        self._steps.append(step)
        self._times.append(unix_s)
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
