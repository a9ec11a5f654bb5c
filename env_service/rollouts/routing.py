"""Experts that the tokens of a context were sent to, put together from what generators tell turn by turn."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from protocol.routed_experts import ExpertRows, RoutedExperts
from protocol.trajectories import Trajectory

logger = logging.getLogger(__name__)

MAX_GROUP_BYTES = 128 << 20
"""Of all trajectories of a group together, packed: half of what a learner takes in one message."""


@dataclass
class TokenRouting:
    """Rows of a context's tokens so far, in order. Of a token that is told twice the first row stays: with it the model
    sampled the token behind it, and what is told later was computed when the context was read in once more. Those of
    tokens before `start` are somebody else's, and are not taken.

    A part of given rows is copied: as a view it would keep all of them in memory, at each turn those of the whole
    context.
    """

    pieces: list[tuple[int, ExpertRows]] = field(default_factory=list)
    start: int = 0

    @property
    def end(self) -> int:
        """Place behind the last token that has a row, or `start`."""
        return self.pieces[-1][0] + len(self.pieces[-1][1]) if self.pieces else self.start

    def add(self, pieces: Iterable[tuple[int, ExpertRows]], *, shift: int = 0) -> None:
        """Take rows, each piece with the place of its first token, `shift` places later. Raises ValueError for those of
        another model.
        """
        for place, rows in pieces:
            known = max(0, self.end - place - shift)
            if self.pieces and rows.shape[1:] != self.pieces[0][1].shape[1:]:
                raise ValueError(
                    f"routed experts of {rows.shape[1]} layers, {rows.shape[2]} in each, behind those of "
                    f"{self.pieces[0][1].shape[1]} layers, {self.pieces[0][1].shape[2]} in each"
                )
            if known < len(rows):
                self.pieces.append((place + shift + known, rows[known:].copy() if known else rows))

    def cut(self, end: int) -> None:
        """Forget what is known of tokens from `end` on."""
        self.pieces = [(place, _first(rows, end - place)) for place, rows in self.pieces if place < end]

    def record(self, end: int) -> RoutedExperts | None:
        """As it goes to the learner, of tokens before `end`; None if nothing is known."""
        kept = TokenRouting(list(self.pieces))
        kept.cut(end)
        return RoutedExperts.of(kept.pieces) if kept.pieces else None


def _first(rows: ExpertRows, count: int) -> ExpertRows:
    return rows if count >= len(rows) else rows[:count].copy()


def within_limits(trajectories: tuple[Trajectory, ...]) -> tuple[Trajectory, ...]:
    """The trajectories themselves, or, if their routed experts are more than a learner takes, without these."""
    told = [each.routed_experts for each in trajectories if each.routed_experts is not None]
    size = sum(each.packed.nbytes for each in told)
    if size <= MAX_GROUP_BYTES:
        return trajectories
    logger.warning(
        "the routed experts of a group of %d trajectories are %d MiB, and %d are the most that is sent: the learner "
        "routes its tokens itself", len(trajectories), size >> 20, MAX_GROUP_BYTES >> 20,
    )  # fmt: skip
    return tuple(each.model_copy(update={"routed_experts": None}) for each in trajectories)
