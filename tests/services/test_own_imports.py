"""A process some of whose packages are missing, or of another version."""

import gc
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.own_imports import own_imports
from tests.e2e.processes import ROOT


def test_an_import_that_fails_ends_the_process_for_good_with_a_sentence(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended, own_imports("generator"):
        importlib.import_module("no_such_package")
    assert ended.value.code == 78
    (said,) = caplog.messages
    assert "generator cannot be loaded: No module named 'no_such_package'" in said
    assert "requirements/cpu.lock" in said


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_after_the_imports_as_before_them(*, collects: bool) -> None:
    if not collects:
        gc.disable()
    try:
        with own_imports("generator"):
            assert not gc.isenabled()
        assert gc.isenabled() is collects
        with pytest.raises(SystemExit), own_imports("generator"):
            importlib.import_module("no_such_package")
        assert gc.isenabled() is collects
    finally:
        gc.enable()


@pytest.mark.parametrize(("process", "package"), [("generator", "vllm"), ("learner", "deepspeed")])
def test_a_process_whose_package_is_of_another_version_is_not_started_again(
    tmp_path: Path, process: str, package: str
) -> None:
    (tmp_path / "packages" / package).mkdir(parents=True)
    (tmp_path / "packages" / package / "__init__.py").write_text("__version__ = '0.0.1'\n", encoding="utf-8")
    program = f"from {process}.command import main; main()"
    command = [sys.executable, "-c", program, "--config", str(ROOT / "examples/addition/run.toml")]
    path = os.pathsep.join([str(tmp_path / "packages"), str(ROOT)])
    words = ["--run.directory", str(tmp_path)] if process == "learner" else []
    ended = subprocess.run(
        [*command, *words], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 78, ended.stderr
    assert f"{process} cannot be loaded: " in ended.stderr
