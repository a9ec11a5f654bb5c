"""The umbrella's own options among those that it passes on."""

import pytest

from headway.own_options import own_options
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
