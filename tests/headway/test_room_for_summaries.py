"""Findings of a check about conversations that are to be summed up, beside what a generator takes."""

from typing import Any

from env_service.environments.interface import OfferedEnvironment
from env_service.environments.rules import Rules
from headway.checking import _no_room_for_summaries


def offered(**rules: Any) -> OfferedEnvironment:
    nothing: Any = None
    return OfferedEnvironment(name="here", tasks=nothing, start=nothing, rules=Rules(**rules))


def test_a_context_behind_which_no_summary_has_room_is_named() -> None:
    """Behind the prompt come a turn, a request of 100 tokens and a summary: 312 + 50 + 100 + 50 are 512."""
    summed_up = {"history": "summarize", "turn_tokens": 50}
    environments = {
        "tight": offered(context_tokens=313, **summed_up),
        "roomy": offered(context_tokens=312, **summed_up),
        "long": offered(context_tokens=312, history="summarize"),
        "other": offered(),
    }
    said = list(_no_room_for_summaries(environments, 60, 512, takes="[generator] engine.max_model_len is 512"))
    assert len(said) == 2
    assert "[env-service] environments.tight.rules.context_tokens is 313" in said[0]
    assert "lower the first by 1, or raise the second to 513" in said[0]
    assert "environments.long.rules" in said[1]
    assert "a turn of 60 tokens" in said[1]
    assert "lower the first by 20, or raise the second to 532" in said[1]
