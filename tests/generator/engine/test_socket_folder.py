import os
import tempfile
from pathlib import Path

import pytest

from generator.engine.socket_folder import make_socket_folder, remove_socket_folder

VARIABLE = "VLLM_RPC_BASE_PATH"
NOBODY = 2**22 + 1
"""More than there are processes."""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    return tmp_path


def test_sockets_lie_in_a_folder_that_goes_with_the_process(temporary: Path) -> None:
    make_socket_folder()
    folder = Path(os.environ[VARIABLE])
    assert folder == temporary / f"headway-engine-{os.getpid()}"
    (folder / "socket").touch()
    make_socket_folder()
    assert (folder / "socket").exists(), "a second engine of this process shares it"
    remove_socket_folder()
    assert list(temporary.iterdir()) == []


def test_a_folder_that_the_user_has_named_is_left_alone(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/somewhere")
    make_socket_folder()
    assert list(temporary.iterdir()) == []
    assert os.environ[VARIABLE] == "/somewhere"


def test_what_killed_processes_have_left_is_removed_and_nothing_else(temporary: Path) -> None:
    left, young, alive = (temporary / f"headway-engine-{number}" for number in (NOBODY, NOBODY + 1, os.getppid()))
    for folder in (left, young, alive, temporary / "headway-engine-notes"):
        folder.mkdir()
    for folder in (left, alive, temporary / "headway-engine-notes"):
        os.utime(folder, (1, 1))
    make_socket_folder()
    assert not left.exists()
    assert young.exists()
    assert alive.exists()
    assert (temporary / "headway-engine-notes").exists()
