"""A game of two players and an agent, in the few characters of the addition model."""

import json
import os
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from env_service.environments.interface import Action, AgentClient, ChatMessage, Round, Task, TurnOf
from env_service.environments.rules import Rules

PLAYERS = ("first", "second")
ROUNDS = 2


class Higher:
    """Both say a token, twice; whose digits sum up to more wins. Each is shown what the other said."""

    players = PLAYERS
    roles = ("user",)
    rules = Rules(max_turns=ROUNDS, turn_tokens=1)

    def reset(self, task: Task, seed: int) -> TurnOf:
        self._said: list[int] = []
        return TurnOf(PLAYERS[0], (ChatMessage("user", f"{task.seed % 10}+"),))

    def step(self, action: Action) -> Round:
        self._said.append(int(action.text) if action.text.isdecimal() else 0)
        if len(self._said) < len(PLAYERS) * ROUNDS:
            shown = ChatMessage("user", f"{self._said[-1]}+")
            return Round(TurnOf(PLAYERS[len(self._said) % len(PLAYERS)], (shown,)))
        first, second = sum(self._said[::2]), sum(self._said[1::2])
        return Round(stop="over", rewards={"first": float(first > second), "second": float(second > first)})


def note(line: str) -> None:
    """Appends a line to the test's file."""
    with Path(os.environ["REPLIES"]).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


async def asks_twice(task: Task, client: AgentClient) -> float:
    """Asks for a sum, and again; notes what it was told."""
    messages: list[Any] = [{"role": "user", "content": f"{task.seed % 10}+2"}]
    replies: list[str] = []
    async with AsyncOpenAI(base_url=client.base_url, api_key=client.key) as policy:
        for _ in range(2):
            said = await policy.chat.completions.create(model=client.model, messages=messages)
            replies.append(said.choices[0].message.content or "")
            messages += [{"role": "assistant", "content": replies[-1]}, {"role": "user", "content": "1+1"}]
    note(json.dumps(replies))
    return sum(reply.startswith("3") for reply in replies) / 2
