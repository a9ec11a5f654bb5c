"""Observations in a wrong form: the error names class and field, and costs their trajectory alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from env_service.environments.interface import Action, ChatMessage, Opening, Step, TurnOf, Verification
from env_service.rollouts.conversation import Nonsense, as_opening, checked
from env_service.rollouts.match import how_it_opens
from protocol.messages import FailedLease
from tests.env_service.bench import MakeBench, benches
from tests.env_service.chat_models import model_with
from tests.env_service.peers import lease
from tests.env_service.rollouts.test_conversation import Counting, TrajectoryWords, counted, offered

HALF = "\ud83d"
AMISS: list[tuple[Any, str]] = [
    ([ChatMessage("user", "go")], r" is list \[.*, or a tuple of ChatMessage: write \(ChatMessage\(...\),\)"),
    (5, " is int 5, expected text without halves of characters, or a tuple of ChatMessage"),
    (("go",), r"\[0\] is str 'go', expected a ChatMessage"),
    ((ChatMessage("user", None),), r"\[0\].content is NoneType None, expected text"),  # type: ignore[arg-type]
    ((ChatMessage("user", "go"), ChatMessage("user", 5)), r"\[1\].content is int 5, expected text"),  # type: ignore[arg-type]
    ((ChatMessage("user", HALF),), r"\[0\].content is str '\\ud83d', expected text, without halves of characters"),
    ((ChatMessage("judge", "go"),), r"\[0\].role is str 'judge', expected system, user, assistant or tool"),  # type: ignore[arg-type]
    (
        (ChatMessage("user", "go"), ChatMessage("assistant", "I ")),
        " ends with a message of the assistant: expected the user's or a tool's last",
    ),
    (HALF, r" is str '\\ud83d', expected text without halves"),
]


@pytest.mark.parametrize(("said", "told"), AMISS)
def test_what_is_amiss_is_told_with_its_class_and_field(said: Any, told: str) -> None:
    wrong: list[tuple[str, Callable[[], object]]] = [
        ("Step.observation", lambda: checked(Step(said), plain=False)),
        ("Opening.prompt", lambda: as_opening(Opening(said))),
        ("TurnOf.observation", lambda: how_it_opens(TurnOf("one", said), ["one"])),
    ]
    for field, check in wrong:
        with pytest.raises(Nonsense, match=f"the environment's {field}{told}"):
            check()


class Amiss(Counting):
    async def step(self, action: Action) -> Step:
        if action.text == "odd":
            return Step([ChatMessage("user", "go")])  # type: ignore[arg-type]
        return await super().step(action)


async def test_an_observation_that_is_amiss_costs_its_trajectory_alone(tmp_path: Path) -> None:
    model = model_with("chatml", tmp_path)
    async with benches(model) as bench:
        made = await _offering(bench, model)
        spoilt, whole = (await made.finished(lease(environment="counting", group_size=2))).group.trajectories

    assert "Step.observation is list" in (spoilt.reward.error or "")
    assert whole.reward.reward == 1.0


async def _offering(bench: MakeBench, model: Path) -> Any:
    return await bench(TrajectoryWords(model, "odd", "stop"), extra=[offered(start=Amiss)])


class Sullen(Counting):
    def reset(self, task: Any, seed: int) -> Opening:
        return Opening((ChatMessage("user", None),))  # type: ignore[arg-type]


async def test_an_opening_that_is_amiss_names_its_field(tmp_path: Path) -> None:
    model = model_with("chatml", tmp_path)
    async with benches(model) as bench:
        made = await bench(TrajectoryWords(model, "stop"), extra=[offered(start=Sullen)])
        outcome = await made.run(lease(environment="counting", group_size=1))

    assert isinstance(outcome, FailedLease)
    assert "the environment's Opening.prompt[0].content is NoneType None, expected text" in outcome.reason


GO = (ChatMessage("user", "go"),)
TOOL: Any = {"type": "function", "function": {"name": "look"}}
HALVED = Verification("exact_match", {"answer": HALF})
PAIR: Any = (1, 2)
TUPLED = Verification("exact_match", {"answer": PAIR})
ANY: Any = None
FIELDS: list[tuple[str, Callable[[], object], str]] = [
    ("Opening.state", lambda: as_opening(Opening(GO, state=ANY)), "NoneType None, expected text"),
    ("Opening.state", lambda: as_opening(Opening(GO, state=HALF)), r"str '\\ud83d', expected text without halves"),
    ("Opening.tools", lambda: as_opening(Opening(GO, tools=[TOOL])), "list .*expected a tuple of dicts of JSON"),  # type: ignore[arg-type]
    ("Opening.tools", lambda: as_opening(Opening(GO, tools=ANY)), "NoneType None, expected a tuple"),
    (
        "Opening.tools",
        lambda: as_opening(Opening(GO, tools=({"a": HALF},))),
        "tuple .*expected a tuple of dicts of JSON",
    ),
    ("Step.state", lambda: checked(Step(GO, state=ANY), plain=False), "NoneType None, expected text"),
    ("Step.stop", lambda: checked(Step(GO, stop=ANY), plain=False), "NoneType None, expected text"),
    ("Step.stop", lambda: checked(Step(stop=HALF), plain=False), r"str '\\ud83d', expected text without halves"),
    ("Step.stop", lambda: checked(Step(stop=5), plain=False), "int 5, expected text"),  # type: ignore[arg-type]
    ("Step.verification", lambda: checked(Step(verification="exact"), plain=False), "str 'exact', expected None, or a"),  # type: ignore[arg-type]
    (
        "Step.verification",
        lambda: checked(Step(verification=HALVED), plain=False),
        "Verification .*expected None, or a",
    ),
    ("Step.verification", lambda: checked(Step(verification=TUPLED), plain=False), "Verification .*arguments of JSON"),
    ("Step.metrics", lambda: checked(Step(GO, metrics=ANY), plain=False), "NoneType None, expected a dict"),
    ("TurnOf.state", lambda: how_it_opens(TurnOf("one", GO, state=ANY), ["one"]), "NoneType None, expected text"),
    ("TurnOf.tools", lambda: how_it_opens(TurnOf("one", GO, tools=[TOOL]), ["one"]), "list .*expected a tuple"),  # type: ignore[arg-type]
    ("TurnOf.player", lambda: how_it_opens(TurnOf(["one"], GO), ["one"]), "list .*expected text"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("field", "check", "told"), FIELDS)
def test_a_field_that_would_not_cross_to_another_process_is_named(
    field: str, check: Callable[[], object], told: str
) -> None:
    with pytest.raises(Nonsense, match=f"the environment's {field} is {told}"):
        check()


def test_fields_as_they_should_be_pass() -> None:
    opening = Opening(GO, tools=(TOOL,), state="s")
    ended = Step(verification=Verification("exact_match", {"answer": [1, {"a": None}]}), metrics={"n": 1.0})

    assert as_opening(opening) is opening
    assert checked(ended, plain=False) is ended


class Stateless(Counting):
    async def step(self, action: Action) -> Step:
        if action.text == "odd":
            return Step(GO, state=ANY)
        return await super().step(action)


async def test_a_field_that_is_amiss_costs_its_trajectory_alone(tmp_path: Path) -> None:
    model = model_with("chatml", tmp_path)
    async with benches(model) as bench:
        made = await bench(TrajectoryWords(model, "odd stop", "stop"), extra=[offered(start=Stateless)])
        spoilt, whole = (await made.finished(lease(environment="counting", group_size=2))).group.trajectories

    assert "Step.state is NoneType None, expected text" in (spoilt.reward.error or "")
    assert whole.reward.reward == 1.0
    assert counted(made, "environment_faults_total", environment="counting", kind="nonsense") == 1
