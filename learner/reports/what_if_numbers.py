"""The numbers of a run's steps beside those of a what-if of it: which of them differ, and from which step on."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from learner.reports.history import is_number

_FIRST = (
    "loss", "grad_norm", "clip_fraction", "correction_fraction", "entropy", "behavior_kl", "importance_ratio_mean",
    "importance_ratio_max", "effective_sample_share", "learning_rate",
)  # fmt: skip
Steps = Mapping[int, Mapping[str, Any]]
"""Numbers by name, of steps by their number."""


@dataclass(frozen=True)
class ComparedSteps:
    """Numbers of the `run` and of the what-if `now`, those of a table such as `means` as NAME/PART.

    `steps` are those that both have. Of the what-if's names, in the order in which they are shown, `moved` differ at
    one step at least, and `same` at none.
    """

    run: Steps
    now: Steps
    steps: Sequence[int]
    moved: Sequence[str]
    same: Sequence[str]

    @classmethod
    def of(cls, run: Steps, now: Steps) -> Self:
        """Compares steps as `metrics.jsonl` has them."""
        flat_run, flat_now = dict(_flat(run)), dict(_flat(now))
        steps = [step for step in flat_now if step in flat_run]
        names = _ordered({name for numbers in flat_now.values() for name in numbers})
        moved = [name for name in names if any(_apart(flat_run[step], flat_now[step], name) for step in steps)]
        same = [name for name in names if name not in moved]
        return cls(run=flat_run, now=flat_now, steps=steps, moved=moved, same=same)

    @property
    def first_apart(self) -> int | None:
        """The first step at which a number differs; None if none does."""
        found = (
            step for step in self.steps if any(_apart(self.run[step], self.now[step], name) for name in self.moved)
        )
        return next(found, None)


def size_of_change(change: float) -> float:
    """The change of a group's pull as it is ordered: one that is no number comes before all, as infinity does."""
    return change if math.isfinite(change) else math.inf


def _flat(steps: Steps) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each step with numbers alone."""
    for step, numbers in steps.items():
        flat: dict[str, Any] = {}
        for name, value in numbers.items():
            flat |= (
                {f"{name}/{part}": each for part, each in value.items()} if isinstance(value, dict) else {name: value}
            )
        yield step, {name: value for name, value in flat.items() if isinstance(value, int | float)}


def _ordered(names: set[str]) -> list[str]:
    return [*(name for name in _FIRST if name in names), *sorted(names - set(_FIRST))]


def _apart(run: Mapping[str, Any], now: Mapping[str, Any], name: str) -> bool:
    """True for numbers that differ; those that are none are alike."""
    before, after = run.get(name), now.get(name)
    return before != after and (is_number(before) or is_number(after))
