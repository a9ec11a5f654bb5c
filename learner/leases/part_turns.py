"""Parts of a mix by the places that their leases hold, where an env_service says so.

In the plain order the parts come in the shares of their tasks. Of episodes that take hours few end while many are
begun, so that they come to hold all places of an env_service, and short ones are begun no faster than long ones end.
With weights, each lease is of the part that holds the fewest places for its weight; with limits, a part that is at its
own is passed over. What is trained then comes in the shares in which groups are finished.

A lease's task must be the same whenever it is granted again, after a death of the learner too. So leases that were
moved to another part are written to the run's folder before they are sent out, and so is a bound on those that were
granted at all: what is below it at a restart, and was not moved, stays where it is.
"""

import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

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
        self._former = 0
        for row in rows.read() if rows is not None else ():
            self._moved.update((lease_id, place) for lease_id, place in row.get("moved", ()))
            self._former = max(self._former, row.get("granted_below", 0))
        self._bound = self._former
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
        """True of a lease that no life of the learner has granted yet."""
        return lease_id >= self._former and lease_id not in self._moved

    def held(self, places: Iterable[int]) -> Counter[int]:
        """Leases by part, from the places of their tasks."""
        return Counter(map(self.part_at, places))

    def granting(self, leases: Mapping[int, int | None]) -> None:
        """These leases are sent out next, each moved to a part if one is given. On the disk when this returns: what
        cannot be written down stays in its own part.
        """
        moved = {lease_id: self._drawn(lease_id, part) for lease_id, part in leases.items() if part is not None}
        below = 1 + max(leases, default=-1)
        row: dict[str, object] = {"moved": [*moved.items()]} if moved else {}
        if below > self._bound:
            row["granted_below"] = below + _AHEAD
        if not row:
            return
        try:
            if self._rows is not None:
                self._rows.append(row)
        except OSError as error:
            self._unwritten.goes_on("a lease would be of another part, but that cannot be written down: %s", error)
            return
        self._unwritten.is_over()
        self._moved |= moved
        self._bound = max(self._bound, below + _AHEAD if "granted_below" in row else 0)
        self._shorten()

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
                self._rows.replace([{"moved": [*self._moved.items()], "granted_below": self._bound}])
            except OSError as error:
                self._unwritten.goes_on("%s grows while it cannot be written anew: %s", FILE, error)


MakeTurns = Callable[[Sequence[TaskPart]], PartTurns]
"""From the parts of the mix, which the first env_service tells."""
