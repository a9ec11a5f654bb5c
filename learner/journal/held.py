"""Files of a run that goes on, held still for who reads them for long: its learner removes old ones meanwhile.

Links take no room, and a file that is only removed stays whole behind them.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from learner.journal.checkpoints import checkpoints_of
from learner.journal.journal import FOLDER
from learner.journal.segments import segments_of

HELD_PREFIX = "held-"
"""Beginning of the name of each folder that `held_still` makes: one that is there without its maker is of nobody."""
_TRIES = 5


@contextmanager
def held_still(folder: Path, *, version: int | None, beside: Path | None) -> Iterator[Path]:
    """A folder with one checkpoint of a run and the journal from it on, until the end of the body.

    The checkpoint is that of `version`, or the oldest that the journal follows; none where it begins with the initial
    model. The folder is made in `beside`, or among temporary ones. What is on another file system is copied.
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
    possible = {*checkpoints, *({0} & begun)}
    first = version if version in possible else min(possible, default=0)
    (held / FOLDER).mkdir(parents=True)
    if first in checkpoints:
        path = checkpoints[first].path
        shutil.copytree(path, held / path.name, copy_function=_linked)
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
