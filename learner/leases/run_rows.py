"""Rows of one run in a file of the run's folder, each on the disk before what it tells is acted upon."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from learner.journal.files import anyone, write_atomically
from services.append_file import AppendFile, sync_folder


class RunRows:
    """JSON rows of one run, in a file that lives as long as the run's folder; rows of other runs are left.

    `may_write` is called before each change, and raises if the folder is not this process's any more.
    """

    def __init__(self, path: Path, *, run: str, may_write: Callable[[], None] = anyone) -> None:
        self._path = path
        self._run = run
        self._may_write = may_write

    def read(self) -> Iterator[dict[str, Any]]:
        """In the order in which they were written; a torn last row was never acted upon."""
        if not self._path.exists():
            return
        for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                row = json.loads(line)
                if row["run"] == self._run:
                    yield row

    def size(self) -> int:
        """Bytes of the file."""
        return self._path.stat().st_size if self._path.exists() else 0

    def append(self, row: Mapping[str, Any], *, sync: bool = True) -> None:
        """On the disk when this returns, with its name. Raises what `may_write` does, and OSError: then the file is
        as it was, since a row that was not acted upon would give leases another task in a later life.

        Without `sync` it is with the operating system: it survives this process's death, and goes to the disk with the
        next one that is synced.
        """
        self._may_write()
        with closing(AppendFile(self._path)) as file:
            former = file.end
            # A torn row before it, of a power loss, ends at a line of its own.
            file.append((("\n" if former else "") + self._line(row)).encode())
            try:
                if sync:
                    file.sync()
                    sync_folder(self._path.parent)
            except OSError:
                with suppress(OSError):
                    os.truncate(self._path, former)
                raise

    def replace(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """The file holds these rows alone, or, after an OSError, what it held before. Raises what `may_write` does."""
        self._may_write()
        write_atomically(self._path, "\n".join(map(self._line, rows)))

    def _line(self, row: Mapping[str, Any]) -> str:
        return json.dumps({"run": self._run, **row})
