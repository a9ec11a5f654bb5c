"""The environments in docs/environments.md: one is that of an example, and all can be played."""

import importlib
import random
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from env_service.config import EnvServiceConfig
from env_service.environments import catalog
from env_service.environments.interface import Action, ChatMessage, Opening, Step, Task
from headway import checking, command
from headway.doctor import before
from headway.new_project import make_project
from headway.own_options import split_options
from services.config.models import load_config

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_environment"
PAGE = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("language", "file"), [("python", "guess.py"), ("toml", "run.toml")])
def test_what_is_shown_is_in_the_files_of_the_example(language: str, file: str) -> None:
    (block,) = re.findall(
        rf"^```{language}\n# examples/own_environment/{file}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE
    )

    assert block in (EXAMPLE / file).read_text(encoding="utf-8")


def test_an_environment_is_twenty_lines() -> None:
    code = (EXAMPLE / "guess.py").read_text(encoding="utf-8").partition("class Guess:")[2]

    assert len([line for line in code.splitlines() if line.strip()]) <= 20


def test_it_can_be_played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    path = EXAMPLE / "run.toml"
    config = load_config(EnvServiceConfig, process="env-service", argv=["--config", str(path)], environ={})
    environment = catalog.build(config.environments)["guess"]
    task = environment.tasks.task("train", 3)
    assert isinstance(task, Task)
    assert (
        environment.rules.trajectory_tokens
        == tomllib.loads(path.read_text())["env-service"]["environments"][0]["rules"]["trajectory_tokens"]
    )
    player = environment.start()
    opening = player.reset(task, seed=0)
    assert isinstance(opening, Opening)

    low, high, steps = 0, 15, list[Step]()
    while not steps or not steps[-1].ends:
        guess = (low + high) // 2
        step = player.step(Action(str(guess)))
        assert isinstance(step, Step)
        steps.append(step)
        said = "".join(message.content for message in step.observation if not isinstance(message, str))
        low, high = (guess + 1, high) if said == "too low" else (low, guess - 1)

    assert (steps[-1].stop, steps[-1].reward) == ("solved", 1.0)
    assert len(steps) <= environment.rules.max_turns
    invalid = player.step(Action("seven?"))
    assert isinstance(invalid, Step)
    assert invalid.invalid


@pytest.mark.parametrize(("name", "prompt"), [("Total", "3+1="), ("TotalInChat", "3+1")])
def test_the_environments_of_the_tutorial_reward_each_right_total(
    name: str, prompt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = _of_the_tutorial(tmp_path, monkeypatch)[name]()
    seed = next(seed for seed in range(10_000) if random.Random(seed).choices(range(5), k=4) == [3, 1, 4, 0])

    def text_of(said: str | tuple[ChatMessage, ...]) -> str:
        return said if isinstance(said, str) else said[0].content

    opening = environment.reset(Task(seed=seed), 0)
    steps = [environment.step(Action(text)) for text in ("4", "7", "8")]

    assert [text_of(opening.prompt), *(text_of(step.observation) for step in steps[:2])] == [
        prompt,
        prompt.replace("3+1", "+4"),
        prompt.replace("3+1", "+0"),
    ]
    assert ([step.reward for step in steps], steps[-1].stop) == ([1.0, 0.0, 1.0], "done")


@pytest.mark.parametrize("form", ["in plain text", "in chat"])
def test_the_tutorial_makes_a_run_file_that_a_check_finds_good(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_project([str(tmp_path / "sums")])
    capsys.readouterr()
    _of_the_tutorial(tmp_path / "sums", monkeypatch)
    path = tmp_path / "sums" / "run.toml"
    shown = re.findall(r"^```toml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    plain, chat = (next(block for block in shown if f'"mine:{name}"' in block) for name in ("Total", "TotalInChat"))
    head = _without_the_tables_that_are_to_be_deleted(path.read_text(encoding="utf-8"))
    if form == "in chat":
        (template,) = re.findall(r"^```jinja\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
        (tmp_path / "sums" / "chat.jinja").write_text(template, encoding="utf-8")
        run, _, environment = chat.partition("\n\n")
        path.write_text(f"{head.replace('[run]', run)}{environment}", encoding="utf-8")
    else:
        path.write_text(head + plain, encoding="utf-8")
    monkeypatch.setattr(checking, "check_port", lambda what, host, port: before.good(what, host))
    monkeypatch.setattr(checking, "resources", lambda configs: [])

    command.check(path, split_options([]))

    assert "good for learner, generator, env-service" in capsys.readouterr().out


def _without_the_tables_that_are_to_be_deleted(text: str) -> str:
    """The run file up to its environment, which is replaced."""
    (said,) = re.findall(r"^Delete the tables (.*?):", PAGE, re.MULTILINE)
    for header in re.findall(r"`(\[.*?\]+)`", said):
        text, count = re.subn(rf"^{re.escape(header)}\n.*?(?=^\[)", "", text, flags=re.DOTALL | re.MULTILINE)
        assert count == 1, header
    return text.partition("[[env-service.environments]]")[0]


def _of_the_tutorial(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], Any]]:
    """The classes of the tutorial, in a module `mine` in the folder."""
    folder.mkdir(exist_ok=True)
    (code,) = re.findall(r"^```python\n(# mine.py\n.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (folder / "mine.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return vars(importlib.import_module("mine"))
