"""A run's folder: a fresh run never writes over an old one, and every start has an incarnation of its own."""

import logging
import time
from pathlib import Path

from learner.history.durable_files import unused, write_atomically

log = logging.getLogger(__name__)


def open_run_folder(folder: Path, *, resume: bool) -> int:
    """Makes the folder ready and returns this start's incarnation, from 1.

    Without `resume` an earlier run of the same name is moved aside. Raises FileNotFoundError if there is nothing to
    resume; a run that was killed before it had written anything begins anew.
    """
    marker = folder / "incarnation"
    if resume:
        _check_there_is_something(folder, marker)
    elif marker.exists():
        began = time.strftime("%Y%m%d-%H%M%S", time.localtime(marker.stat().st_mtime))
        aside = unused(folder.with_name(f"{folder.name}.{began}"))
        folder.rename(aside)
        log.info("an earlier run of this name is kept in %s", aside)
    folder.mkdir(parents=True, exist_ok=True)
    incarnation = 1 + (int(marker.read_text(encoding="utf-8")) if marker.exists() else 0)
    write_atomically(marker, f"{incarnation}\n")
    return incarnation


def _check_there_is_something(folder: Path, marker: Path) -> None:
    if not folder.exists():
        raise FileNotFoundError(f"there is no run to resume in {folder}: start it without --resume")
    if marker.exists():
        return
    history = [path.name for pattern in ("journal/*", "checkpoint-*") for path in folder.glob(pattern)]
    if history:
        raise FileNotFoundError(
            f"{marker} is missing, though {folder} holds {history[0]}: write the number of the run's starts so far "
            "into that file, or start without --resume"
        )
    log.info("the run in %s was ended before it had begun: it begins now", folder)
