"""A folder after a power loss: names and bytes that were synced, and nothing else."""

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest


@dataclass
class UnsyncedDisk:
    """Notes at each sync what is on the disk from then on, until the test ends.

    A file has the bytes of its last sync, a folder the names of its own; `left_of` makes what would be found after a
    power loss now. Inodes are held open, so that none is used again.
    """

    _bytes: dict[int, bytes] = field(default_factory=dict)
    _names: dict[int, dict[str, int]] = field(default_factory=dict)
    _folders: set[int] = field(default_factory=set)
    _held: dict[int, int] = field(default_factory=dict)

    @classmethod
    def beneath(cls, monkeypatch: pytest.MonkeyPatch) -> "UnsyncedDisk":
        """Beneath all syncs of this process from here on."""
        disk = cls()
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, disk._noting(getattr(os, name)))
        return disk

    def _noting(self, really: Callable[[int], None]) -> Callable[[int], None]:
        def sync(handle: int) -> None:
            really(handle)
            self._note(handle)

        return sync

    def _note(self, handle: int) -> None:
        number = self._hold(handle)
        if number not in self._folders:
            self._bytes[number] = Path(f"/proc/self/fd/{handle}").read_bytes()  # it may be open for writing alone
            return
        self._names[number] = {}
        for name in os.listdir(handle):
            child = os.open(name, os.O_RDONLY, dir_fd=handle)
            try:
                self._names[number][name] = self._hold(child)
            finally:
                os.close(child)

    def _hold(self, handle: int) -> int:
        found = os.fstat(handle)
        if found.st_ino not in self._held:
            self._held[found.st_ino] = os.dup(handle)
            if stat.S_ISDIR(found.st_mode):
                self._folders.add(found.st_ino)
        return found.st_ino

    def left_of(self, folder: Path, to: Path) -> Path:
        """Makes `to`, which holds what a power loss would leave of the folder."""
        self._make(folder.stat().st_ino, to)
        return to

    def _make(self, number: int, to: Path) -> None:
        to.mkdir()
        for name, child in self._names.get(number, {}).items():
            if child in self._folders:
                self._make(child, to / name)
            else:
                (to / name).write_bytes(self._bytes.get(child, b""))

    def close(self) -> None:
        """Lets go of the inodes."""
        for handle in self._held.values():
            os.close(handle)
