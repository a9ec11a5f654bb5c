"""Reading trajectories: pages of those that fit a filter, newest first, and the tokens of a group, decoded.

A `Key` names a trajectory by its part and its number there. Pages go on from a key, not from a number of rows, so that
a page far back costs what the first one does.
"""

import json
import math
import sqlite3
import struct
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from learner.page.store import FOLDER, TOKENIZER, Columns, unpacked

MAX_ROWS = 200
MAX_TOKENS = 1 << 16
"""Most tokens that are decoded for one answer: of all trajectories of a group, or from a place on of one."""
MAX_TEXT = 1 << 13
"""Characters of one text in an answer. Of a longer one its beginning and its end are there; `whole_text` has it all."""
MAX_AROUND = 160
"""Characters of the prompt's end, and of what was expected, in a row of the list."""
MAX_SIBLINGS = 64
"""Rewards of a group that a row of the list has."""

_MAX_OF_TOKEN = 256
_MAX_OF_PROMPT = 1 << 12

_EXCERPT = 240
_END_OF_PARTS = 1 << 63
_HELD_BACK = 8
Direction = Literal["older", "newer"]
Decode = Callable[[Sequence[int]], str]
# The newest tell which there are: to look at all would cost more than the page itself.
_TOLD_BY = 2
_DISTINCT = (
    "SELECT DISTINCT environment, why, finish, json_extract(facts, '$.reward.verifier'),"
    " json_extract(facts, '$.player')"
    " FROM (SELECT environment, why, finish, facts FROM rows ORDER BY id DESC LIMIT 5000)"
)
_AROUND = (
    f"(SELECT substr(prompt, -{MAX_AROUND}) FROM groups WHERE groups.id = rows.grp) AS prompt,"
    " (SELECT json_group_array(others.reward) FROM rows AS others WHERE others.grp = rows.grp) AS rewards,"
    " json_extract(rows.facts, '$.reward.explanation') AS explanation"
)
"""Surroundings of a row in the list: the prompt, the rewards of its whole group, and what its verifier says."""
_GIVEN = "given: "


@dataclass(frozen=True)
class Key:
    """The row `row` of the part that begins with step `part`."""

    part: int
    row: int

    def __str__(self) -> str:
        return f"{self.part}-{self.row}"

    @classmethod
    def parse(cls, text: str) -> "Key":
        """The value that `str` made. Raises ValueError."""
        part, row = (int(number) for number in text.split("-"))
        if not 0 <= part < _END_OF_PARTS:
            raise ValueError(f"part {part}: expected the number of a step")
        return cls(part, row)


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Filter of trajectories; None where it does not matter. `why` is `trained` for those that were trained, and
    otherwise a reason. `words` are words, or the beginning of one with a star after it, in the order of the text.
    `prompt` is any part of the prompt, in small or capital letters.
    """

    step: int | None = None
    min_step: int | None = None
    max_step: int | None = None
    environment: str | None = None
    task: int | None = None
    why: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    min_lag: int | None = None
    min_ratio: float | None = None
    finish: str | None = None
    verifier: str | None = None
    player: str | None = None
    words: str | None = None
    prompt: str | None = None

    def where(self) -> tuple[str, list[Any]]:
        """As SQL, of known columns alone, with its values."""
        tests = {
            "rows.step = ?": self.step, "rows.step >= ?": self.min_step, "rows.step <= ?": self.max_step,
            "rows.task = ?": self.task, "rows.ratio >= ?": self.min_ratio,
            "rows.environment = ?": self.environment,
            "rows.why = ?": "" if self.why == "trained" else self.why, "rows.reward >= ?": self.min_reward,
            "rows.reward <= ?": self.max_reward, "rows.length >= ?": self.min_length,
            "rows.length <= ?": self.max_length, "rows.lag >= ?": self.min_lag, "rows.finish = ?": self.finish,
            "json_extract(rows.facts, '$.reward.verifier') = ?": self.verifier,
            "json_extract(rows.facts, '$.player') = ?": self.player,
            # Once for all groups of a part; with the plus the rows are still read in their order, not by group.
            "+rows.grp IN (SELECT id FROM groups WHERE instr(lower(prompt), lower(?)))": self.prompt,
        }  # fmt: skip
        wanted = {test: value for test, value in tests.items() if value is not None}
        return " AND ".join(wanted) or "1", list(wanted.values())


Order = Literal[
    "reward", "-reward", "ratio", "-ratio", "gap", "-gap", "length", "-length", "lag", "-lag", "advantage", "-advantage"
]
"""By a number, the highest first, or the lowest with a minus before it. What has no such number is left out."""


@dataclass(frozen=True)
class Page:
    """Rows newest first or in their order, as the viewer takes them, and parts that could not be read."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)


