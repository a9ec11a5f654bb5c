"""Packages inside a sandbox come compiled as they are in the service's own Python, and never by an older source."""

import importlib.util
import os
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

from reward_service.sandbox.python_inside import own_python, stage

SOURCE = "WORD = 'source'\nclass Thing:\n    def where(self):\n        return self.where.__code__.co_filename\n"


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of a distribution `thing`, which stands installed, and of which other bytecode was made."""
    installed = tmp_path / "installed"
    (installed / "thing-1.dist-info").mkdir(parents=True)
    (installed / "thing-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: thing\nVersion: 1\n")
    (installed / "thing-1.dist-info/RECORD").write_text("thing.py,,\nthing-1.dist-info/METADATA,,\n")
    module = installed / "thing.py"
    module.write_text(SOURCE.replace("source", "stored"))
    os.utime(module, (1e9, 1e9))
    py_compile.compile(str(module), doraise=True)
    module.write_text(SOURCE)  # as long, and of the same second: nobody sees that the bytecode is of another one
    os.utime(module, (1e9, 1e9))
    monkeypatch.syspath_prepend(str(installed))
    return module


def _said(staged: Path) -> list[str]:
    """The word of the staged module, and the path that its code has, in a Python that can compile nothing."""
    source = "import sys; sys.path.insert(0, sys.argv[1]); import thing; print(thing.WORD, thing.Thing().where())"
    command = [sys.executable, "-B", "-I", "-c", source, str(staged)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()


def test_what_is_compiled_already_is_not_compiled_again_and_knows_its_new_place(
    distribution: Path, tmp_path: Path
) -> None:
    staged = tmp_path / "staged"
    staged.mkdir()
    stage(into=staged, python=own_python(), packages=("thing",))

    assert _said(staged) == ["stored", str(staged / "thing.py")]


@pytest.mark.parametrize("change", ["newer", "no bytecode", "another Python's"])
def test_what_is_not_compiled_or_was_by_an_older_source_is_compiled(
    distribution: Path, tmp_path: Path, change: str
) -> None:
    compiled = Path(importlib.util.cache_from_source(str(distribution)))
    if change == "newer":
        os.utime(distribution, (2e9, 2e9))
    elif change == "no bytecode":
        compiled.unlink()
    else:
        compiled.write_bytes(b"\0\0\r\n" + compiled.read_bytes()[4:])
    staged = tmp_path / "staged"
    staged.mkdir()
    stage(into=staged, python=own_python(), packages=("thing",))

    assert _said(staged) == ["source", str(staged / "thing.py")]
    assert Path(importlib.util.cache_from_source(str(staged / "thing.py"))).read_bytes()[:4] == (
        importlib.util.MAGIC_NUMBER
    )
