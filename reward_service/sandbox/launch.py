"""Launches sandboxes on this machine: bubblewrap, its options, and the service's folder in the temporary directory.

Bubblewrap is started by its keeper with an empty environment and never as root, which two holes are closed by: the
environment of the first process, and `/proc/sys`, which root could write. See `keeper` for the descriptors.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

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
from services.isolation import seccomp
from services.isolation.bubblewrap import DEVICES, bubblewrap_for, may_mount, namespaces, reaches
from services.isolation.owners import Owner
from services.isolation.staging import staging_folder

WORK_FOLDER = "/tmp/work"
SEARCH_PATH = "/opt/python/bin:/usr/bin:/bin"
# As a program sees itself, whatever user the service gave it.
_NOBODY = "65534"
# Descriptors that the keeper places behind stdin, stdout, stderr, command and ready.
_INFO, _OPTIONS, _FILTER = 5, 6, 7
WITHOUT = "if no verifier runs code, say sandbox = 'off'"
_SYSTEM_PYTHON = Path("/usr/bin/python3")


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
    options = [*namespaces(user=_NOBODY), *_system(), *_writable(), *_bound(interior), *_sealed()]
    options += ["--info-fd", str(_INFO), "--seccomp", str(_FILTER), "--chdir", "/", "--clearenv"]
    for name, value in environment.items():
        options += ["--setenv", name, value]
    return Walls(command=command, options=options, environment=environment)


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
    for name in DEVICES:
        options += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    return [*options, "--size", DISK_BYTES, "--tmpfs", "/tmp", "--dir", "/tmp/shm"]


def _sealed() -> list[str]:
    """Nothing more is made in what was needed to hang the folders on."""
    return ["--remount-ro", "/usr/local", "--remount-ro", "/"]


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
        walls = build_walls(
            bubblewrap=bubblewrap_for(folder, uid=uid, otherwise=WITHOUT), interior=reachable, mark=Owner.this().mark
        )
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
        if reaches(wanted.host, uid=uid):
            folders.append(wanted)
            continue
        place = folder / f"mount-{number}"
        place.mkdir()
        folders.append(replace(wanted, host=place))
        mounts.append((str(wanted.host), str(place)))
    return replace(inside, folders=folders), mounts


def _python(config: ExecutionConfig, *, uid: int | None) -> Python:
    if config.python is not None:
        return find_python(config.python)
    own = own_python()
    if reaches(own.prefix, uid=uid) or may_mount():
        return own
    if _SYSTEM_PYTHON.exists():
        return find_python(_SYSTEM_PYTHON)
    raise UserError(
        f"programs need a Python that user {uid} can read, and {own.prefix} is not one: set execution.python"
    )
