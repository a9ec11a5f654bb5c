"""Mistakes that a newcomer makes, and what `headway check` says of each: messages.txt, to be read as a text.

To write it anew: HEADWAY_WRITE_MESSAGES=1 pytest tests/headway/mistakes
"""

import importlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headway import checking
from headway import command as umbrella
from headway.doctor import before
from learner.algorithms.presets.registry import ALGORITHMS
from services.run_lock import RunLock
from tests.headway.mistakes.catalog import GOOD, MISTAKES, REWARD, RUN, Mistake
from tests.headway.mistakes.small_model import TEMPLATE, small_model

MESSAGES = Path(__file__).with_name("messages.txt")
WRITE = "HEADWAY_WRITE_MESSAGES" in os.environ
_NAMES = [mistake.name for mistake in MISTAKES]
_TITLE = "What `headway check` says of mistakes. To be read as a newcomer would."


def written() -> dict[str, str]:
    """The messages in messages.txt, by the mistake."""
    parts = re.split(r"^## (.*)\n", MESSAGES.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, tasks, a reward, and a machine of which all is known."""
    small_model(tmp_path / "model")
    small_model(tmp_path / "chat-model", template=TEMPLATE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(before, "available_memory", lambda: 20 << 30)
    monkeypatch.setattr(before, "usable_cores", lambda: 2)
    # Whatever runs on this machine meanwhile.
    monkeypatch.setattr(checking, "check_port", lambda what, host, port: before.good(what, host))
    return tmp_path


SAID: dict[str, str] = {}


def say(mistake: Mistake, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Checks the project with this mistake, and returns the output; the check must end with 2."""
    files = {"run.toml": mistake.run_file(), "tasks.jsonl": GOOD, "reward.py": REWARD, **mistake.files}
    for name, text in files.items():
        (project / name).write_text(text)
    for name in mistake.lacks:
        (project / name).unlink()
    for name, value in mistake.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["headway", "check", "run.toml", *mistake.words])
    with forgotten_modules(project), pytest.raises(SystemExit) as ended:
        umbrella.main()
    said = capsys.readouterr()
    assert ended.value.code == 2, said.out
    assert said.out == ""
    return said.err.replace(str(project), "/project").replace(", ".join(ALGORITHMS), "grpo, …, custom")


@contextmanager
def forgotten_modules(folder: Path) -> Iterator[None]:
    """Modules of the folder that are imported in it are imported anew the next time, and those of its names before."""
    importlib.invalidate_caches()
    for path in folder.glob("*.py"):
        sys.modules.pop(path.stem, None)
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


@pytest.mark.parametrize("mistake", MISTAKES, ids=_NAMES)
def test_a_mistake_is_named_before_anything_is_started(
    mistake: Mistake, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    SAID[mistake.name] = say(mistake, project, monkeypatch, capsys)

    if not WRITE:
        assert f"{mistake.shown()}\n{SAID[mistake.name]}".strip("\n") == written()[mistake.name].strip("\n")
    for part in mistake.names:
        assert part in SAID[mistake.name]


def test_the_messages_are_written_down_each_once() -> None:
    if WRITE:
        text = "".join(f"\n## {one.name}\n{one.shown()}\n{SAID[one.name]}\n" for one in MISTAKES if one.name in SAID)
        MESSAGES.write_text(f"{_TITLE}\n{text}", encoding="utf-8")
    assert list(written()) == _NAMES
    assert len(set(_NAMES)) == len(_NAMES) >= 40


def test_a_project_without_a_mistake_is_good(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"run.toml": RUN, "tasks.jsonl": GOOD, "reward.py": REWARD}.items():
        (project / name).write_text(text)
    monkeypatch.setattr(sys, "argv", ["headway", "check", "run.toml"])
    with forgotten_modules(project), pytest.raises(SystemExit) as ended:
        umbrella.main()
    said = capsys.readouterr()
    assert ended.value.code == 0, said.err
    assert said.out.startswith("run.toml: good for learner, generator, reward-service, env-service\n")
    assert said.err == ""


@pytest.mark.parametrize(
    ("given", "said"),
    [("", "none, prompts are text"), ('chat_template = "mine.jinja"', "{}/mine.jinja (run.chat_template)")],
)
def test_a_check_says_which_chat_template_is_used(
    given: str, said: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = RUN.replace('name = "mine"', f'name = "mine"\n{given}')
    for name, text in {"run.toml": settings, "tasks.jsonl": GOOD, "reward.py": REWARD, "mine.jinja": TEMPLATE}.items():
        (project / name).write_text(text)
    monkeypatch.setattr(sys, "argv", ["headway", "check", "run.toml"])
    with forgotten_modules(project), pytest.raises(SystemExit):
        umbrella.main()
    assert capsys.readouterr().out.splitlines()[2] == f"chat template: {said.format(project)}"


def written_project(project: Path, **files: str) -> None:
    for name, text in {"run.toml": RUN, "tasks.jsonl": GOOD, "reward.py": REWARD, **files}.items():
        (project / name).write_text(text)


def of_the_real_command(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run where the project is, as a user does it."""
    command = [str(Path(sys.executable).with_name("headway")), *words]
    environment = {**os.environ, "PYTHONPATH": str(project), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("command", ["check", "up"])
def test_the_real_command_names_a_mistake_in_the_user_s_code_and_starts_nothing(command: str, project: Path) -> None:
    written_project(project, **{"reward.py": REWARD + "TABLE = {}['a']\n"})

    ended = of_the_real_command(project, command, "run.toml")

    assert ended.returncode == 2, ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if "reward.py" in line]
    assert "KeyError: 'a' (reward.py, line 12: TABLE = {}['a'])" in line
    assert not (project / "runs").exists()


def test_a_port_that_is_taken_is_named_with_who_has_it(project: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        written_project(project, **{"run.toml": RUN.replace('sandbox = "off"', f'sandbox = "off"\nhttp.port = {port}')})

        ended = of_the_real_command(project, "check", "run.toml")

    assert ended.returncode == 2
    assert (
        f"[reward-service] http: port {port} of 127.0.0.1: Address already in use; process {os.getpid()} ("
        in ended.stderr
    )
    assert f"end process {os.getpid()}, or choose another port" in ended.stderr


async def test_a_run_of_the_same_name_that_lives_is_named_and_not_its_ports(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written_project(project)
    monkeypatch.setattr(checking, "check_port", lambda what, host, port: before.bad(what, "taken", "another"))
    monkeypatch.setattr(sys, "argv", ["headway", "check", "run.toml"])
    (project / "runs").mkdir()
    with await RunLock.held(project / "runs" / "mine"), forgotten_modules(project), pytest.raises(SystemExit) as ended:
        umbrella.main()

    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"headway: the run in {project / 'runs/mine'} is that of process {os.getpid()} on ")


def test_a_check_of_the_demo_loads_nothing_heavy(project: Path) -> None:
    """Imports that take seconds would be noticed at each start."""
    small = Path(__file__).parents[3] / "examples/addition/run.toml"
    (project / "run.toml").write_text(small.read_text().replace("models/addition", "model"))
    loaded = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "headway.command", "check", "run.toml"],
        cwd=project, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    modules = {line.rpartition("|")[2].strip() for line in loaded.stderr.splitlines()}
    assert "env_service.environments.catalog" in modules
    assert not modules & {"torch", "transformers", "vllm", "pyarrow", "aiohttp", "fastapi", "reward_service.included"}
