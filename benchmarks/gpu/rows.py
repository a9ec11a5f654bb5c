"""Rows of `make gpu`: a part's process says each on its standard output, and whoever runs it makes a table."""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

MARK = "ROW "
State = Literal["measured", "passed", "failed", "skipped", "broken off"]
REHEARSAL = "--rehearsal"


class GpuRow(BaseModel):
    """A finding of a part: `what` was looked at, what was `found`, and how that ended."""

    model_config = ConfigDict(frozen=True)

    part: str
    what: str
    found: str
    state: State = "measured"

    @property
    def told(self) -> str:
        """For the terminal."""
        state = "" if self.state == "measured" else f"{self.state}: "
        return f"{self.part}: {self.what}: {state}{self.found}"


Say = Callable[[GpuRow], None]


def say(what: str, found: str, state: State = "measured") -> None:
    """Says a row, from within a part's process."""
    # One write, on a line of its own: others may be in the middle of a line, and processes of a part share the pipe.
    sys.stdout.write(f"\n{MARK}{json.dumps({'what': what, 'found': found, 'state': state})}\n")
    sys.stdout.flush()


def heard(line: str, *, part: str) -> GpuRow | None:
    """The row in a line of a part's output; None for any other line."""
    if not line.startswith(MARK):
        return None
    return GpuRow(part=part, **json.loads(line.removeprefix(MARK)))


def rehearses() -> bool:
    """True in a part's process that is to show, on a CPU and with tiny sizes, that it runs at all."""
    return REHEARSAL in sys.argv


def rate(nbytes: float, seconds: float) -> str:
    """GB/s, for people."""
    return f"{nbytes / 1e9 / seconds:.2f} GB/s ({nbytes / 1e9:.2f} GB in {seconds:.3f} s)"


def table(rows: Sequence[GpuRow]) -> str:
    """All rows in Markdown."""
    lines = ["| part | what | found |", "|---|---|---|"]
    for row in rows:
        state = "" if row.state == "measured" else f"**{row.state}** "
        cells = (row.part, row.what, (state + row.found).strip())
        lines.append("| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |")
    return "\n".join([*lines, ""])
