"""A run's folder: a fresh run never writes over an old one, and every start has an incarnation of its own."""

import itertools
import logging
import time
from pathlib import Path

log = logging.getLogger(__name__)


def open_run_folder(folder: Path, *, resume: bool) -> int:
    """Makes the folder ready and returns this start's incarnation, from 1.

    Without `resume` an earlier run of the same name is moved aside. Raises FileNotFoundError if there is nothing to
    resume.
    """
    marker = folder / "incarnation"
    if resume and not marker.exists():
        raise FileNotFoundError(f"there is no run to resume in {folder}: start it without --resume")
    if not resume and marker.exists():
        aside = _unused(f"{folder}.{time.strftime('%Y%m%d-%H%M%S', time.localtime(marker.stat().st_mtime))}")
        folder.rename(aside)
        log.info("an earlier run of this name is kept in %s", aside)
    folder.mkdir(parents=True, exist_ok=True)
    incarnation = 1 + (int(marker.read_text(encoding="utf-8")) if marker.exists() else 0)
    draft = folder / "incarnation.new"
    draft.write_text(f"{incarnation}\n", encoding="utf-8")
    draft.replace(marker)  # a marker is never half written
    return incarnation


def _unused(name: str) -> Path:
    """The path of that name, or with a number appended: two runs can begin within one second."""
    candidates = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(path for path in map(Path, candidates) if not path.exists())
