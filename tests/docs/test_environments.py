"""The environment in docs/environments.md: it is that of the example, and it can be played."""

import re
import tomllib
from pathlib import Path

import pytest

from env_service.config import EnvServiceConfig
from env_service.environments import catalog
from env_service.environments.interface import Action, Opening, Step, Task
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
