"""Environments that are asked what to do before a context is full, against scripted generators."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from env_service.environments.imported import EnvironmentFault
from env_service.environments.imported import offered as offered_class
from env_service.environments.interface import (
    Action,
    ChatMessage,
    FullContext,
    OfferedEnvironment,
    OnFull,
    Opening,
    ShorterContext,
    Step,
    SummaryRequest,
    Task,
    Verification,
)
from env_service.environments.rules import Rules
from env_service.environments.task_configs import ClassTasks
from env_service.environments.tokenization import Tokenization
from env_service.rollouts import summaries
from protocol.trajectories import SUMMARY_STATE, Trajectory
from tests.env_service.bench import Bench, MakeBench
from tests.env_service.peers import lease
from tests.env_service.rollouts.test_conversation import ConversationTasks, TrajectoryWords, counted

LONG = "and so on " * 20


def user(text: str) -> tuple[ChatMessage, ...]:
    return (ChatMessage("user", text),)


class Talking:
    """Says little after the first turn and much after the second; `stop` ends it."""

    answer: ClassVar[object] = None
    told: ClassVar[list[FullContext]] = []

    def reset(self, task: Task, seed: int) -> Opening:
        self._turn = 0
        return Opening(user("go"))

    def step(self, action: Action) -> Step:
        self._turn += 1
        if action.text == "stop":
            return Step(reward=1.0, stop="stopped")
        return Step(user("on" if self._turn == 1 else LONG), reward=0.5, state=str(self._turn))

    def on_full(self, full: FullContext) -> OnFull:
        self.told.append(full)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[return-value]


async def talked(
    chat_bench: MakeBench, model: Path, answer: object, said: str = "one two three stop", **rules: object
) -> tuple[Bench, Trajectory]:
    Talking.answer, Talking.told = answer, []
    given = Rules.model_validate({"context_tokens": 120, **rules})
    environment = OfferedEnvironment(
        name="counting", tasks=ConversationTasks(), start=Talking, rules=given, makes_room=True
    )
    made = await chat_bench(TrajectoryWords(model, said), extra=[environment])
    (trajectory,) = (await made.finished(lease(environment="counting", group_size=1))).group.trajectories
    return made, trajectory


def prompts(made: Bench, model: Path) -> Sequence[str]:
    requests = made.generators[0].requests
    return Tokenization(model).decode([request.prompt_token_ids for request in requests], special=True)


def shown(*messages: tuple[str, str]) -> str:
    """As the template writes them, with the prompt of the next turn."""
    said = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)
    return f"{said}<|im_start|>assistant\n"


async def test_a_conversation_goes_on_from_what_its_environment_has_left_of_it(
    chat_bench: MakeBench, chat_model: Path
) -> None:
    made, trajectory = await talked(chat_bench, chat_model, ShorterContext(user("you said one and two")))

    full, again = Talking.told  # the second context is full after one turn
    assert [message.content for message in full.messages] == ["go", "one", "on", "two"]
    assert [message.content for message in again.messages] == ["you said one and two", "three"]
    assert (full.observation, full.context_tokens) == (user(LONG), 120)
    assert full.tokens > 120
    assert prompts(made, chat_model)[2:] == [shown(("user", "you said one and two"))] * 2
    assert [turn.start for turn in trajectory.turns[2:]] == list(trajectory.sequence_starts)
    assert trajectory.turns[2].state == "2"
    assert counted(made, "full_contexts_total", environment="counting", answer="shortened") == 2


async def test_the_policy_sums_up_in_the_words_of_its_environment(chat_bench: MakeBench, chat_model: Path) -> None:
    made, trajectory = await talked(
        chat_bench, chat_model, SummaryRequest("Say it shorter."), said="one two short stop"
    )
    assert prompts(made, chat_model)[2].endswith(shown(("user", "Say it shorter.")))
    assert [turn.state for turn in trajectory.turns] == ["", "1", SUMMARY_STATE, "2"]
    assert trajectory.stop_reason == "stopped"


@pytest.mark.parametrize(
    ("answer", "rules", "stop", "reward"),
    [
        (Step(stop="submitted", reward=2.0), {}, "submitted", 3.0),
        (Step(verification=Verification("exact_match", {"answer": "two"}), reward=0.25), {}, "", 2.25),
        (Step(user("shorter"), reward=1.0), {"max_turns": 5}, "stopped", 4.5),
        (Step(user(LONG)), {}, "token_budget", 1.0),
        (ShorterContext(user(LONG * 2)), {}, "token_budget", 1.0),
        (None, {}, "token_budget", 1.0),
        (None, {"history": "summarize"}, "stopped", 2.0),
    ],
)
async def test_an_environment_ends_says_something_else_or_declines(
    chat_bench: MakeBench, chat_model: Path, answer: object, rules: dict[str, object], stop: str, reward: float
) -> None:
    said = {"stopped": "one two three stop"}.get(stop, "one two three four")
    _, trajectory = await talked(chat_bench, chat_model, answer, said=said, **rules)
    assert trajectory.stop_reason == stop
    assert trajectory.truncated == (stop == "token_budget")
    assert trajectory.reward.reward == reward
    if "history" in rules:
        assert summaries.REQUEST.content in trajectory.completion_text


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (ValueError("a bug of mine"), "raised", "ValueError: a bug of mine"),
        ("shorter", "nonsense", "on_full returned str, expected a ShorterContext, a SummaryRequest, a Step or None"),
        (ShorterContext(()), "nonsense", "ShorterContext without a message"),
        (ShorterContext("plain text"), "nonsense", "opened with messages and went on with plain text"),
    ],
)
async def test_an_answer_that_is_none_is_the_fault_of_the_environment(
    chat_bench: MakeBench, chat_model: Path, answer: object, kind: str, said: str
) -> None:
    Talking.answer, Talking.told = answer, []
    environment = OfferedEnvironment(
        name="counting", tasks=ConversationTasks(), start=Talking, rules=Rules(context_tokens=120), makes_room=True
    )
    made = await chat_bench(TrajectoryWords(chat_model, "one two three"), extra=[environment])
    failed = await made.failed(lease(environment="counting", group_size=1))
    assert said in failed.reason
    assert counted(made, "environment_faults_total", environment="counting", kind=kind) == 1


class Unbounded(Talking):
    rules = Rules()


class Split(Talking):
    rules = Rules(context_tokens=64, history="split")


class BoundedTalk(Talking):
    rules = Rules(context_tokens=64)


@pytest.mark.parametrize("name", ["Unbounded", "Split"])
def test_one_that_would_never_be_asked_is_refused(name: str) -> None:
    entry = ClassTasks.model_validate({"name": "mine", "source": f"{__name__}:{name}"})
    with pytest.raises(EnvironmentFault, match=r"the class has a method on_full, which is asked before"):
        offered_class(entry)


def test_one_that_can_be_asked_is_known() -> None:
    assert offered_class(ClassTasks.model_validate({"name": "mine", "source": f"{__name__}:BoundedTalk"})).makes_room
