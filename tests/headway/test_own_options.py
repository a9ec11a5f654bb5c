"""The umbrella's own options among those that it passes on."""

import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

import pytest

from headway import command as umbrella
from headway import doctor_options, file_commands, new_project, planner, releases_command, report, serve_command
from headway.own_options import own_options, usage
from services.config.sources import ConfigError

KNOWN = {"--json": False, "--url": True}


def test_own_options_are_taken_out_wherever_they_stand() -> None:
    words = ["--learner.steps", "3", "--url", "a=b", "--json", "--run.name=x", "--url=c=d", "--generator.openai"]
    own, others = own_options(words, KNOWN)
    assert own == {"--url": ["a=b", "c=d"], "--json": [""]}
    assert others == ["--learner.steps", "3", "--run.name=x", "--generator.openai"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--url"], "--url needs a value"),
        (["--url", "--json"], "--url needs a value"),
        (["--json=1"], "--json takes no value, got '1'"),
    ],
)
def test_a_value_too_few_or_too_many_is_told(words: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        own_options(words, KNOWN)


class Asked(Exception):
    """The options of its own that a command looks for, by name."""

    def __init__(self, known: Mapping[str, bool]) -> None:
        super().__init__(*known)
        self.known = frozenset(known)


def asked(words: Sequence[str], known: Mapping[str, bool]) -> NoReturn:
    raise Asked(known)


@pytest.mark.parametrize(
    ("words", "elsewhere"),
    [
        (["up", "run.toml"], set()),
        (["check", "run.toml"], set()),
        (["doctor", "run.toml"], {"--memory"}),  # a command of its own
        (["status", "run.toml"], set()),
        (["eval", "run.toml"], set()),
        (["serve", "model"], set()),
        (["releases", "run.toml"], set()),
        (["rollback", "run.toml", "1.40"], set()),
        (["init", "sums"], set()),
        (["report", "runs/sums"], set()),
        (["plan", "--json"], set()),
        (["view", "runs/sums"], set()),
        (["fetch", "model"], set()),
        (["export", "runs/sums"], set()),
        (["data", "convert", "rows.jsonl"], set()),
    ],
)
def test_the_usage_of_a_command_has_the_options_that_it_looks_for(
    words: list[str], elsewhere: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = (doctor_options, file_commands, new_project, planner, releases_command, report, serve_command)
    for module in (umbrella, *modules):
        monkeypatch.setattr(module, "own_options", asked)
    with pytest.raises(Asked) as found:
        umbrella._run(words)

    known = found.value.known - ({"--before"} if words[0] == "status" else set())  # the doctor's alone means something
    line, _, _ = usage(words[0]).partition("\n\n")
    assert set(re.findall(r"--[a-z][a-z-]*", line)) == known | elsewhere
