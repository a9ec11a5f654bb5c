"""Parts of a mix by the places that their leases hold, where an env_service says so.

In the plain order the parts come in the shares of their tasks. Of rollouts that take hours few end while many are
begun, so that they come to hold all places of an env_service, and short ones are begun no faster than long ones end.
With weights, each lease is of the part that holds the fewest places for its weight; with limits, a part that is at its
own is passed over. What is trained then comes in the shares in which groups are finished.

A lease's task must be the same whenever it is granted again, after a death of the learner too. So leases that are
moved to another part are written to the run's folder before they are sent out, and so is a bound on those that are
granted at all, by whichever env_service: what is below it at a restart, and was not moved, stays where it is. While the
bound cannot be written, no lease beyond it is granted. It goes to the disk at once; moves are with the operating system
until then, so that a death of the learner loses none, and a power loss the newest ones.

A lease that is not moved, and whose part has no room, is passed over until it has: sent out, it would hold a place that
another part's could have.
"""

import logging
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import xxhash

from learner.leases.disk_trouble import DiskTrouble
from learner.leases.run_rows import RunRows
from protocol.messages import TaskPart

logger = logging.getLogger(__name__)

FILE = "part_turns.jsonl"
_AHEAD = 64
_SMALL_BYTES = 1 << 20


def next_part(parts: Sequence[TaskPart], *, plain: int, held: Mapping[int, int]) -> int | None:
    """The part of an env_service's next lease, `plain` in the plain order. None if all are at their limits. `held`:
    leases that run there, by part.
    """
    loads = {
        number: held.get(number, 0) / (part.weight or 1.0)
        for number, part in enumerate(parts)
        if part.most_leases is None or held.get(number, 0) < part.most_leases
    }
    if not loads:
        return None
    if plain in loads and all(part.weight is None for part in parts):
        return plain
    return min(loads, key=lambda number: (loads[number], number != plain))


class PartTurns:
    """Leases of a mix that were moved to another part than that of the plain order. Without `rows` nothing is
    remembered. `needed_from` tells the first lease that a resume may still grant.
    """

    def __init__(
        self,
        *,
        parts: Sequence[TaskPart],
        seed: int,
        rows: RunRows | None = None,
        needed_from: Callable[[], int] = lambda: 0,
    ) -> None:
        *self._firsts, _ = (0, *accumulate(part.places for part in parts))
        self._places = [part.places for part in parts]
        self._seed = seed
        self._rows = rows
        self._needed_from = needed_from
        self._moved: dict[int, int] = {}
        self._bound = 0
        self._begun = False
        for row in rows.read() if rows is not None else ():
            self._take_up(row)
        self._former = self._bound
        self._rewrite_above = _SMALL_BYTES
        self._unwritten = DiskTrouble(
            logger, over=f"{FILE} is written again: parts of a mix take turns by their places"
        )

    def place_of(self, lease_id: int, plain: int) -> int:
        """Place of a lease's task, the same at each of its grants; `plain` is that of the plain order."""
        return self._moved.get(lease_id, plain)

    def part_at(self, place: int) -> int:
        """The part that has a place."""
        return bisect_right(self._firsts, place) - 1

    def may_move(self, lease_id: int) -> bool:
        """True of a lease that no former life of the learner has granted, and that this one has not moved."""
        return lease_id >= self._former and lease_id not in self._moved

    @property
    def granted_below(self) -> int:
        """First lease that may not be granted yet, since a later life would take it for one that was not."""
        return self._bound

    def cover(self, end: int) -> int:
        """Lets leases below `end` be granted; returns the first that may not be: below `end` if the disk is full."""
        if end > self._bound:
            try:
                self._write({"granted_below": end + _AHEAD})
                self._unwritten.is_over()
            except OSError as error:
                self._unwritten.goes_on(
                    "no lease from %d on is granted while it cannot be written down: %s", self._bound, error
                )
        return self._bound

    def move(self, lease_id: int, part: int) -> bool:
        """Gives a lease a task of another part; False if that cannot be written down, and it stays in its own."""
        try:
            self._write({"moved": [[lease_id, self._drawn(lease_id, part)]]}, sync=False)
        except OSError as error:
            self._unwritten.goes_on("a lease would be of another part, but that cannot be written down: %s", error)
            return False
        self._unwritten.is_over()
        self._shorten()
        return True

    def _write(self, row: Mapping[str, Any], *, sync: bool = True) -> None:
        """Writes a row, and takes it up as a later life will."""
        row = row if self._begun else {"parts": self._places, **row}
        if self._rows is not None:
            self._rows.append(row, sync=sync)
        self._take_up(row)

    def _take_up(self, row: Mapping[str, Any]) -> None:
        """Rows of a mix of other parts say nothing: the places that they name are other tasks now."""
        if "parts" in row:
            self._begun = row["parts"] == self._places
            self._moved, self._bound = {}, 0
        if self._begun:
            self._moved.update((lease_id, place) for lease_id, place in row.get("moved", ()))
            self._bound = max(self._bound, row.get("granted_below", 0))

    def _drawn(self, lease_id: int, part: int) -> int:
        """A place of a part, each as likely as any other."""
        drawn: int = xxhash.xxh3_64_intdigest(f"{self._seed} {lease_id}".encode())
        return self._firsts[part] + drawn % self._places[part]

    def _shorten(self) -> None:
        """Leaves out what no resume needs, now and then, in memory and in the file."""
        grown = len(self._moved) << 5 if self._rows is None else self._rows.size()
        if grown <= self._rewrite_above:
            return
        first = self._needed_from()
        self._moved = {lease_id: place for lease_id, place in self._moved.items() if lease_id >= first}
        self._rewrite_above = max(_SMALL_BYTES, 2 * (len(self._moved) << 5))
        if self._rows is not None:
            try:
                self._rows.replace(
                    [{"parts": self._places, "moved": [*self._moved.items()], "granted_below": self._bound}]
                )
            except OSError as error:
                self._unwritten.goes_on("%s grows while it cannot be written anew: %s", FILE, error)


class PartSeats:
    """Seats of a mix's leases at one env_service, whose `parts` have limits and weights. `held` tells the part of each
    lease that it runs, `plain` the place of a lease; one moves to another part if `may_move` says so.
    """

    def __init__(
        self,
        *,
        turns: PartTurns,
        parts: Sequence[TaskPart],
        held: Mapping[int, int],
        plain: Callable[[int], int],
        may_move: Callable[[int], bool],
    ) -> None:
        self._turns = turns
        self._parts = parts
        self._held = Counter(held.values())
        self._plain = plain
        self._may_move = may_move

    @property
    def room(self) -> float:
        """Number of leases more that may run there, by the limits alone."""
        if any(part.most_leases is None for part in self._parts):
            return math.inf
        return sum(max(0, (part.most_leases or 0) - self._held[number]) for number, part in enumerate(self._parts))

    def admits(self, lease_id: int) -> bool:
        """True if a lease is granted, which takes its seat; it may have been moved to another part for that."""
        if lease_id >= self._turns.granted_below:
            return False
        part = self._turns.part_at(self._plain(lease_id))
        if self._may_move(lease_id) and self._turns.may_move(lease_id):
            chosen = next_part(self._parts, plain=part, held=self._held)
            if chosen is not None and chosen != part and self._turns.move(lease_id, chosen):
                part = chosen
        most = self._parts[part].most_leases
        if most is not None and self._held[part] >= most:
            return False
        self._held[part] += 1
        return True


MakeTurns = Callable[[Sequence[TaskPart]], PartTurns]
"""From the parts of the mix, which the first env_service tells."""
