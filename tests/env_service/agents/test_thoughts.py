"""Answers to agents of models that mark their thoughts with tokens of their own."""

from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from env_service.environments.interface import AgentClient, Task
from tests.env_service.agents.served import Saying, agent_benches
from tests.env_service.chat_models import model_with
from tests.env_service.environments.test_thinking_marks import GEMMA, HARMONY
from tests.env_service.peers import lease


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("name", "text"), [("channels", HARMONY), ("results_within_calls", GEMMA)])
async def test_a_thought_stands_in_tags_and_is_not_shown_again_as_text(
    name: str, text: str, stream: bool, again: bool, tmp_path: Path
) -> None:
    model = model_with(name, tmp_path)
    policy, answers = Saying(model, lambda _: text, size=3), []

    async def asks(task: Task, client: AgentClient) -> float:
        async with AsyncOpenAI(base_url=client.base_url, api_key=client.key, max_retries=0) as openai:
            messages: list[Any] = [{"role": "user", "content": "3 or 4?"}]
            for _ in range(2):
                if stream:
                    parts = await openai.chat.completions.create(model="m", messages=messages, stream=True)
                    answer = "".join([part.choices[0].delta.content or "" async for part in parts if part.choices])
                else:
                    whole = await openai.chat.completions.create(model="m", messages=messages)
                    answer = whole.choices[0].message.content or ""
                answers.append(answer)
                if again:
                    messages[0]["content"] = "3, or is it 4?"
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Sure?"}]
        return 1.0

    async with agent_benches(model) as agents:
        made = await agents(policy, run=asks)
        (trajectory,) = (await made.finished(lease(environment="agent", group_size=1))).group.trajectories

    assert answers == ["<think>3 or 4?</think>It is 3."] * 2
    assert len(trajectory.sequence_starts) == again
    assert not any("<think>" in prompt for prompt in policy.prompts), "its template has other marks"
    assert "It is 3." in policy.prompts[1]
