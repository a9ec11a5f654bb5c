"""Virtual environments of other people's packages, which cannot share ours: made once, and kept in the user's cache."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import pytest

_INSTALL_S = 60


def python_with(package: str, version: str) -> Path:
    """The interpreter of an environment that has the package. Skips the test if it cannot be made within a minute."""
    python, problem = _made(package, version)
    if problem:
        pytest.skip(f"needs an environment with {package} {version}, which cannot be made: {problem}")
    return python


@lru_cache
def _made(package: str, version: str) -> tuple[Path, str]:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "headway" / "environments"
    folder = cache / f"{package}-{version}"
    python, whole = folder / "bin" / "python", folder / "is-whole"
    if whole.exists():
        return python, ""
    shutil.rmtree(folder, ignore_errors=True)
    make: list[str | Path] = [sys.executable, "-m", "venv", folder]
    install: list[str | Path] = [python, "-m", "pip", "install", "-q", "--no-compile"]
    if uv := shutil.which("uv"):
        make = [uv, "venv", "-q", "--python", sys.executable, folder]
        install = [uv, "pip", "install", "-q", "--python", python]
    try:
        for command in (make, [*install, f"{package}=={version}"]):
            subprocess.run(command, check=True, timeout=_INSTALL_S, capture_output=True)
    except subprocess.TimeoutExpired:
        return python, f"the installation took more than {_INSTALL_S} s"
    except (subprocess.CalledProcessError, OSError) as error:
        said = getattr(error, "stderr", b"") or b""
        return python, (said.decode(errors="replace").strip() or str(error))[-300:]
    whole.touch()
    return python, ""


@contextmanager
def running(python: Path, *command: object) -> Iterator["subprocess.Popen[bytes]"]:
    """A program of such an environment, which does not see our packages; killed at the end."""
    environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(Path.home())}
    words: Sequence[str] = [str(python), *map(str, command)]
    with subprocess.Popen(words, env=environment, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
