"""The result of a what-if for the page: both curves of each number that differs, and the groups that changed most.

Read from the folder that `learner replay --to` wrote, and from the run's own; of a long run equally many steps apart.
"""

import heapq
import json
import math
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from learner.page.curves import FILE
from learner.page.reading import Key, first_step, opened, parts_of
from learner.page.what_if_runs import WhatIfRunner
from learner.reports.history import CURVES, RunHistory, is_number, words_of
from learner.reports.what_if_folder import GROUPS_FILE, WhatIfProgress, note_of
from learner.reports.what_if_numbers import ComparedSteps, size_of_change

MAX_LISTED = 50
"""Number of what-ifs of a run that are listed, the newest."""
MAX_CURVES = 40
MAX_STEPS = 2000
MAX_GROUPS = 50
_END_OF_LOG = 1200


def listed(runner: WhatIfRunner, *, also: str = "") -> list[dict[str, Any]]:
    """The newest what-ifs of a run, and the one that is named, the newest first, with how far each is. For JSON.

    `state` is `running`, `done`, or `ended`: before it was done, of which the end of its log tells why.
    """
    running, found = runner.running(), []
    for name in (name for place, name in enumerate(runner.names()) if place < MAX_LISTED or name == also):
        folder = runner.folder_of(name)
        progress = WhatIfProgress.read(folder)
        is_done = progress is not None and progress.phase == "done"
        state = "running" if name == running else "done" if is_done else "ended"
        told = {"name": name, "state": state, "changes": note_of(folder).get("changes") or runner.changes_of(name)}
        steps = None if progress is None else vars(progress)
        why = runner.log_of(name)[-_END_OF_LOG:] if state == "ended" else ""
        found.append({**told, "progress": steps, "why": why})
    return found


def result_of(run: Path, folder: Path) -> dict[str, Any]:
    """Both curves of a what-if that is done, or ended early in its `phase`, and its groups. For JSON.

    `trained` is the number of steps that the other settings have trained: the run may lack numbers of some. Of a group
    a number is None if it is not finite.
    """
    now = {step: _numbers(line) for step, line in RunHistory(dict).read(folder / FILE).steps.items()}
    noted = RunHistory(dict).read(run / FILE).steps
    both = ComparedSteps.of({step: noted[step] for step in now if step in noted}, now)
    shown = _thinned(both.steps)
    note, progress = note_of(folder), WhatIfProgress.read(folder)
    groups, count, changed = _most_changed(folder / GROUPS_FILE)
    keys = keys_of(run, [(each["step"], each["lease_id"]) for each in groups])
    return {
        "changes": note.get("changes", []),
        "caveat": note.get("caveat", ""),
        "phase": None if progress is None else progress.phase,
        "trained": len(now),
        "unlike": "" if progress is None else progress.unlike,
        "first_apart": both.first_apart,
        "steps": shown,
        "curves": [_curve(both, name, shown) for name in both.moved[:MAX_CURVES]],
        "same": both.same,
        "compared_groups": (folder / GROUPS_FILE).exists(),
        "group_count": count,
        "changed_count": changed,
        "groups": [{**each, "key": key} for each, key in zip(groups, keys, strict=True)],
    }


def keys_of(run: Path, groups: Sequence[tuple[int, int]]) -> list[str | None]:
    """The key of each group, by its step and lease, under which the run's trajectories are kept; None if they are not.

    Of a step that a resume trained again the newest counts.
    """
    found: dict[tuple[int, int], str] = {}
    for path in parts_of(run):
        part = first_step(path)
        with suppress(sqlite3.DatabaseError), opened(path) as database:
            for step, lease in groups:
                row = database.execute(
                    "SELECT max(groups.id) FROM rows JOIN groups ON groups.id = rows.grp"
                    " WHERE rows.step = ? AND groups.lease = ?",
                    (step, lease),
                ).fetchone()
                if row[0] is not None:
                    found[step, lease] = str(Key(part, row[0]))
    return [found.get(each) for each in groups]


def _numbers(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "step"}


def _most_changed(path: Path) -> tuple[list[dict[str, Any]], int, int]:
    """The groups that changed most, the most first; how many there are, and how many of them changed at all."""
    count = changed = 0
    most: list[tuple[float, int, int, int, dict[str, Any]]] = []
    for count, group in enumerate(_lines(path), 1):
        if not group["pull_change"]:
            continue
        changed += 1
        entry = (size_of_change(group["pull_change"]), -group["step"], -group["lease_id"], count, group)
        if len(most) < MAX_GROUPS:
            heapq.heappush(most, entry)
        else:
            heapq.heappushpop(most, entry)
    return [_finite(each) for *_, each in sorted(most, reverse=True)], count, changed


def _finite(group: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no numbers that are not finite."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in group.items()
    }


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The groups of groups.jsonl; none without the file. A last line that is not whole is left out."""
    with suppress(FileNotFoundError), path.open(encoding="utf-8") as file:
        for line in file:
            with suppress(ValueError):
                yield json.loads(line)


def _thinned(steps: Sequence[int]) -> list[int]:
    if len(steps) <= MAX_STEPS:
        return list(steps)
    last = len(steps) - 1
    return [steps[round(number * last / (MAX_STEPS - 1))] for number in range(MAX_STEPS)]


def _curve(both: ComparedSteps, name: str, steps: Sequence[int]) -> dict[str, Any]:
    return {
        "name": name,
        "title": _title(name),
        "run": _values(both.run, name, steps),
        "now": _values(both.now, name, steps),
    }


def _values(numbers: Mapping[int, Mapping[str, Any]], name: str, steps: Sequence[int]) -> list[float | None]:
    """JSON has no infinity."""
    found = (numbers[step].get(name) for step in steps)
    return [value if is_number(value) else None for value in found]


def _title(name: str) -> str:
    whole, _, part = name.partition("/")
    known = next((words_of(curve) for curve in CURVES if curve.name == whole), whole)
    return f"{known}: {part}" if part else known
