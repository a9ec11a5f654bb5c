"""Completions of one task at several steps beside each other, each with its differences from the one before it.

The differences are of words, so that a text of a thousand words is compared in milliseconds. Texts are cut before they
are compared, and how much was cut is told.
"""

import difflib
import json
import re
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from learner.page.reading import Key, bounded, first_step, opened, parts_of
from learner.page.store import FOLDER

MAX_BESIDE = 5
"""Steps that stand beside each other."""
MAX_CHOICES = 500
"""Groups of a task that are offered; of more, equally many between them are not."""
MAX_CHARS = 1 << 13
MAX_WORDS = 1000
"""Characters and words of a text that are compared and shown."""
_MAX_OF_PROMPT = 1 << 12
_MAX_VERSIONS = 16
_WORD = re.compile(r"\s*\S+|\s+\Z")

Member = Literal["best", "worst", "first"]
"""Member of its group that is shown: by its reward, or the one that was sampled first."""
_BY: dict[Member, str] = {
    "best": "reward IS NULL, reward DESC, place",
    "worst": "reward IS NULL, reward, place",
    "first": "place",
}
Difference = tuple[Literal["same", "gone", "new"], str]


class KeptGroup(NamedTuple):
    """A group of the task that is kept."""

    step: int
    key: Key
    reward_mean: float | None


def same_task(
    folder: Path, environment: str, task: int, *, steps: Sequence[int] = (), member: Member = "best"
) -> dict[str, Any]:
    """A member of the task's group at each of `steps`, or of the kept step that is nearest; without any, at the first,
    the middle and the last one. For JSON. At most 5 are shown, by rising step.
    """
    kept, unreadable = _kept_groups(folder, environment, task)
    shown: list[dict[str, Any]] = []
    former = ""
    for number, one in enumerate(_chosen(kept, steps)):
        found = None
        with suppress(sqlite3.DatabaseError):  # a part that went meanwhile, or whose group a resume took back
            found = _member(folder, one, member)
        if found is None:
            continue
        text, cut = cut_short(found.pop("text"))
        parts = differences(former, text) if number and shown else [("same", text)]
        shown.append({"step": one.step, "group": str(one.key), "parts": parts, "cut": cut, **found})
        former = text
    choices = [{"step": one.step, "reward_mean": one.reward_mean} for one in _thinned(kept)]
    return {"choices": choices, "shown": shown, "unreadable": unreadable}


def cut_short(text: str) -> tuple[str, int]:
    """The beginning of a text within its bounds, and how many characters are left out behind it."""
    words = list(_WORD.finditer(text[:MAX_CHARS]))
    end = words[MAX_WORDS - 1].end() if len(words) > MAX_WORDS else min(len(text), MAX_CHARS)
    return text[:end], len(text) - end


def differences(before: str, after: str) -> list[Difference]:
    """The words of `after`, those of `before` that are gone at their places, and which of them are new.

    White space belongs to the word behind it, and alone makes no difference.
    """
    old, new = _WORD.findall(before), _WORD.findall(after)
    # What both begin and end with is taken off first: in a text of few words again and again, difflib anchors at none.
    begin = _alike(old, new)
    end = _alike(old[begin:][::-1], new[begin:][::-1])
    old, new, tail = old[begin : len(old) - end], new[begin : len(new) - end], new[len(new) - end :]
    found: list[Difference] = [("same", "".join(_WORD.findall(after)[:begin]))]
    compared = difflib.SequenceMatcher(None, [word.strip() for word in old], [word.strip() for word in new])
    for kind, old_from, old_to, new_from, new_to in compared.get_opcodes():
        if kind == "equal":
            found.append(("same", "".join(new[new_from:new_to])))
            continue
        found += [("gone", "".join(old[old_from:old_to])), ("new", "".join(new[new_from:new_to]))]
    return [(kind, text) for kind, text in [*found, ("same", "".join(tail))] if text]


def _alike(some: Sequence[str], others: Sequence[str]) -> int:
    """Number of words that both begin with."""
    pairs = zip(some, others, strict=False)
    return next(
        (place for place, (one, other) in enumerate(pairs) if one.strip() != other.strip()), min(len(some), len(others))
    )


def _kept_groups(folder: Path, environment: str, task: int) -> tuple[list[KeptGroup], list[str]]:
    """The task's groups by rising step, and parts that could not be read."""
    found, unreadable = [], []
    for path in parts_of(folder):
        try:
            with opened(path) as database:
                rows = database.execute(
                    "SELECT grp, step, avg(reward) FROM rows WHERE task = ? AND environment = ? GROUP BY grp",
                    (task, environment),
                ).fetchall()
        except sqlite3.DatabaseError as error:
            unreadable.append(f"{path.name}: {error}")
            continue
        found += [KeptGroup(step, Key(first_step(path), number), mean) for number, step, mean in rows]
    return sorted(found, key=lambda one: (one.step, one.key.part, one.key.row)), unreadable


def _chosen(kept: Sequence[KeptGroup], steps: Sequence[int]) -> list[KeptGroup]:
    """The groups nearest to the steps, each once."""
    if not kept:
        return []
    if not steps:
        places = {0, (len(kept) - 1) // 2, len(kept) - 1}
    else:
        places = {min(range(len(kept)), key=lambda place: abs(kept[place].step - step)) for step in steps[:MAX_BESIDE]}
    return [kept[place] for place in sorted(places)]


def _thinned(kept: Sequence[KeptGroup]) -> Iterable[KeptGroup]:
    """Kept groups to choose from, with the first and the last one."""
    if len(kept) <= MAX_CHOICES:
        return kept
    last = len(kept) - 1
    return [kept[round(number * last / (MAX_CHOICES - 1))] for number in range(MAX_CHOICES)]


def _member(folder: Path, one: KeptGroup, member: Member) -> dict[str, Any] | None:
    with opened(folder / FOLDER / f"part-{one.key.part:010d}.db") as database:
        row = database.execute(
            "SELECT rows.id, place, reward, length, lag, finish, facts, rows.text, size, reward_mean, groups.why,"
            f" substr(prompt, 1, {4 * _MAX_OF_PROMPT}) AS prompt"
            f" FROM rows JOIN groups ON groups.id = rows.grp WHERE grp = ? ORDER BY {_BY[member]} LIMIT 1",
            (one.key.row,),
        ).fetchone()
    if row is None:
        return None
    named = ("place", "reward", "length", "lag", "finish", "text", "size", "reward_mean", "why")
    versions = list(dict.fromkeys(span[0] for span in json.loads(row["facts"]).get("spans", ())))
    return {
        **{name: row[name] for name in named},
        "key": str(Key(one.key.part, row["id"])),
        "prompt": bounded(row["prompt"] or "", _MAX_OF_PROMPT),
        "versions": versions[:_MAX_VERSIONS],
    }
