"""The walls of a sandbox: the command line and options of bubblewrap.

Bubblewrap is started by its keeper with an empty environment and never as root, which two holes are closed by: the
environment of the first process, and `/proc/sys`, which root could write. See `keeper` for the descriptors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reward_service.sandbox.interior import FIRST_MODULE, Interior
from reward_service.sandbox.keeper import DISK_BYTES

WORK_FOLDER = "/tmp/work"
SEARCH_PATH = "/opt/python/bin:/usr/bin:/bin"

# As a program sees itself, whatever user the service gave it.
_NOBODY = "65534"

_DEVICES = ("null", "zero", "full", "random", "urandom")

# Descriptors that the keeper places behind stdin, stdout, stderr, command and ready.
_INFO, _OPTIONS, _FILTER = 5, 6, 7


@dataclass(frozen=True, kw_only=True)
class Walls:
    """The command that the keeper runs, the options that it hands over in memory, and what every program sees of an
    environment, beside its HOME and what it brings itself.
    """

    command: Sequence[str]
    options: Sequence[str]
    environment: Mapping[str, str]


def build_walls(*, bubblewrap: str, interior: Interior) -> Walls:
    """The sandbox with that interior."""
    environment = {"PATH": SEARCH_PATH, "LANG": "C.UTF-8", **interior.environment}
    start = f"import {FIRST_MODULE}; {FIRST_MODULE}.main()"
    command = [bubblewrap, "--args", str(_OPTIONS), "--", interior.python.executable, "-c", start, WORK_FOLDER]
    options = [*_namespaces(), *_system(), *_writable(), *_bound(interior), *_sealed()]
    options += ["--info-fd", str(_INFO), "--seccomp", str(_FILTER), "--chdir", "/", "--clearenv"]
    for name, value in environment.items():
        options += ["--setenv", name, value]
    return Walls(command=command, options=options, environment=environment)


def _namespaces() -> list[str]:
    options = [f"--unshare-{kind}" for kind in ("user", "pid", "net", "ipc", "uts")]
    options += ["--disable-userns", "--die-with-parent", "--new-session"]
    return [*options, "--uid", _NOBODY, "--gid", _NOBODY, "--cap-drop", "ALL"]


def _system() -> list[str]:
    options = ["--ro-bind", "/usr", "/usr"]
    for name in ("lib", "lib64", "bin"):
        options += ["--symlink", f"usr/{name}", f"/{name}"]
    # In containers the service itself is there.
    return [*options, "--tmpfs", "/usr/local", "--proc", "/proc"]


def _bound(interior: Interior) -> list[str]:
    return [part for folder in interior.folders for part in ("--ro-bind", str(folder.host), folder.inside)]


def _writable() -> list[str]:
    """One tmpfs with a size, at /tmp, is all that can be written; the shared memory of /dev/shm is in it."""
    options = ["--dir", "/dev", "--symlink", "/proc/self/fd", "/dev/fd", "--symlink", "/tmp/shm", "/dev/shm"]
    for place, name in enumerate(("stdin", "stdout", "stderr")):
        options += ["--symlink", f"/proc/self/fd/{place}", f"/dev/{name}"]
    for name in _DEVICES:
        options += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    return [*options, "--size", DISK_BYTES, "--tmpfs", "/tmp", "--dir", "/tmp/shm"]


def _sealed() -> list[str]:
    """Nothing more is made in what was needed to hang the folders on."""
    return ["--remount-ro", "/usr/local", "--remount-ro", "/"]
