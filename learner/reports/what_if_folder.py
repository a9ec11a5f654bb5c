"""The folder of a what-if: names of its files, and how far the training that writes it has come. Loads no torch."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

GROUPS_FILE = "groups.jsonl"
NOTE_FILE = "what_if.json"
PROGRESS_FILE = "progress.json"
_EVERY_S = 0.5

Phase = Literal["run", "what-if", "done"]
"""Settings by which the steps are being trained: the run's own, the changed ones, or both are done."""


@dataclass(frozen=True)
class WhatIfProgress:
    """Place of a what-if: in its `phase`, `trained` steps of `steps` are done.

    `unlike` is the first number that the run's own settings gave otherwise than the run has noted it; empty if none is.
    """

    phase: Phase
    trained: int
    steps: int
    unlike: str = ""

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The progress in a what-if's folder; None if there is none yet, or none that can be read."""
        try:
            return cls(**json.loads((folder / PROGRESS_FILE).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None


class ProgressNotes:
    """Notes the progress in a what-if's folder, twice a second at most; in none if there is no folder."""

    def __init__(self, folder: Path | None, *, steps: int) -> None:
        self._folder = folder
        self._steps = steps
        self._noted = float("-inf")

    def note(self, phase: Phase, trained: int, *, unlike: str = "") -> None:
        """To be called after each step; the end of a phase is noted in any case."""
        now = time.monotonic()
        if self._folder is None or (now - self._noted < _EVERY_S and trained < self._steps):
            return
        self._noted = now
        progress = WhatIfProgress(phase, trained, self._steps, unlike)
        draft = self._folder / f"{PROGRESS_FILE}.new"
        draft.write_text(json.dumps(asdict(progress)) + "\n", encoding="utf-8")
        draft.replace(self._folder / PROGRESS_FILE)  # a reader sees one or the other


def note_of(folder: Path) -> dict[str, Any]:
    """Note of a what-if on itself: `run`, `from_version`, `changes` and `caveat`; empty if it cannot be read."""
    try:
        note = json.loads((folder / NOTE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}
