"""`env-service harness`: what is installed where, and what is refused."""

import io
import shutil
import sys
from pathlib import Path

import pytest

from env_service.harnesses import installing
from env_service.harnesses.catalog import HARNESSES


def listed(folder: Path) -> dict[str, str]:
    said = io.StringIO()
    assert installing.main(["harness", "list", "--folder", str(folder)], out=said) == 0
    return {line.split()[0]: line for line in said.getvalue().splitlines()}


def test_the_list_tells_what_is_installed_and_in_which_versions(tmp_path: Path) -> None:
    for name in ("anthropic", "smolagents"):
        (tmp_path / name).mkdir()
        shutil.copy(HARNESSES[name].lock, tmp_path / name / "pinned.txt")
    (tmp_path / "smolagents" / "pinned.txt").write_text("smolagents==0.1\n")
    lines = listed(tmp_path)

    assert lines.keys() == HARNESSES.keys()
    assert "2.10.0" in lines["anthropic"]
    assert f"installed in {tmp_path}" in lines["anthropic"]
    assert "installed in other versions: install it again" in lines["smolagents"]
    assert "not installed" in lines["mini-swe-agent"]


def test_what_is_installed_already_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "anthropic").mkdir()
    shutil.copy(HARNESSES["anthropic"].lock, tmp_path / "anthropic" / "pinned.txt")

    python = installing.install("anthropic", folder=tmp_path, python="/no/such/python")

    assert python == tmp_path / "anthropic" / "bin" / "python"


def test_an_environment_that_cannot_be_made_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["harness", "install", "anthropic", "--folder", str(tmp_path), "--python", "/no/such/python"]
    assert installing.main(words) == 2
    assert "anthropic: /no/such/python cannot be started" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    words = ["harness", "install", "anthropic", "--folder", str(tmp_path / "file"), "--python", sys.executable]
    assert installing.main(words) == 2
    assert "anthropic: " in capsys.readouterr().err


def test_a_harness_that_is_not_known_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in ((["smol"], "'smol' is no harness that is known"), ([], "name a harness: mini-swe-agent")):
        with pytest.raises(SystemExit):
            installing.main(["harness", "install", *words])
        assert said in capsys.readouterr().err
