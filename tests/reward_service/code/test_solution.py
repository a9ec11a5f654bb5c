"""The harness as its processes find it: compiled for this Python, and readable by others."""

import subprocess
import sys
from pathlib import Path

import pytest

from reward_service.code.solution import load_harness
from reward_service.verifier.program import ExecutionConfig


@pytest.fixture
def harness(tmp_path: Path) -> Path:
    """A folder with its files."""
    for name, content in load_harness(ExecutionConfig()).files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def _imported(harness: Path) -> subprocess.CompletedProcess[str]:
    """A process that imports it where its sources have been spoiled, so that only what is compiled does."""
    for source in harness.glob("reward_service/code/inside/*.py"):
        source.write_text("raise SystemExit('read from its source')\n")
    imports = "import reward_service.code.inside.host as m; print(m.main.__code__.co_filename, m.main.__doc__)"
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = [{str(harness)!r}]; {imports}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_no_process_compiles_the_harness(harness: Path) -> None:
    ended = _imported(harness)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(f"{harness}/reward_service/code/inside/host.py The "), "with its own name and words"


def test_a_python_of_another_version_reads_the_sources(harness: Path) -> None:
    for compiled in harness.rglob("*.pyc"):
        compiled.write_bytes(b"\0\0\r\n" + compiled.read_bytes()[4:])

    assert "read from its source" in _imported(harness).stderr
