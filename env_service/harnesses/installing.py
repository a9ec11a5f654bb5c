"""Virtual environments of harnesses, each with the packages that are pinned for it.

    env-service harness list
    env-service harness install NAME…            # or `all`
    env-service harness install NAME --folder harnesses --python python3.12

Packages come by pip as it is configured. What is there already, with these very packages, stays as it is.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO, cast

from env_service.harnesses.catalog import HARNESSES, HarnessName, python_of

_FOLDER = Path("harnesses")
_PINNED = "pinned.txt"
"""In a virtual environment that is complete: what was installed."""
_LAST_WORDS = 2000


class HarnessInstallFault(Exception):
    """A virtual environment cannot be made; the text says why."""


def main(words: Sequence[str], *, out: TextIO = sys.stdout) -> int:
    """Run the command; the exit code is 0, or 2 for what cannot be installed."""
    parser = argparse.ArgumentParser(
        prog="env-service",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("group", choices=("harness",))
    parser.add_argument("command", choices=("list", "install"))
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--folder", type=Path, default=_FOLDER)
    parser.add_argument("--python", default=sys.executable)
    given = parser.parse_args(words)
    if given.command == "list":
        for name in HARNESSES:
            out.write(f"{name:<16} {version_of(name):<10} {_state_of(name, given.folder)}\n")
        return 0
    known = ", ".join(HARNESSES)
    if strange := [name for name in given.names if name not in (*HARNESSES, "all")]:
        parser.error(f"install: {strange[0]!r} is no harness that is known; expected {known}, or all")
    names = list(HARNESSES) if "all" in given.names else cast("list[HarnessName]", given.names)
    if not names:
        parser.error(f"install: name a harness: {known}, or all")
    try:
        for name in dict.fromkeys(names):
            out.write(f"{name} {version_of(name)}: {install(name, folder=given.folder, python=given.python)}\n")
            out.flush()
    except HarnessInstallFault as fault:
        sys.stderr.write(f"env-service: {fault}\n")
        return 2
    return 0


def version_of(name: HarnessName) -> str:
    """The version of a harness that is pinned."""
    return HARNESSES[name].lock.with_suffix(".in").read_text(encoding="utf-8").strip().partition("==")[2]


def is_installed(name: HarnessName, *, folder: Path) -> bool:
    """True if it is there whole, with the packages that are pinned now."""
    mark = folder / name / _PINNED
    return mark.exists() and mark.read_bytes() == HARNESSES[name].lock.read_bytes()


def install(name: HarnessName, *, folder: Path, python: str = sys.executable) -> Path:
    """Make a harness's virtual environment if it is not there; its Python. Raises HarnessInstallFault."""
    made, lock = folder / name, HARNESSES[name].lock
    interpreter = python_of(name, installed=folder)
    if is_installed(name, folder=folder):
        return interpreter
    shutil.rmtree(made, ignore_errors=True)
    _run(name, [python, "-m", "venv", str(made)])
    _run(name, [str(interpreter), "-m", "pip", "install", "-q", "--disable-pip-version-check", "-r", str(lock)])
    (made / _PINNED).write_bytes(lock.read_bytes())
    return interpreter


def _state_of(name: HarnessName, folder: Path) -> str:
    if is_installed(name, folder=folder):
        return f"installed in {folder / name}"
    return (
        "not installed" if not (folder / name / _PINNED).exists() else "installed in other versions: install it again"
    )


def _run(name: HarnessName, command: list[str]) -> None:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise HarnessInstallFault(f"{name}: {command[0]} cannot be started: {error}") from error
    if ended.returncode:
        said = (ended.stderr or ended.stdout).strip()[-_LAST_WORDS:]
        raise HarnessInstallFault(f"{name}: {' '.join(command[:4])} failed: {said or 'it said nothing'}")
