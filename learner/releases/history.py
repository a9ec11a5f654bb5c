"""The history of releases: one file of rows, whose sum is the state. A promotion is one row that reaches the disk.

    candidate ── worse, or not shown to be better ─▶ refused
        └─ better ─▶ (trial with users ── fell, or too few ─▶ refused) ─▶ released ── rollback ─▶ an earlier one

A kill leaves a row out, whole, or torn, and a torn row counts as none: there is always one released version, the one
before a promotion or the one after. A rollback by hand also holds further promotions until somebody lets them go on,
since the gate that let the bad version through would let the next one through as well.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from learner.journal.files import anyone
from services.append_file import AppendFile, make_folder, sync_folder

FILE = "history.jsonl"
ReleaseEvent = Literal["refused", "trial", "released", "rolled_back", "resumed", "served"]


@dataclass(frozen=True)
class ReleaseState:
    """The released version, the candidate on trial with users and since when (seconds since 1970), why promotions are
    held if they are, the versions that were released once, the latest last, and those of them that were taken back.
    """

    released: str | None = None
    trial: str | None = None
    trial_since: float = 0.0
    held: str = ""
    former: tuple[str, ...] = ()
    withdrawn: tuple[str, ...] = ()
    """A rollback went past them: they are released again by name alone."""

    def after(self, row: Mapping[str, Any]) -> "ReleaseState":
        """The state after one more row."""
        version = str(row.get("version", ""))
        match row.get("event"):
            case "trial":
                return replace(self, trial=version, trial_since=float(row["time"]))
            case "refused" if version == self.trial:
                return replace(self, trial=None)
            case "released":
                return replace(self._serving(version), trial=None)
            case "rolled_back":
                return replace(self._back_to(version), trial=None, held=str(row.get("text", "")) or "rolled back")
            case "resumed":
                return replace(self, held="")
        return self

    def _serving(self, version: str) -> "ReleaseState":
        before = [each for each in (*self.former, self.released) if each not in (None, version)]
        former = tuple(dict.fromkeys(map(str, reversed(before))))[::-1]
        withdrawn = tuple(each for each in self.withdrawn if each != version)
        return replace(self, released=version, former=former, withdrawn=withdrawn)

    def _back_to(self, version: str) -> "ReleaseState":
        """Goes back, and withdraws all that was released after that version."""
        order = [each for each in (*self.former, self.released) if each is not None]
        past = order[order.index(version) + 1 :] if version in order else order[-1:]
        return replace(self, withdrawn=tuple(dict.fromkeys((*self.withdrawn, *past))))._serving(version)

    @property
    def ways_back(self) -> tuple[str, ...]:
        """Former versions that may be served without anybody's word, the latest first."""
        return tuple(each for each in reversed(self.former) if each not in self.withdrawn)


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of the releases in `folder`; what is torn was never acted upon."""
    path, rows = folder / FILE, []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and "event" in row:
                    rows.append(row)
    return rows


def state_of(rows: Iterable[Mapping[str, Any]]) -> ReleaseState:
    """The state after all rows."""
    state = ReleaseState()
    for row in rows:
        state = state.after(row)
    return state


class ReleaseHistory:
    """Appends rows, each on the disk when `add` returns, for any thread. `may_write` raises once the folder is
    another's.
    """

    def __init__(self, folder: Path, *, may_write: Callable[[], None] = anyone) -> None:
        self._folder = folder
        self._may_write = may_write
        self._adding = threading.Lock()
        self.rows = read_rows(folder)
        self.state = state_of(self.rows)

    def add(self, event: ReleaseEvent, version: str, **more: object) -> None:
        """Raises OSError, and then the state is as it was."""
        with self._adding:
            self._add(event, version, **more)

    def _add(self, event: ReleaseEvent, version: str, **more: object) -> None:
        self._may_write()
        row = {"event": event, "version": version, "time": time.time(), **more}
        make_folder(self._folder)
        with closing(AppendFile(self._folder / FILE)) as file:
            former = file.end
            # After a torn row of a power loss this one stands on a line of its own.
            file.append((("\n" if former else "") + json.dumps(row)).encode())
            try:
                file.sync()
                sync_folder(self._folder)
            except OSError:
                with suppress(OSError):
                    (self._folder / FILE).open("r+b").truncate(former)
                raise
        self.rows.append(row)
        self.state = self.state.after(row)

    def fingerprints(self) -> dict[tuple[str, str], str]:
        """Checksums of loaded weights that generators of a kind told of a version when it was proven first."""
        found: dict[tuple[str, str], str] = {}
        for row in self.rows:
            if row["event"] == "served":
                found.setdefault((row["version"], row["kind"]), row["fingerprint"])
        return found
