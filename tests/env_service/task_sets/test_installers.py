"""Programs that stand for installers install nothing, and hide no end of what they are asked to run."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from env_service.task_sets.installers import PROGRAMS, stand_ins

Shell = Callable[..., subprocess.CompletedProcess[str]]

# An image's python3, which says what it was asked.
OWN_PYTHON = '#!/bin/sh\necho "python3 $*"; [ "$1" != - ] || cat; [ "$3" != show ] || exit 5\n'


@pytest.fixture
def sh(tmp_path: Path) -> Shell:
    """Runs a script in an empty folder, with the programs before those of an image; gives its end."""
    programs, image, work = tmp_path / "programs", tmp_path / "image", tmp_path / "work"
    for folder in (programs, image, work):
        folder.mkdir()
    for path, file in stand_ins("/home/agent").items():
        if path.startswith(PROGRAMS):
            made = programs / path.rpartition("/")[2]
            made.write_text(file.content.decode().replace(PROGRAMS, str(programs)))
            made.chmod(0o755)
    (image / "python3").write_text(OWN_PYTHON)
    (image / "python3").chmod(0o755)

    def run(script: str, path: str = f"{programs}:{image}:/usr/bin:/bin") -> subprocess.CompletedProcess[str]:
        environment = {"PATH": path.replace("PROGRAMS", str(programs))}
        return subprocess.run(
            ["/bin/sh", "-c", script], cwd=work, env=environment, capture_output=True, text=True, timeout=20
        )

    return run


@pytest.mark.parametrize(
    "script",
    [
        "apt-get install -y curl",
        "apt update",
        "pip install pytest==8.4.1",
        "pip3 -q install -r /app/requirements.txt",
        "uv pip install --system -c /c.txt pytest",
        "uv init && uv add pytest && uv sync && uv cache clean",
        "uv -q tool install pytest",
        "uv python install 3.13",
        "uv --version",
        "curl -LsSf https://astral.sh/uv/install.sh | sh",
    ],
)
def test_what_installs_does_nothing_and_ends_well(sh: Shell, script: str) -> None:
    assert (sh(script).returncode, sh(script).stdout.partition("python3")[1]) == (0, "")


@pytest.mark.parametrize(
    "script",
    [
        "uv run false",
        "uv --quiet run false",
        "uv --cache-dir /c --offline run --with pytest -- false",
        "uv run --directory /nowhere true",
        "uv --directory /nowhere run true",
        "uv tool run --python-preference system false",
        "uvx --index-strategy unsafe-best-match --from pkg false==1.0",
        "uvx --with pytest",
        "uv run",
        "uv pip show nothing",
        "uv lock --check",
        "uv build",
        "uv tool dir",
        "uv",
    ],
)
def test_what_is_run_or_not_known_does_not_end_well_by_itself(sh: Shell, script: str) -> None:
    assert sh(script).returncode != 0


def test_a_program_runs_where_and_on_what_it_is_asked_to(sh: Shell) -> None:
    assert sh("mkdir sub; uv run --directory sub pwd").stdout.endswith("/work/sub\n")
    assert sh("echo text | uv run -").stdout == "python3 -\ntext\n"
    assert sh("uv run a.py b").stdout == "python3 a.py b\n"
    assert sh("uv run -m pytest -x").stdout == "python3 -m pytest -x\n"
    assert sh("uvx --from a echo@1 b").stdout == "b\n"


@pytest.mark.skipif(Path("/usr/bin/python").exists() or Path("/usr/bin/pytest").exists(), reason="they are found")
def test_python_and_pytest_are_those_of_the_image_by_whatever_name(sh: Shell) -> None:
    assert sh("uv run python -c x").stdout == "python3 -c x\n"
    assert sh("uvx pytest==8 -x").stdout == "python3 -m pytest -x\n"


@pytest.mark.parametrize("what", [".", "-e .", "./a", "/app", "'.[dev]'", "a-1.0-py3-none-any.whl"])
def test_packages_that_are_here_are_installed_by_the_images_own_pip(sh: Shell, what: str) -> None:
    said = f"python3 -m pip install {what.replace(chr(39), '')} --no-index --no-deps --no-build-isolation\n"
    assert sh(f"pip install {what}").stdout == said
    assert sh(f"uv pip install --system {what}").stdout == said


def test_what_pip_does_without_a_network_is_done(sh: Shell) -> None:
    assert sh("pip uninstall -y a").stdout == "python3 -m pip uninstall -y a\n"
    assert sh("uv venv && echo kept > .venv/bin/activate && uv venv && cat .venv/bin/activate").stdout == "kept\n"


@pytest.mark.parametrize(
    "path", ["PROGRAMS:IMAGE", "IMAGE:PROGRAMS", "IMAGE:PROGRAMS:IMAGE", "PROGRAMS:PROGRAMS:IMAGE"]
)
def test_other_fetches_are_never_made_by_what_lies_in_the_folder(sh: Shell, tmp_path: Path, path: str) -> None:
    (tmp_path / "work/curl").write_text("#!/bin/sh\necho planted\n")
    (tmp_path / "work/curl").chmod(0o755)
    (tmp_path / "image/basename").symlink_to("/usr/bin/basename")

    ended = sh("curl http://x", path.replace("IMAGE", str(tmp_path / "image")))

    assert (ended.returncode, ended.stdout) == (127, "")
    (tmp_path / "image/curl").write_text('#!/bin/sh\necho "the image\'s $*"\n')
    (tmp_path / "image/curl").chmod(0o755)
    assert sh("curl http://x", path.replace("IMAGE", str(tmp_path / "image"))).stdout == "the image's http://x\n"


def test_the_installer_of_uv_leaves_what_is_called_by_its_place() -> None:
    files = stand_ins("/home/me")

    for home in ("/home/me", "/root"):
        assert {f"{home}/.local/bin/{name}" for name in ("env", "uv", "uvx")} <= files.keys()
        assert files[f"{home}/.local/bin/uvx"].content == files[f"{PROGRAMS}/uvx"].content
