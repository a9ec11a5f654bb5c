"""A folder of a service, temporary or where it is wanted, which goes with the service, however that ends."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "headway-sandbox-"
# Between its making and its lock a folder looks as if nobody had it.
_YOUNG_S = 60.0


@contextmanager
def staging_folder(prefix: str = _PREFIX, *, within: Path | None = None) -> Iterator[Path]:
    """A folder of this process alone, removed at the end; one that nobody removed, by the next who asks for one of this
    prefix there.
    """
    parent = within or Path(tempfile.gettempdir())
    _remove_stale(parent, prefix)
    with (
        tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as name,
        _locked(Path(name)),
    ):
        yield Path(name)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock that ends with this process, however it ends. Raises OSError if somebody holds it."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(opened)


def _remove_stale(parent: Path, prefix: str) -> None:
    for folder in parent.glob(f"{prefix}*"):
        # What cannot be locked is in use; what went away meanwhile was removed by another service.
        with suppress(OSError):
            status = folder.lstat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > _YOUNG_S:
                with _locked(folder):
                    shutil.rmtree(folder)
