"""A what-if in words: the numbers of its steps beside those of the run, and the groups that changed most."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from learner.reports.what_if_numbers import ComparedSteps, Steps
from learner.training.group_pulls import GroupChange

_ROWS = 20
_NUMBERS_ABREAST = 4
_WIDTH = 11


@dataclass(frozen=True)
class ShownWhatIf:
    """The numbers of steps by their number, of the `run` and of the what-if `now`; `differences` of their settings.

    `groups` changed most, the most first. `unlike` is the first number that the run's own settings gave otherwise than
    the run has noted it, if there is one and `compared_groups`; `caveat` is to be read with all of it.
    """

    differences: Sequence[str]
    run: Steps
    now: Steps
    groups: Sequence[GroupChange]
    compared_groups: bool
    unlike: str
    caveat: str

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        first, last = min(self.now), max(self.now)
        yield f"what if {'; '.join(self.differences)}"
        both = ComparedSteps.of(self.run, self.now)
        moved, begun = both.moved, both.first_apart
        yield f"steps {first} to {last}: {_beginning(begun, both.steps)}"
        yield from self._again()
        for place in range(0, len(moved), _NUMBERS_ABREAST):
            yield ""
            yield from _table(moved[place : place + _NUMBERS_ABREAST], _some(both.steps, begun), both.run, both.now)
        if moved and both.same:
            yield f"\nthe same at every step: {', '.join(both.same)}"
        yield from self._groups_shown()
        yield f"\n{self.caveat}"

    def _again(self) -> Iterator[str]:
        if not self.compared_groups or not self.run:
            return
        if self.unlike:
            yield (
                "the run's own settings do not give its numbers here, so differences as small as this one say nothing: "
                f"{self.unlike}"
            )
        else:
            yield "trained here by its own settings, the run gives its numbers again, digit for digit"

    def _groups_shown(self) -> Iterator[str]:
        if not self.compared_groups:
            return
        if not self.groups:
            yield "\nno group's pull on the policy changed"
            return
        yield "\ngroups whose pull on the policy changed most"
        heads = ("change", "pull: run", "what if", "clipped: run", "what if", "|adv.|: run", "what if")
        yield f"{'step':>6} {'lease':>7} {'task':>7} " + " ".join(f"{head:>12}" for head in heads)
        for each in self.groups:
            values = (
                each.pull_change, each.pull_run, each.pull, each.clipped_share_run, each.clipped_share,
                each.advantage_run, each.advantage,
            )  # fmt: skip
            yield f"{each.step:>6} {each.lease_id:>7} {each.task_index:>7} " + " ".join(
                f"{_shown(value):>12}" for value in values
            )


def _beginning(begun: int | None, steps: Sequence[int]) -> str:
    if not steps:
        return "metrics.jsonl of the run has none of them to compare with"
    if begun is None:
        return "no number of any step differs: these settings change nothing here"
    return f"the first that differs is step {begun}"


def _some(steps: Sequence[int], begun: int | None) -> list[int]:
    """At most about 20 steps, evenly; with the last and the first that differs."""
    chosen = {steps[place * len(steps) // _ROWS] for place in range(_ROWS)} if len(steps) > _ROWS else set(steps)
    return sorted(chosen | {steps[-1]} | ({begun} if begun is not None else set()))


def _table(names: Sequence[str], steps: Sequence[int], run: Steps, now: Steps) -> Iterator[str]:
    both = 2 * _WIDTH + 1
    yield f"{'':>6} " + "  ".join(f"{name if len(name) <= both else name[: both - 1] + '…':^{both}}" for name in names)
    yield f"{'step':>6} " + "  ".join(f"{'run':>{_WIDTH}} {'what if':>{_WIDTH}}" for _ in names)
    for step in steps:
        cells = (f"{_shown(each[step].get(name)):>{_WIDTH}}" for name in names for each in (run, now))
        pairs = zip(cells, cells, strict=True)
        yield f"{step:>6} " + "  ".join(f"{before} {after}" for before, after in pairs)


def _shown(value: object) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
