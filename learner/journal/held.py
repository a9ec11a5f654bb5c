"""Files of a run that goes on, held still for who reads them for long: its learner removes old ones meanwhile.

Links take no room, and a file that is only removed stays whole behind them.
"""

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from learner.journal.checkpoints import Checkpoint, checkpoints_of
from learner.journal.journal import FOLDER
from learner.journal.segments import Segment, segments_of

HELD_PREFIX = "held-"
"""Beginning of the name of each folder that `held_still` makes: one that is there without its maker is of nobody."""
_TRIES = 5


class NothingHeld(RuntimeError):
    """The run has no whole checkpoint to hold of the version that was asked for, or none at all."""


@contextmanager
def held_still(folder: Path, *, version: int | None, beside: Path | None) -> Iterator[Path]:
    """A folder with one checkpoint of a run and the journal from it on, until the end of the body.

    The checkpoint is that of `version`, or the oldest whole one that the journal follows; none where it begins with the
    initial model. The folder is made in `beside`, or among temporary ones. What is on another file system is copied.
    Raises NothingHeld.
    """
    with TemporaryDirectory(prefix=HELD_PREFIX, dir=beside) as made:
        held = Path(made)
        for tried in range(_TRIES):
            try:
                _link(folder, held, version)
                break
            except (FileNotFoundError, shutil.Error):  # the oldest were removed since they were listed
                if tried == _TRIES - 1:
                    raise
                shutil.rmtree(held)
        yield held


def _link(folder: Path, held: Path, version: int | None) -> None:
    segments = segments_of(folder / FOLDER)
    begun = {segment.start for segment in segments}
    checkpoints = {each.version: each for each in checkpoints_of(folder) if each.version in begun}
    possible = sorted({*checkpoints, *({0} & begun)})
    for first in possible if version is None else {version}.intersection(possible):
        if _checkpoint_linked(checkpoints.get(first), held) or first == 0:
            _link_segments(segments, held, first)
            return
    raise NothingHeld(f"{folder} has nothing whole to begin with")


def _checkpoint_linked(checkpoint: Checkpoint | None, held: Path) -> bool:
    """False if there is none, or none that is whole. Its links are looked at: the learner may remove it meanwhile."""
    if checkpoint is None:
        return False
    path = held / checkpoint.path.name
    shutil.copytree(checkpoint.path, path, copy_function=_linked)
    if Checkpoint(path, checkpoint.version).fault() is None:
        return True
    shutil.rmtree(path)
    return False


def _link_segments(segments: Iterable[Segment], held: Path, first: int) -> None:
    (held / FOLDER).mkdir(parents=True)
    for segment in segments:
        if segment.start >= first:
            _linked(segment.path, held / FOLDER / segment.path.name)


def _linked(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            raise
        shutil.copy2(source, target)
