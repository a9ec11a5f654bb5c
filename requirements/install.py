"""Installs a lock file into the environment of the Python that runs this: `python install.py LOCK [--without NAMES]`.

NAMES is a file of packages that are left out, one a line.

The lock's CPU build of PyTorch (`torch==…+cpu`) is not on PyPI. The package index is asked as pip is configured
first; where that has no such build, PyTorch's own index of CPU wheels is asked, too. HEADWAY_TORCH_INDEX names another,
a mirror or a local folder in the layout of PEP 503.

uv is used where it is on the path, since it is faster; where it fails, pip says what is wrong.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_NO_TORCH = re.compile(r"No matching distribution found for torch\b|[Nn]o version of torch\b|torch was not found")


def main(arguments: Sequence[str]) -> int:
    """Exit status 0 if everything is installed; 1 if not, with the installer's own words on stderr."""
    lock = Path(arguments[0])
    if arguments[1:2] == ["--without"]:
        with tempfile.TemporaryDirectory() as folder:
            rest = Path(folder) / lock.name
            rest.write_text(without(lock, Path(arguments[2])), encoding="utf-8")
            return main([str(rest)])
    if shutil.which("uv") and not _uv(lock):
        return 0
    failure = _pip(lock)
    index = os.environ.get("HEADWAY_TORCH_INDEX") or TORCH_INDEX
    if _NO_TORCH.search(failure):
        print(f"setup: pip as it is configured has no CPU build of PyTorch: asking {index}, too", flush=True)
        failure = _pip(lock, "--extra-index-url", index)
    if not failure:
        return 0
    print(failure, file=sys.stderr, end="")
    if _NO_TORCH.search(failure):
        print(_without_torch(lock, index), file=sys.stderr)
    return 1


def without(lock: Path, names: Path) -> str:
    """The lock's lines but for those of packages that a file names."""
    left_out = {line.strip() for line in names.read_text(encoding="utf-8").splitlines() if not line.startswith("#")}
    lines = lock.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if line.partition("==")[0] not in left_out)


def _uv(lock: Path) -> str:
    """Runs uv; returns what it says if it fails. It reads none of pip's configuration but the folder of wheels in
    the environment.
    """
    index = os.environ.get("HEADWAY_TORCH_INDEX") or TORCH_INDEX
    command = ["uv", "pip", "install", "--quiet", "--no-deps", "--python", sys.executable, "-r", str(lock)]
    # As pip does: otherwise the first import of a package compiles it, and prints what Python warns of in its source.
    command.append("--compile-bytecode")
    environment = dict(os.environ)
    if links := os.environ.get("PIP_FIND_LINKS"):
        environment.setdefault("UV_FIND_LINKS", links.replace(" ", ","))
    failure = _failure(command, environment)
    if _NO_TORCH.search(failure):
        command += ["--extra-index-url", index, "--index-strategy", "unsafe-best-match"]
        failure = _failure(command, environment)
    if failure:
        print("setup: uv could not install the lock file; pip tries", flush=True)
    return failure


def _pip(lock: Path, *options: str) -> str:
    """Runs pip; returns what it says if it fails."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-qq",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-compile",
        "-r",
        str(lock),
    ]
    failure = _failure([*command, *options], os.environ)
    if not failure and not os.environ.get("PIP_NO_COMPILE"):
        _compile()
    return failure


def _compile() -> None:
    """Compiles what is installed on all cores; pip does it on one, and takes as long for it as for all the rest.

    Files that cannot be compiled, such as templates, are nobody's fault. Left to the first import, Python would print
    what it warns of in the source of others.
    """
    command = [sys.executable, "-W", "ignore", "-m", "compileall", "-qq", "-j", "0", sysconfig.get_path("purelib")]
    subprocess.run(command, check=False)


def _failure(command: Sequence[str], environment: Mapping[str, str]) -> str:
    done = subprocess.run(command, env={**environment, "DS_BUILD_OPS": "0"}, stderr=subprocess.PIPE, text=True)
    return (done.stderr or f"{command[0]} ended with status {done.returncode}\n") if done.returncode else ""


def _without_torch(lock: Path, index: str) -> str:
    torch = next(line for line in lock.read_text(encoding="utf-8").splitlines() if line.startswith("torch=="))
    return (
        f"error: {index} has no {torch} for this Python and machine, nor has the configured index. "
        "Name one that has: make setup TORCH_INDEX=URL (a mirror of PyTorch's CPU wheels, or a folder's file:// URL)"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
