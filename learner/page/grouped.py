"""Reading groups for the list: a row for each that has a trajectory which fits a filter.

First only the numbers of rows are read, in order, until there are enough groups; what is shown of a group is read for
these alone. So a page of groups costs little more than one of trajectories, however large the groups are.
"""

import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from learner.page.reading import (
    MAX_AROUND,
    MAX_SIBLINGS,
    Direction,
    Filter,
    Key,
    Order,
    Page,
    excerpt_of,
    expected_of,
    first_step,
    fitting_rows,
    join_of,
    later_columns,
    opened,
    parts_of,
    short_excerpt,
)

_RANGES = ("length", "lag", "ratio", "gap", "advantage")


class FirstRow(NamedTuple):
    """The first row of a group that fits, with the number that it is ordered by."""

    value: float
    row: int
    group: int


def groups_page(
    folder: Path, wanted: Filter, *, limit: int = 50, start: Key | None = None, direction: Direction = "older"
) -> Page:
    """At most `limit` groups beyond the group `start` in a direction, without it from that end; newest first."""
    older, found = direction == "older", Page()
    for path in sorted(parts_of(folder), reverse=older):
        part = first_step(path)
        if start is not None and (part > start.part if older else part < start.part):
            continue
        try:
            with opened(path) as database:
                beyond = _edge(database, start.row, older=older) if start is not None and part == start.part else None
                firsts = _first_rows(database, wanted, most=limit - len(found.rows), beyond=beyond, older=older)
                found.rows.extend(filter(None, (_shown(database, part, one, wanted) for one in firsts)))
        except sqlite3.DatabaseError as error:
            found.unreadable.append(f"{path.name}: {error}")
        if len(found.rows) >= limit:
            break
    if not older:
        found.rows.reverse()
    return found


def ordered_groups(folder: Path, wanted: Filter, *, order: Order, limit: int = 50, skip: int = 0) -> Page:
    """At most `limit` groups after so many others, each at the place of its trajectory that fits and comes first."""
    found, name, rises = Page(), order.removeprefix("-"), order.startswith("-")
    firsts: list[tuple[Path, FirstRow]] = []
    for path in sorted(parts_of(folder), reverse=True):
        try:
            with opened(path) as database:
                some = _first_rows(database, wanted, most=limit + skip, beyond=None, older=True, by=(name, rises))
                firsts.extend((path, one) for one in some)
        except sqlite3.DatabaseError as error:
            found.unreadable.append(f"{path.name}: {error}")
    firsts.sort(key=lambda each: each[1].value, reverse=not rises)
    chosen = firsts[skip : skip + limit]
    shown: dict[tuple[Path, int], dict[str, Any] | None] = {}
    for path in {path for path, _ in chosen}:
        with suppress(sqlite3.DatabaseError), opened(path) as database:  # a part that went meanwhile has no groups
            own = [one for other, one in chosen if other == path]
            shown |= {(path, one.group): _shown(database, first_step(path), one, wanted) for one in own}
    found.rows.extend(filter(None, (shown.get((path, one.group)) for path, one in chosen)))
    return found


def _first_rows(
    database: sqlite3.Connection,
    wanted: Filter,
    *,
    most: int,
    beyond: int | None,
    older: bool,
    by: tuple[str, bool] | None = None,
) -> list[FirstRow]:
    fitting = fitting_rows(database, wanted, beyond=beyond, older=older, by=by)
    if fitting is None:
        return []
    tail, values = fitting
    found: dict[int, FirstRow] = {}
    for row in database.execute(f"SELECT {f'rows.{by[0]}' if by else 'rows.id'}, rows.id, grp {tail}", values):
        found.setdefault(row[2], FirstRow(*row))
        if len(found) >= most:
            break
    return list(found.values())


def _edge(database: sqlite3.Connection, group: int, *, older: bool) -> int | None:
    """The row of a group that is next to those beyond it; of one that is not there, its neighbour's."""
    sign, direction = (">=", "ASC") if older else ("<=", "DESC")
    row = database.execute(
        f"SELECT id FROM rows WHERE grp {sign} ? ORDER BY grp {direction}, id {direction} LIMIT 1", (group,)
    ).fetchone()
    return None if row is None else int(row[0])


def _shown(database: sqlite3.Connection, part: int, first: FirstRow, wanted: Filter) -> dict[str, Any] | None:
    """A group for the list: of numbers that differ inside of it the lowest and the highest, None if nobody has one.

    None for a group that a resume took back meanwhile.
    """
    join, matched = join_of(wanted)
    head = database.execute(
        "SELECT groups.step, groups.environment, groups.task, groups.why, size, reward_mean, reward_std,"
        f" substr(prompt, -{MAX_AROUND}) AS prompt, {excerpt_of(wanted)}"
        f" FROM rows JOIN groups ON groups.id = rows.grp {join} WHERE rows.id = ?",
        (*matched, first.row),
    ).fetchone()
    if head is None:
        return None
    rows = database.execute(
        f"SELECT reward, length, lag, {later_columns(database)},"
        " json_extract(facts, '$.reward.explanation') AS explanation FROM rows WHERE grp = ? ORDER BY place",
        (first.group,),
    ).fetchall()
    return {
        "key": str(Key(part, first.row)),
        "group": str(Key(part, first.group)),
        **dict(head),
        "prompt": head["prompt"] or "",
        "excerpt": short_excerpt(head["excerpt"]),
        "expected": next(filter(None, (expected_of(row["explanation"]) for row in rows)), ""),
        "rewards": [row["reward"] for row in rows][:MAX_SIBLINGS],
        "ranges": {name: _range([row[name] for row in rows]) for name in _RANGES},
    }


def _range(values: Sequence[float | None]) -> tuple[float, float] | None:
    known = [value for value in values if value is not None]
    return (min(known), max(known)) if known else None
