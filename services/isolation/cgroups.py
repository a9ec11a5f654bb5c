"""Control groups, where the service may make them: all processes of one sandbox together have limits then.

Both versions are known. Version 1 has a tree for each controller; version 2 has one tree, in which a group with
processes of its own cannot have limited groups below it, so the service moves itself into one first.
"""

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from services.isolation.faults import CannotIsolate
from services.own_cgroups import own_groups

logger = logging.getLogger(__name__)

_NEEDED = ("memory", "pids")
_PREFIX = "headway-"
_REMOVE_S = 5.0
_PAUSE_S = 0.01


@dataclass(frozen=True, kw_only=True)
class Parents:
    """The folders below which groups are made, by controller; of version 2 it is one folder."""

    folders: Mapping[str, Path]
    unified: bool


class ControlGroup:
    """A group for one sandbox and its keeper. Raises OSError if it cannot be made."""

    def __init__(self, parents: Parents, *, name: str) -> None:
        self._folders = {controller: parent / name for controller, parent in parents.folders.items()}
        self._unified = parents.unified
        for folder in set(self._folders.values()):
            folder.mkdir(exist_ok=True)

    @property
    def processes_files(self) -> list[str]:
        """A process that writes 0 into each of them is in the group."""
        return sorted({str(folder / "cgroup.procs") for folder in self._folders.values()})

    def limit(self, *, memory_bytes: int, processes: int) -> None:
        """Set both limits. Raises OSError if more than that is in use."""
        memory = self._folders["memory"] / ("memory.max" if self._unified else "memory.limit_in_bytes")
        memory.write_text(str(memory_bytes))
        (self._folders["pids"] / "pids.max").write_text(str(processes))

    def memory_kills(self) -> int:
        """Number of times that a process was killed since the group had no memory left."""
        name = "memory.events" if self._unified else "memory.oom_control"
        for line in (self._folders["memory"] / name).read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
        return 0

    def remove(self) -> None:
        """Remove it once it is empty, which the end of its last process makes it, a little later."""
        limit = time.monotonic() + _REMOVE_S
        for folder in set(self._folders.values()):
            while True:
                try:
                    folder.rmdir()
                except FileNotFoundError:
                    pass
                except OSError as error:
                    if time.monotonic() < limit:
                        time.sleep(_PAUSE_S)
                        continue
                    logger.warning("cannot remove the cgroup %s: %s", folder, error)
                break


@contextlib.contextmanager
def open_parents(setting: str, *, of: str) -> Iterator[Parents | None]:
    """Groups under which others can be made, by the setting `cgroup` of a group of settings; None where none can.

    Raises CannotIsolate if the setting names a folder where they cannot be made.
    """
    name = f"{_PREFIX}{os.getpid()}"
    parents = None if setting == "off" else _parents(setting)
    if parents is None or (problem := _prepare(parents, name)) is not None:
        if setting not in ("auto", "off"):
            raise CannotIsolate(f"{of}.cgroup: no groups can be made below {setting}; set it to auto or off")
        if setting == "auto":
            reason = "there is none of ours" if parents is None else problem
            logger.info("no cgroups (%s): memory is limited for each process alone", reason)
        yield None
        return
    made = {controller: folder / name for controller, folder in parents.folders.items()}
    try:
        yield Parents(folders=made, unified=parents.unified)
    finally:
        for folder in set(made.values()):
            with contextlib.suppress(OSError):
                folder.rmdir()


def _parents(setting: str) -> Parents | None:
    if setting != "auto":
        return _named(Path(setting))
    own = own_groups()
    if all(controller in own for controller in _NEEDED):
        return Parents(folders={controller: own[controller] for controller in _NEEDED}, unified=False)
    unified = own.get("")
    return None if unified is None else Parents(folders=dict.fromkeys(_NEEDED, unified), unified=True)


def _named(folder: Path) -> Parents | None:
    """A folder of version 2; or of version 1, as /sys/fs/cgroup/*/path with a literal star for the controller."""
    if "*" in str(folder):
        folders = {controller: Path(str(folder).replace("*", controller)) for controller in _NEEDED}
        return Parents(folders=folders, unified=False)
    return Parents(folders=dict.fromkeys(_NEEDED, folder), unified=True)


def _prepare(parents: Parents, name: str) -> str | None:
    """Make the groups that hold those of the sandboxes; what went wrong."""
    try:
        for folder in set(parents.folders.values()):
            if parents.unified:
                _enable(folder)
            _remove_stale(folder)
            (folder / name).mkdir()
            if parents.unified:
                (folder / name / "cgroup.subtree_control").write_text("+memory +pids")
    except OSError as error:
        return str(error)
    return None


def _remove_stale(folder: Path) -> None:
    """Groups of a service that was killed are empty, since what it ran died with it, but they are there."""
    for group in folder.glob(f"{_PREFIX}[0-9]*"):
        if not Path("/proc", group.name.removeprefix(_PREFIX)).exists():
            for path in (*group.glob("place-*"), group):
                with contextlib.suppress(OSError):
                    path.rmdir()


def _enable(folder: Path) -> None:
    """Let groups below a folder of version 2 have limits."""
    enabled = (folder / "cgroup.subtree_control").read_text().split()
    if all(controller in enabled for controller in _NEEDED):
        return
    if str(os.getpid()) in (folder / "cgroup.procs").read_text().split():
        own = folder / "headway-service"
        own.mkdir(exist_ok=True)
        (own / "cgroup.procs").write_text("0")
    (folder / "cgroup.subtree_control").write_text("+memory +pids")
