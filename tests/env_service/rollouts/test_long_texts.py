"""Texts that are longer than the model's context: no more of them is tokenized than tells that, and it is said."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from env_service.environments.interface import (
    Action,
    AgentClient,
    ChatMessage,
    Opening,
    Prompt,
    Round,
    Step,
    Task,
    TurnOf,
)
from env_service.environments.rules import Rules
from env_service.environments.tokenization import Tokenization
from tests.env_service.agents.raw_calls import said_to
from tests.env_service.agents.served import Saying, agent_benches
from tests.env_service.bench import MakeBench
from tests.env_service.chat_models import model_with
from tests.env_service.peers import lease
from tests.env_service.rollouts.test_conversation import Counting, TrajectoryWords, counted, offered

CONTEXT = 512
LONG = "word and more, " * 300_000
MAX_CHARS = 16 * CONTEXT


@pytest.fixture
def chat_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with a small context; nothing long may be tokenized with it."""
    model = model_with("chatml", tmp_path)
    config = model / "config.json"
    settings = json.loads(config.read_text()) if config.exists() else {}
    config.write_text(json.dumps({**settings, "max_position_embeddings": CONTEXT}))
    own = Tokenization.encode_after

    def encode_after(self: Tokenization, anchor: str, text: str) -> list[int]:
        assert len(text) <= MAX_CHARS, f"{len(text)} characters are tokenized"
        return own(self, anchor, text)

    def render(self: Tokenization, *messages: Any, **options: Any) -> str:
        text = rendered(self, *messages, **options)
        assert len(text) <= MAX_CHARS, f"{len(text)} characters are rendered"
        return text

    rendered = Tokenization.text_of
    monkeypatch.setattr(Tokenization, "encode_after", encode_after)
    monkeypatch.setattr(Tokenization, "text_of", render)
    return model


class Talkative(Counting):
    async def step(self, action: Action) -> Step:
        if action.text == "long":
            return Step((ChatMessage("user", "see"), ChatMessage("user", LONG)), reward=0.5)
        return await super().step(action)


@pytest.mark.parametrize("history", ["append", "split"])
async def test_an_observation_that_cannot_be_shown_cuts_the_conversation_off(
    chat_bench: MakeBench, chat_model: Path, history: Any
) -> None:
    made = await chat_bench(
        TrajectoryWords(chat_model, "one long", "one stop"), extra=[offered(Rules(history=history), start=Talkative)]
    )
    cut, whole = (await made.finished(lease(environment="counting"))).group.trajectories

    assert (cut.stop_reason, cut.truncated, len(cut.turns), cut.reward.reward) == ("token_budget", True, 2, 1.0)
    assert cut.completion_text.startswith("one\n\nturn 1\n\nlong\n\nsee\n\nword and more")
    assert whole.reward.reward == 1.5
    assert counted(made, "overflowing_texts_total", environment="counting") == 1


@pytest.mark.parametrize("prompt", [(ChatMessage("system", LONG), ChatMessage("user", "go")), LONG])
async def test_an_opening_that_cannot_be_shown_is_the_tasks_fault(
    chat_bench: MakeBench, chat_model: Path, prompt: Prompt
) -> None:
    class Opens(Counting):
        def reset(self, task: Task, seed: int) -> Opening:
            return Opening(prompt)

    made = await chat_bench(TrajectoryWords(chat_model, "stop"), extra=[offered(start=Opens)])
    failed = await made.failed(lease(environment="counting", group_size=1))

    assert failed.data_fault
    assert f"characters, more than the model's context of {CONTEXT} tokens" in failed.reason
    assert counted(made, "overflowing_texts_total", environment="counting") == 1


async def test_what_a_player_is_told_first_is_bounded_too(chat_bench: MakeBench, chat_model: Path) -> None:
    class LongTextGame:
        def reset(self, task: Task, seed: int) -> TurnOf:
            return TurnOf("first", (ChatMessage("user", "go"),))

        def step(self, action: Action) -> Round:
            return Round(TurnOf("second", (ChatMessage("user", LONG),)))

    start: Any = LongTextGame
    game = replace(offered(start=start), players=("first", "second"))
    made = await chat_bench(TrajectoryWords(chat_model, "one"), extra=[game])
    failed = await made.failed(lease(environment="counting", group_size=1))

    assert f"it is longer than the model's context of {CONTEXT} tokens" in failed.reason


@pytest.mark.parametrize("route", ["chat/completions", "responses", "messages"])
async def test_an_agents_messages_that_cannot_be_shown_are_refused(chat_model: Path, route: str) -> None:
    answers: list[tuple[int, Any]] = []

    async def run(task: Task, client: AgentClient) -> float:
        go = {"messages": [{"role": "user", "content": "go"}]}
        answers.append(await said_to(client, "chat/completions", json.dumps(go)))
        said = [{"role": "user", "content": LONG[:900_000]}]
        body = {"input": said} if route == "responses" else {"messages": said, "max_tokens": 8}
        answers.append(await said_to(client, route, json.dumps(body)))
        return 1.0

    async with agent_benches(chat_model) as make:
        made = await make(Saying(chat_model, lambda _: "one"), run=run)
        (trajectory,) = (await made.finished(lease(environment="agent", group_size=1))).group.trajectories

    assert [status for status, _ in answers] == [200, 400]
    assert f"the model takes {CONTEXT} tokens" in str(answers[1][1])
    assert trajectory.stop_reason == "token_budget"


def test_no_more_is_tokenized_than_tells_that_a_text_is_too_long(chat_model: Path) -> None:
    tokenization = Tokenization(chat_model)
    assert tokenization.context_tokens == CONTEXT

    begun = tokenization.beginning_beyond(LONG, CONTEXT)
    assert isinstance(begun, str)
    assert len(tokenization.encode_after("", begun)) > CONTEXT
    short = "word " * 20
    assert tokenization.beginning_beyond(short, len(tokenization.encode_after("", short))) is None
