"""The Python inside a sandbox, as programs find it: which one, which packages, and where in the host those are.

The service's own Python is used by its base prefix, which is bound at /opt/python: its own site-packages, where the
service's packages may be, are covered by a folder with the listed packages alone. A Python of the system (prefix /usr)
is used where it is, with that folder in /usr/local, whose own content is hidden.
"""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import reward_service.sandbox.first_process as first_process
from reward_service.verifier.submission import UserError

# The module that runs first inside; copied there from `inside.py`.
FIRST_MODULE = "headway_inside"

_PROBE = "import json, sys; print(json.dumps([sys.base_prefix, *sys.version_info[:2]]))"
_PROBE_S = 60.0
_OLDEST = (3, 9)


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder of the host that is seen inside, read-only."""

    host: Path
    inside: str


@dataclass(frozen=True, kw_only=True)
class Python:
    """The Python that programs run on: where it is in the host, and where inside."""

    prefix: Path
    version: tuple[int, int]

    @property
    def is_system(self) -> bool:
        """True if it is seen with /usr, and needs no folder of its own."""
        return self.prefix == Path("/usr")

    @property
    def name(self) -> str:
        """Of its executable and library folder."""
        return f"python{self.version[0]}.{self.version[1]}"

    @property
    def executable(self) -> str:
        """Its path inside."""
        return f"/usr/bin/{self.name}" if self.is_system else f"/opt/python/bin/{self.name}"

    @property
    def packages(self) -> str:
        """Folder in which it looks for packages, inside."""
        if self.is_system:
            return f"/usr/local/lib/{self.name}/dist-packages"
        return f"/opt/python/lib/{self.name}/site-packages"

    @property
    def host_executable(self) -> Path:
        """Its path in the host."""
        return self.prefix / "bin" / self.name


@dataclass(frozen=True, kw_only=True)
class Interior:
    """Everything inside that comes from the host, in the order in which it is put there."""

    python: Python
    folders: Sequence[Folder]
    environment: dict[str, str]


def own_python() -> Python:
    """The one that the service runs on."""
    return Python(prefix=Path(sys.base_prefix), version=sys.version_info[:2])


def find_python(path: Path) -> Python:
    """A Python of the operator's choice. Raises UserError if it does not run, or is too old."""
    try:
        told = subprocess.run([path, "-I", "-c", _PROBE], capture_output=True, timeout=_PROBE_S, check=True)
        prefix, major, minor = json.loads(told.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UserError(f"execution.python: {path} does not run as a Python: {error}; name another one") from error
    if (major, minor) < _OLDEST:
        raise UserError(f"execution.python: {path} is Python {major}.{minor}; programs need 3.9 or later")
    return Python(prefix=Path(prefix), version=(major, minor))


def stage(*, into: Path, python: Python, packages: Iterable[str]) -> None:
    """Copy what must be importable inside: the first process, and the listed distributions. Raises UserError."""
    source = first_process.__file__
    assert source is not None
    shutil.copyfile(source, into / f"{FIRST_MODULE}.py")
    for name in packages:
        _copy_distribution(name, into)
    # Inside nothing can be cached: what is not compiled here would be compiled by every program. What is compiled
    # already, for that Python and from that very source, is left as it is.
    subprocess.run(
        [python.host_executable, "-I", "-m", "compileall", "-q", str(into)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=600,
        check=False,
    )
    _make_readable(into)


def interior(*, python: Python, staged: Path, folders: Iterable[Path]) -> Interior:
    """The file system as it is seen inside."""
    found = [Folder(host=folder, inside=str(folder)) for folder in folders]
    environment = {}
    if not python.is_system:
        found.append(Folder(host=python.prefix, inside="/opt/python"))
        if any((python.prefix / "lib").glob("libpython*.so*")):
            environment["LD_LIBRARY_PATH"] = "/opt/python/lib"
    found.append(Folder(host=staged, inside=python.packages))
    return Interior(python=python, folders=found, environment=environment)


def _copy_distribution(name: str, into: Path) -> None:
    try:
        files = importlib.metadata.files(name)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f"execution.packages names {name!r}, which is not installed here: pip install it, or take it off the list"
        ) from None
    folders = set[Path]()
    for file in files or ():
        # Scripts lie outside of site-packages.
        if ".." in file.parts or file.suffix in (".pyc", ".pth") or file.is_absolute():
            continue
        copied = into / file
        if copied.parent not in folders:
            (copied.parent / "__pycache__").mkdir(parents=True, exist_ok=True)
            folders.add(copied.parent)
        source = str(file.locate())
        shutil.copyfile(source, copied)
        if file.suffix == ".py":
            _copy_compiled(source, str(copied))


def _copy_compiled(source: str, copied: str) -> None:
    """Copies what this Python has compiled of it. It is known as up to date by its source's time, and an import gives
    it the path of the copy.
    """
    at = os.stat(source)
    os.utime(copied, ns=(at.st_atime_ns, at.st_mtime_ns))
    with suppress(FileNotFoundError):
        shutil.copyfile(importlib.util.cache_from_source(source), importlib.util.cache_from_source(copied))


def _make_readable(folder: Path) -> None:
    for parent, folders, files in os.walk(folder):
        for name in folders:
            os.chmod(os.path.join(parent, name), 0o755)
        for name in files:
            os.chmod(os.path.join(parent, name), 0o644)
    folder.chmod(0o755)
