"""What environments say in the wrong form: it is told by class and field, and costs their trajectory alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from env_service.environments.interface import Action, ChatMessage, Opening, Step, TurnOf
from env_service.rollouts.conversation import Nonsense, as_opening, checked
from env_service.rollouts.match import how_it_opens
from protocol.messages import Failed
from tests.env_service.bench import MakeBench, benches
from tests.env_service.chat_models import model_with
from tests.env_service.peers import lease
from tests.env_service.test_several_turns import Counting, Words, offered

HALF = "\ud83d"
AMISS: list[tuple[Any, str]] = [
    ([ChatMessage("user", "go")], r" is list \[.*, or a tuple of ChatMessage: write \(ChatMessage\(...\),\)"),
    (5, " is int 5, expected text without halves of characters, or a tuple of ChatMessage"),
    (("go",), r"\[0\] is str 'go', expected a ChatMessage"),
    ((ChatMessage("user", None),), r"\[0\].content is NoneType None, expected text"),  # type: ignore[arg-type]
    ((ChatMessage("user", "go"), ChatMessage("user", 5)), r"\[1\].content is int 5, expected text"),  # type: ignore[arg-type]
    ((ChatMessage("user", HALF),), r"\[0\].content is str '\\ud83d', expected text, without halves of characters"),
    ((ChatMessage("judge", "go"),), r"\[0\].role is str 'judge', expected system, user, assistant or tool"),  # type: ignore[arg-type]
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
    return await bench(Words(model, "odd", "stop"), extra=[offered(start=Amiss)])


class Sullen(Counting):
    def reset(self, task: Any, seed: int) -> Opening:
        return Opening((ChatMessage("user", None),))  # type: ignore[arg-type]


async def test_an_opening_that_is_amiss_names_its_field(tmp_path: Path) -> None:
    model = model_with("chatml", tmp_path)
    async with benches(model) as bench:
        made = await bench(Words(model, "stop"), extra=[offered(start=Sullen)])
        outcome = await made.run(lease(environment="counting", group_size=1))

    assert isinstance(outcome, Failed)
    assert "the environment's Opening.prompt[0].content is NoneType None, expected text" in outcome.reason
