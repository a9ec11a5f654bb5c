"""The folder of a what-if: names of its files, and how far the training that writes it has come. Loads no torch."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

GROUPS_FILE = "groups.jsonl"
NOTE_FILE = "what_if.json"
PROGRESS_FILE = "progress.json"
PULLS_PREFIX = "pulls-"
"""Beginning of the name of the folder in it with the run's own pulls, up to 12 bytes of each trained token. It goes
with the end of the process; one that was killed leaves it.
"""
_EVERY_S = 0.5

Phase = Literal["run", "what-if", "done"]
"""Settings by which the steps are being trained: the run's own, the changed ones, or both are done."""


@dataclass(frozen=True)
class WhatIfProgress:
    """Place of a what-if: in its `phase`, `trained` steps of `steps` are done.

    `unlike` is the first number that the run's own settings gave otherwise than the run has noted it; empty if none is,
    or none yet in the phase `run`.
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
    """Notes the progress in a what-if's folder, about twice a second; in none if there is no folder."""

    def __init__(self, folder: Path | None, *, steps: int) -> None:
        self._folder = folder
        self._steps = steps
        self._noted = float("-inf")
        self._phase: Phase | None = None

    def note(self, phase: Phase, trained: int, *, unlike: str = "") -> None:
        """To be called after each step; the first one and the end of a phase are noted in any case."""
        now, is_within = time.monotonic(), phase == self._phase and trained < self._steps
        if self._folder is None or (is_within and now - self._noted < _EVERY_S):
            return
        self._noted, self._phase = now, phase
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
