"""Control groups that this process is in, on a host, in a container or in a job of Slurm, of both versions."""

import contextlib
from pathlib import Path

_PROCESS = Path("/proc/self")


def own_groups(process: Path = _PROCESS) -> dict[str, Path]:
    """The folder of the group that a process is in, by controller; of version 2 under ''."""
    mounts = _mounts(process)
    return {
        controller: mounts[controller][1] / below
        for controller, path in _paths(process)
        if controller in mounts and (below := _below(path, mounts[controller][0])) is not None
    }


def enclosing_groups(controller: str, process: Path = _PROCESS) -> list[Path]:
    """Folders of all groups that bound a process, its own first: those of this controller and those of version 2, as
    far as they can be seen. A group that lies beyond what is mounted is taken for the mounted root. None where there
    are no such groups.
    """
    folders = []
    with contextlib.suppress(OSError):
        mounts = _mounts(process)
        for name, path in _paths(process):
            if name in (controller, "") and name in mounts:
                root, place = mounts[name]
                below = _below(path, root) or Path()
                folders += [place / part for part in (below, *below.parents)]
    return list(dict.fromkeys(folders))


def _paths(process: Path) -> list[tuple[str, str]]:
    """Each controller's name, and the path of the process's group in that tree."""
    lines = (line.split(":", 2) for line in (process / "cgroup").read_text(encoding="utf-8").splitlines())
    return [(controller, path) for _, controllers, path in lines for controller in controllers.split(",")]


def _below(path: str, root: str) -> Path | None:
    """The group `path` as seen from a mount of the tree from `root` on; None if it is not in that part.

    In a container the process's own group may be the mounted root itself, or, of another namespace, beyond it.
    """
    within, whole = Path("/", root), Path(path)
    return whole.relative_to(within) if whole.is_relative_to(within) and ".." not in whole.parts else None


def _mounts(process: Path) -> dict[str, tuple[str, Path]]:
    """Mount of each controller's tree, and the part of the tree that is mounted."""
    mounts = {}
    for line in (process / "mountinfo").read_text(encoding="utf-8").splitlines():
        front, _, back = line.partition(" - ")
        kind, _, options = back.split(" ", 2)
        root, place = front.split(" ")[3:5]
        if kind == "cgroup2":
            mounts[""] = ("" if root == "/" else root, Path(place))
        elif kind == "cgroup":
            for option in options.split(" ")[-1].split(","):
                mounts[option] = ("" if root == "/" else root, Path(place))
    return mounts