def parts_of(folder: Path) -> list[Path]:
    """The parts in a run's folder, the oldest first."""
    return sorted((folder / FOLDER).glob("part-*.db"))


def opened(path: Path) -> "closing[sqlite3.Connection]":
    """A part to read only, until the end of the context. Raises sqlite3.DatabaseError if it cannot be read.

    A copy on a disk that nobody may write to has no room for what WAL keeps beside it.
    """
    for options in ("mode=ro", "mode=ro&immutable=1"):
        database = sqlite3.connect(f"file:{_quoted(path)}?{options}", uri=True)
        try:
            database.execute("SELECT count(*) FROM sqlite_schema")
        except sqlite3.OperationalError:
            database.close()
            continue
        database.row_factory = sqlite3.Row
        return closing(database)
    raise sqlite3.OperationalError(f"{path} cannot be opened")


def _quoted(path: Path) -> str:
    return str(path.resolve()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")


def first_step(path: Path) -> int:
    """Number of a part, by its file's name."""
    return int(path.stem.removeprefix("part-"))


def page(
    folder: Path, wanted: Filter, *, limit: int = 50, start: Key | None = None, direction: Direction = "older"
) -> Page:
    """At most `limit` rows beyond `start` in a direction, without it from that end; always newest first."""
    older, found = direction == "older", Page()
    for path in sorted(parts_of(folder), reverse=older):
        part = first_step(path)
        if start is not None and (part > start.part if older else part < start.part):
            continue
        beyond = start.row if start is not None and part == start.part else None
        try:
            with opened(path) as database:
                rows = _select(database, wanted, limit=limit - len(found.rows), beyond=beyond, older=older)
                found.rows.extend(_shown(part, row) for row in rows)
        except sqlite3.DatabaseError as error:
            found.unreadable.append(f"{path.name}: {error}")
        if len(found.rows) >= limit:
            break
    if not older:
        found.rows.reverse()
    return found


def ordered(folder: Path, wanted: Filter, *, order: Order, limit: int = 50, skip: int = 0) -> Page:
    """At most `limit` rows by a number, after so many others. What is skipped is looked at as well: it is for the first
    pages, where the extremes are.
    """
    found, name, rises = Page(), order.removeprefix("-"), order.startswith("-")
    rows: list[dict[str, Any]] = []
    for path in sorted(parts_of(folder), reverse=True):
        try:
            with opened(path) as database:
                by = (name, rises)
                some = _select(database, wanted, limit=limit + skip, beyond=None, older=True, by=by)
                rows.extend(_shown(first_step(path), row) for row in some)
        except sqlite3.DatabaseError as error:
            found.unreadable.append(f"{path.name}: {error}")
    found.rows.extend(sorted(rows, key=lambda row: row[name], reverse=not rises)[skip : skip + limit])
    return found


def kept_of_step(folder: Path, step: int) -> dict[str, int]:
    """Numbers of a step's groups that are kept, and that are not."""
    kept = {"groups": 0, "left_out": 0}
    for path in parts_of(folder):
        with suppress(sqlite3.DatabaseError), opened(path) as database:
            row = database.execute("SELECT groups, left_out FROM steps WHERE step = ?", (step,)).fetchone()
            if row is not None:
                kept = {name: kept[name] + row[name] for name in kept}
    return kept


def _select(
    database: sqlite3.Connection,
    wanted: Filter,
    *,
    limit: int,
    beyond: int | None,
    older: bool,
    by: tuple[str, bool] | None = None,
) -> list[sqlite3.Row]:
    fitting = fitting_rows(database, wanted, beyond=beyond, older=older, by=by)
    if fitting is None:
        return []
    tail, values = fitting
    return database.execute(
        "SELECT rows.id, grp, place, rows.step, rows.environment, rows.task, rows.why, reward, length, lag, finish,"
        f" {later_columns(database)}, {_AROUND}, {excerpt_of(wanted)} {tail} LIMIT ?",
        (*values, limit),
    ).fetchall()


def fitting_rows(
    database: sqlite3.Connection,
    wanted: Filter,
    *,
    beyond: int | None,
    older: bool,
    by: tuple[str, bool] | None = None,
) -> tuple[str, list[Any]] | None:
    """The part of a query from FROM on for the rows that fit, in order, with its values; None if none can fit.

    `beyond` is the row after which they begin. `by` is a column to order by, and whether its lowest values come first.
    """
    needed = {by[0] if by else "id", "id" if wanted.min_ratio is None else "ratio"}
    if not (needed <= _columns(database) and _may_fit(database, wanted)):
        return None
    where, values = wanted.where()
    # The index of words has them in this order: of a frequent word a page is read then, not all that have it.
    order = "words.rowid" if wanted.words else "rows.id"
    if beyond is not None:
        where, values = f"{where} AND {order} {'<' if older else '>'} ?", [*values, beyond]
    join, matched = join_of(wanted)
    direction = "DESC" if older else "ASC"
    if by is not None:
        order, direction = f"rows.{by[0]}", "ASC" if by[1] else "DESC"
        where = f"{where} AND {order} IS NOT NULL"
    return f"FROM rows {join} WHERE {where} ORDER BY {order} {direction}", [*matched, *values]


def join_of(wanted: Filter) -> tuple[str, list[Any]]:
    """The index of words joined to the rows, where the filter has words, with its values."""
    if not wanted.words:
        return "", []
    return "JOIN words ON words.rowid = rows.id AND words MATCH ?", [_phrase(wanted.words)]


def excerpt_of(wanted: Filter) -> str:
    """The column `excerpt` of a query: the text around the words, or its beginning."""
    found = "snippet(words, 0, '\x02', '\x03', ' … ', 24)" if wanted.words else f"substr(rows.text, 1, {_EXCERPT})"
    return f"{found} AS excerpt"


def later_columns(database: sqlite3.Connection) -> str:
    """Columns that parts of earlier releases have not, and NULL in their place there."""
    known = _columns(database)
    return ", ".join(name if name in known else f"NULL AS {name}" for name in ("ratio", "gap", "advantage"))


def _columns(database: sqlite3.Connection) -> set[str]:
    return {row[1] for row in database.execute("PRAGMA table_info(rows)")}


def _may_fit(database: sqlite3.Connection, wanted: Filter) -> bool:
    """False if no reward of a part is in the range, which its index says without a look at all rows."""
    if wanted.min_reward is None and wanted.max_reward is None:
        return True
    bounds = Filter(min_reward=wanted.min_reward, max_reward=wanted.max_reward)
    where, values = bounds.where()
    return database.execute(f"SELECT 1 FROM rows WHERE {where} LIMIT 1", values).fetchone() is not None


def _phrase(words: str) -> str:
    """Quotes a phrase for FTS5 whatever stands in it; a star at its end asks for words that begin so."""
    bare = words.rstrip("*").replace('"', '""').replace("\0", " ")
    return f'"{bare}"{"*" if words.endswith("*") else ""}'


def _shown(part: int, row: sqlite3.Row) -> dict[str, Any]:
    known = {name: row[name] for name in row.keys() if name not in ("id", "grp")}  # noqa: SIM118
    if "excerpt" in known:
        known["excerpt"] = short_excerpt(known["excerpt"])
    if "rewards" in known:
        known |= _around(known.pop("explanation"), prompt=known["prompt"], rewards=known["rewards"])
    return {"key": str(Key(part, row["id"])), "group": str(Key(part, row["grp"])), **known}


def short_excerpt(text: str) -> str:
    """An excerpt within its bounds, with the mark of the first word in it: a word may be as long as the whole text."""
    begin = max(0, text.find("\x02") - _EXCERPT)
    return text[begin : begin + 2 * _EXCERPT]


def _around(explanation: str | None, *, prompt: str | None, rewards: str) -> dict[str, Any]:
    """The end of the prompt, where the question is, what was expected of its answer, and the rewards of the group."""
    return {
        "prompt": prompt or "",
        "expected": expected_of(explanation),
        "rewards": json.loads(rewards)[:MAX_SIBLINGS],
    }


def expected_of(explanation: str | None) -> str:
    """The beginning of what a verifier was given as right, by its explanation; empty if it does not say."""
    _, found, given = (explanation or "").rpartition(_GIVEN)
    return given[:MAX_AROUND] if found else ""


def overview(folder: Path) -> dict[str, Any]:
    """An overview: first and last step, environments, reasons, endings, how many groups were kept and left out."""
    counts = {"groups": 0, "trajectories": 0, "left_out": 0}
    names: dict[str, set[str]] = {name: set() for name in ("environment", "why", "finish", "verifier", "player")}
    steps: list[int] = []
    unreadable = []
    parts = parts_of(folder)
    for path in parts:
        try:
            with opened(path) as database:
                row = database.execute(
                    "SELECT min(step), max(step), sum(groups), sum(trajectories), sum(left_out) FROM steps"
                ).fetchone()
                steps += [row[0], row[1]] if row[0] is not None else []
                for name, value in zip(counts, row[2:], strict=True):
                    counts[name] += value or 0
                for found in database.execute(_DISTINCT) if path in parts[-_TOLD_BY:] else ():
                    for values, value in zip(names.values(), found, strict=True):
                        values.add(value)
        except sqlite3.DatabaseError as error:
            unreadable.append(f"{path.name}: {error}")
    known = {f"{name}s": sorted(value for value in values if value) for name, values in names.items()}
    first, last = (min(steps), max(steps)) if steps else (None, None)
    return {"first_step": first, "last_step": last, **counts, **known, "unreadable": unreadable}


def group(
    folder: Path, key: Key, *, decode: Decode | None, only: int | None = None, begin: int = 0
) -> dict[str, Any] | None:
    """A group with its tokens; None if it is not there. `only` is the place of the one trajectory to decode, from its
    token `begin` on.

    The tokens that all its trajectories begin with are no part of that: their text stands once, in `prompt`. Without
    `decode` a token is shown by its number. Raises sqlite3.DatabaseError for a part that cannot be read, as a damaged
    one.
    """
    path = folder / FOLDER / f"part-{key.part:010d}.db"
    if not path.exists():
        return None
    with opened(path) as database:
        head = database.execute("SELECT * FROM groups WHERE id = ?", (key.row,)).fetchone()
        rows = database.execute("SELECT * FROM rows WHERE grp = ? ORDER BY place", (key.row,)).fetchall()
    if head is None:
        return None
    try:
        columns = unpacked(head["tokens"])
    except (zlib.error, struct.error, ValueError) as error:
        raise sqlite3.DatabaseError(f"{path.name}: the tokens of group {key.row} are damaged: {error}") from error
    shared = _shared(columns)
    left = MAX_TOKENS
    shown = []
    for row, own in zip(rows, columns, strict=True):
        decoded = row["place"] == only or (only is None and len(own["token_ids"]) <= left)
        left -= len(own["token_ids"]) if decoded else 0
        tokens = _tokens(own, shared, decode, begin=begin if only is not None else 0) if decoded else None
        shown.append(
            {
                **_shown(key.part, row),
                "facts": json.loads(row["facts"]),
                "text": bounded(row["text"]) if tokens is None else None,
                "total": len(own["token_ids"]),
                "tokens": tokens,
            }
        )
    facts = {name: head[name] for name in head.keys() if name not in ("id", "tokens", "times")}  # noqa: SIM118
    prompt = _prompt(columns[0]["token_ids"][:shared].tolist(), decode)
    return {"group": str(key), **facts, "shared": shared, "prompt": prompt, "trajectories": shown}


def whole_text(folder: Path, key: Key, *, place: int | None) -> str | None:
    """The text of the completion at `place` in a group, or of the group's prompt; None if it is not there."""
    path = folder / FOLDER / f"part-{key.part:010d}.db"
    if not path.exists():
        return None
    with opened(path) as database:
        found = database.execute(
            "SELECT prompt FROM groups WHERE id = :id AND :place IS NULL"
            " UNION ALL SELECT text FROM rows WHERE grp = :id AND place = :place",
            {"id": key.row, "place": place},
        ).fetchone()
    return None if found is None else str(found[0])


def bounded(text: str, most: int = MAX_TEXT) -> str:
    """The text, or its beginning and its end and between them how much is left out."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} ⟨ … {len(text) - 2 * (most // 2):,} characters … ⟩ {text[-(most // 2) :]}"


def _prompt(ids: Sequence[int], decode: Decode | None) -> str:
    def text(some: Sequence[int]) -> str:
        return bounded("".join(pieces_of(some, decode)))

    if len(ids) <= _MAX_OF_PROMPT:
        return text(ids)
    half = _MAX_OF_PROMPT // 2
    return f"{text(ids[:half])} ⟨ … {len(ids) - 2 * half:,} tokens … ⟩ {text(ids[-half:])}"


def _shared(columns: Sequence[Columns]) -> int:
    """Number of tokens that all trajectories begin with, before anything was sampled."""
    first = columns[0]["token_ids"]
    most = min(_given(own["loss_mask"]) for own in columns)
    for own in columns[1:]:
        differs = np.flatnonzero(own["token_ids"][:most] != first[:most])
        most = int(differs[0]) if len(differs) else most
    return most


def _given(mask: NDArray[Any]) -> int:
    sampled = np.flatnonzero(mask)
    return int(sampled[0]) if len(sampled) else len(mask)


def _tokens(own: Columns, shared: int, decode: Decode | None, *, begin: int) -> dict[str, Any]:
    """The tokens from `begin` on that are shown: `begin` says where they do begin."""
    first = min(max(shared, begin), max(shared, len(own["token_ids"]) - 1))
    part = slice(first, first + MAX_TOKENS)
    before = own["token_ids"][max(0, first - 1) : first].tolist()
    pieces = pieces_of(own["token_ids"][part].tolist(), decode, before=before)
    return {
        "begin": first,
        "pieces": [bounded(piece, _MAX_OF_TOKEN) for piece in pieces],
        "ids": own["token_ids"][part].tolist(),
        "mask": own["loss_mask"][part].tolist(),
        "versions": own["versions"][part].tolist(),
        **{
            name: _numbers(own[name][part])
            for name in ("behavior_logprobs", "learner_logprobs", "entropies", "advantages")
        },
    }


def _numbers(values: NDArray[Any]) -> list[float | None]:
    """Four digits after the point; null for what is not known, or infinite: JSON has no such number."""
    return [value if math.isfinite(value) else None for value in np.round(values.astype(np.float64), 4).tolist()]


def pieces_of(ids: Sequence[int], decode: Decode | None, *, before: Sequence[int] = ()) -> list[str]:
    """The text of each token. A character that several tokens make stands at the last of them; one token before each is
    decoded with it, as some tokenizers drop the space of the first one.
    """
    if decode is None:
        return [f"⟨{token}⟩" for token in ids]
    found: list[str] = []
    context, held = list(before), []
    for token in ids:
        held.append(token)
        text = decode([*context, *held])[len(decode(context)) if context else 0 :]
        if text.endswith("\ufffd") and len(held) < _HELD_BACK:
            found.append("")
            continue
        found.append(text)
        context, held = held[-1:], []
    if held:
        found[-1] = decode([*context, *held])[len(decode(context)) if context else 0 :]
    return found


@lru_cache(maxsize=4)
def _decoder(path: str, written_at: int) -> Decode | None:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    tokenizer = Tokenizer.from_file(path)
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def decoder_of(folder: Path) -> Decode | None:
    """By the tokenizer that the run keeps; None if it has none that can be read."""
    for path in (folder / TOKENIZER, folder / "model" / TOKENIZER):
        if path.is_file():
            try:
                return _decoder(str(path), path.stat().st_mtime_ns)
            except Exception:  # noqa: BLE001 - its library raises Exception itself for a file that is none
                continue
    return None
