"""A process in control groups of a test's own folder."""

from pathlib import Path


def process_in(folder: Path, *, cgroup: str, mountinfo: str) -> Path:
    """The folder of /proc of a process in such groups, of such mounts."""
    folder.mkdir(exist_ok=True)
    (folder / "cgroup").write_text(cgroup)
    (folder / "mountinfo").write_text(mountinfo)
    return folder


def mounted(controller: str, *, root: str = "/", place: str | Path | None = None) -> str:
    """A line of mountinfo: the tree of a controller of version 1, or for '' that of version 2, from `root` on."""
    kind = "cgroup2" if controller == "" else "cgroup"
    at = place or f"/sys/fs/cgroup/{controller}".rstrip("/")
    return f"31 23 0:26 {root} {at} ro,nosuid - {kind} cgroup rw,{controller}\n"


def process_in_container(folder: Path, *, controller: str) -> Path:
    """A process in the group /one/two of a controller, whose tree is at `folder`/groups from the root on."""
    (folder / "groups" / "one" / "two").mkdir(parents=True, exist_ok=True)
    return process_in(
        folder / "process",
        cgroup=f"4:{controller}:/one/two\n",
        mountinfo=mounted(controller, place=folder / "groups"),
    )
