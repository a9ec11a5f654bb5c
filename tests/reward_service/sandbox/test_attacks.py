"""Every attack fails: as root's child, as an unprivileged user, and with eight at once."""

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.reward_service.sandbox.attacks import ATTACKS

HERE = Path(__file__).parent
NOBODY = "65534"
ROOT, UNPRIVILEGED, EIGHT = "as root's child", "as an unprivileged user", "with eight at once"

# What the attacks of a mode got, by attack.
Outcomes = Callable[[str], dict[str, list[str]]]

# Each mode runs all attacks once, at its first test.
pytestmark = pytest.mark.timeout(3000)


@pytest.fixture(scope="session")
def cgroup() -> Iterator[str]:
    """A folder for groups of these tests, where they may make one; elsewhere what the service finds."""
    folders = [
        Path("/sys/fs/cgroup") / controller / f"headway-tests-{os.getpid()}" for controller in ("memory", "pids")
    ]
    try:
        for folder in folders:
            folder.mkdir()
    except OSError:
        yield "auto"
        return
    try:
        yield str(Path("/sys/fs/cgroup/*") / folders[0].name)
    finally:
        left = [path for folder in folders for path in folder.glob("headway*")]
        for folder in folders:
            folder.rmdir()
        assert not left


@pytest.fixture(scope="session")
def attacked(cgroup: str) -> Iterator[Outcomes]:
    """Gains of the attacks, in each mode."""
    folder = tempfile.mkdtemp(prefix="headway-attacks-", dir="/tmp")
    os.chmod(folder, 0o777)

    @functools.cache
    def ended(mode: str) -> subprocess.CompletedProcess[str]:
        return _attack(mode, cgroup=cgroup, folder=folder)

    def of(mode: str) -> dict[str, list[str]]:
        assert ended(mode).returncode == 0, ended(mode).stderr
        found: dict[str, list[str]] = json.loads(ended(mode).stdout)
        return found

    yield of
    shutil.rmtree(folder)


def _attack(mode: str, *, cgroup: str, folder: str) -> subprocess.CompletedProcess[str]:
    if mode == ROOT and os.geteuid() != 0:
        pytest.skip("only root has children under other users")
    command, path = [sys.executable], list(sys.path)
    if mode == UNPRIVILEGED and os.geteuid() == 0:
        command, cgroup = _as_nobody(), "auto"
        path = [entry for entry in path if not entry.startswith(sys.base_prefix)]
    return subprocess.run(
        [*command, "-B", str(HERE / "attacker.py"), "8" if mode == EIGHT else "1", cgroup],
        env={"PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, path)]), "PATH": os.defpath, "TMPDIR": folder},
        capture_output=True,
        text=True,
        timeout=2900,
        check=False,
    )


def _as_nobody() -> list[str]:
    """A command that runs this version of Python as nobody, who often cannot read root's own."""
    setpriv = shutil.which("setpriv")
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for python in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        command = [setpriv or "", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", python]
        again = "import subprocess, sys; subprocess.run([sys.executable, '-c', ''], check=True)"
        if setpriv and subprocess.run([*command, "-c", again], capture_output=True, check=False).returncode == 0:
            return command
    pytest.skip(f"there is no setpriv, or no {version} that nobody can run")


@pytest.mark.parametrize("mode", [ROOT, UNPRIVILEGED, EIGHT])
@pytest.mark.parametrize("attack", [*ATTACKS, "what is left"])
def test_it_fails(attacked: Outcomes, attack: str, mode: str) -> None:
    assert attacked(mode)[attack] == []
