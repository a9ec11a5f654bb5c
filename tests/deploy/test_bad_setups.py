"""Messages of a wrong set-up, as containers show them: one line that says what is wrong, and what to do."""

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.processes import script

RUN = """\
[learner]
model = "model"
algo = "grpo"
[generator]
model = "model"
[reward-service]
sandbox = "off"
"""
NO_GPU = (
    "{0}: {0}: devices: got 0: this process sees 0 GPUs; expected an NVIDIA GPU: give the container one "
    "(nvidia-container-toolkit), load the driver, or leave devices out to use the CPU\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RUN, encoding="utf-8")
    (tmp_path / "model").mkdir()
    return tmp_path


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


def _started(folder: Path, process: str, *options: str) -> tuple[int, str]:
    """Its exit code, and what it wrote on stderr."""
    done = subprocess.run(
        [script(process), "--config", "run.toml", *options],
        cwd=folder, capture_output=True, text=True, timeout=240, env={"PATH": "/usr/bin:/bin", "HOME": str(folder)},
    )  # fmt: skip
    return done.returncode, done.stderr


def test_a_port_that_is_taken_is_named_with_the_settings_that_change_it(folder: Path, taken_port: int) -> None:
    code, text = _started(folder, "reward-service", "--http.port", str(taken_port))
    assert code == 1
    (line,) = text.splitlines()
    assert f"cannot listen on 127.0.0.1:{taken_port}: Address already in use" in line
    assert "set another http.host or http.port, or stop what listens there" in line


def test_a_secret_that_is_not_mounted_is_named_with_its_setting(folder: Path) -> None:
    code, text = _started(folder, "reward-service", "--http.token-file", str(folder / "none"))
    expected = f"cannot read {folder / 'none'}: No such file or directory\n"
    assert (code, text) == (2, f"reward-service: command line --http.token-file: {expected}")


@pytest.mark.parametrize("process", ["learner", "generator"])
@pytest.mark.skipif(Path("/proc/driver/nvidia/gpus").is_dir(), reason="there are GPUs here")
def test_a_gpu_that_the_container_was_not_given_is_missed_before_anything_is_loaded(folder: Path, process: str) -> None:
    assert _started(folder, process, "--devices", "0") == (2, NO_GPU.format(process))
