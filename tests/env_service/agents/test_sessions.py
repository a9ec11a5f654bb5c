"""An agent's calls become the turns of a trajectory: real clients of the openai package over real sockets."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from env_service.environments.interface import AgentClient, Task
from env_service.environments.tokenization import Tokenization
from protocol.generation import Sampling
from tests.env_service.agents.raw_calls import said_to
from tests.env_service.agents.served import MakeAgentBench, Saying
from tests.env_service.peers import lease


async def two_questions(task: Task, client: AgentClient) -> float:
    async with AsyncOpenAI(base_url=client.base_url, api_key=client.key) as policy:
        messages = [{"role": "user", "content": "go"}]
        for word in ("more", "enough"):
            answer = await policy.chat.completions.create(model=client.model, messages=messages)  # type: ignore[arg-type]
            messages += [{"role": "assistant", "content": answer.choices[0].message.content or ""}]
            messages += [{"role": "user", "content": word}]
    return 0.75


async def test_an_agents_calls_are_the_turns_of_its_trajectory(agents: MakeAgentBench, chat_model: Path) -> None:
    made = await agents(Saying(chat_model, lambda prompt: "two" if "more" in prompt else "one"), run=two_questions)

    group = (await made.finished(lease(environment="agent", group_size=2))).group

    for trajectory in group.trajectories:
        (text,) = Tokenization(chat_model).decode([trajectory.token_ids.tolist()], special=True)
        assert text == (
            "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
            "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>"
        )
        assert (trajectory.reward.reward, trajectory.reward.verifier) == (0.75, "agent")
        assert trajectory.reward.components["turns"] == 2.0
        assert trajectory.sequence_starts == ()
        assert trajectory.completion_text == "one\n\nmore\n\ntwo"
    assert len(made.sessions) == 0


async def test_each_turn_of_each_agent_draws_with_a_seed_of_its_own(agents: MakeAgentBench, chat_model: Path) -> None:
    made = await agents(Saying(chat_model, lambda prompt: "one"), run=two_questions)
    seeded = lease(environment="agent", group_size=2).model_copy(update={"sampling": Sampling(max_tokens=4, seed=40)})

    await made.finished(seeded)

    assert len({asked.sampling.seed for asked in made.generators[0].requests}) == 4


async def test_calls_at_the_same_time_draw_with_seeds_of_their_own(agents: MakeAgentBench, chat_model: Path) -> None:
    async def three_at_once(task: Task, client: AgentClient) -> float:
        go = json.dumps({"messages": [{"role": "user", "content": "go"}]})
        await asyncio.gather(*(said_to(client, "chat/completions", go) for _ in range(3)))
        return 1.0

    made = await agents(Saying(chat_model, lambda prompt: "one"), run=three_at_once)
    seeded = lease(environment="agent", group_size=1).model_copy(update={"sampling": Sampling(max_tokens=4, seed=40)})

    await made.finished(seeded)

    # Of the lease and the first trajectory, 7 + 0, and of each turn a multiple of the stride.
    seeds = sorted(asked.sampling.seed or 0 for asked in made.generators[0].requests)
    assert seeds == sorted((7 + turn * 0xD1B54A32D192ED03) % (1 << 63) for turn in (1, 2, 3))


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def calls_then_tells(prompt: str) -> str:
    asked = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 2,  "b": 3}}\n</tool_call>'
    return "It is 5." if "tool_response" in prompt or "user\n5" in prompt or "tool\n5" in prompt else asked


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_a_streamed_answer_with_a_call_is_continued_from_its_tokens(
    agents: MakeAgentBench, chat_model: Path, size: int
) -> None:
    pieces: list[str] = []

    async def adds(task: Task, client: AgentClient) -> float:
        async with AsyncOpenAI(base_url=client.base_url, api_key=client.key, max_retries=0) as policy:
            messages: list[Any] = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+3?"}]
            async with policy.chat.completions.stream(model="m", messages=messages, tools=[ADD]) as stream:  # type: ignore[list-item]
                async for event in stream:
                    if event.type == "content.delta":
                        pieces.append(event.delta)
                first = (await stream.get_final_completion()).choices[0]
            assert first.finish_reason == "tool_calls"
            (call,) = first.message.tool_calls or []
            assert json.loads(call.function.arguments) == {"a": 2, "b": 3}
            compact = {"id": call.id, "type": "function", "function": {"name": "add", "arguments": '{"b":3,"a":2}'}}
            messages += [{"role": "assistant", "content": first.message.content, "tool_calls": [compact]}]
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "5"}]
            done = await policy.chat.completions.create(
                model="m", messages=messages, tools=[ADD], stream=True, stream_options={"include_usage": True}
            )  # type: ignore[call-overload]
            chunks = [chunk async for chunk in done]
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "It is 5."
            assert chunks[-1].usage.completion_tokens > 0
        return 1.0

    made = await agents(Saying(chat_model, calls_then_tells, size=size), run=adds)
    (trajectory,) = (await made.finished(lease(environment="agent", group_size=1))).group.trajectories

    assert "".join(pieces) == "I add."
    assert trajectory.sequence_starts == ()
    assert [turn.finish_reason for turn in trajectory.turns] == ["stop", "stop"]
    first = trajectory.turns[0]
    (said,) = Tokenization(chat_model).decode([trajectory.token_ids[first.completion_start : first.end].tolist()])
    assert said == calls_then_tells("")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_responses_api_does_the_same(agents: MakeAgentBench, chat_model: Path, stream: bool) -> None:
    tool: Any = {"type": "function", "strict": True, **ADD["function"]}  # type: ignore[dict-item]

    async def adds(task: Task, client: AgentClient) -> float:
        async with AsyncOpenAI(base_url=client.base_url, api_key=client.key, max_retries=0) as policy:
            history: list[Any] = [{"role": "user", "content": "2+3?"}]
            for _ in range(2):
                if stream:
                    async with policy.responses.stream(
                        model="m", input=history, instructions="Add.", tools=[tool]
                    ) as live:
                        async for _event in live:
                            pass
                        answer: Any = await live.get_final_response()
                else:
                    answer = await policy.responses.create(model="m", input=history, instructions="Add.", tools=[tool])
                history += [item.model_dump(exclude_none=True) for item in answer.output]
                history += [
                    {"type": "function_call_output", "call_id": item.call_id, "output": "5"}
                    for item in answer.output
                    if item.type == "function_call"
                ]
            assert answer.output_text == "It is 5."
            assert answer.usage.input_tokens_details.cached_tokens == 0
        return 1.0

    made = await agents(Saying(chat_model, calls_then_tells, size=2), run=adds)
    (trajectory,) = (await made.finished(lease(environment="agent", group_size=1))).group.trajectories

    assert (len(trajectory.turns), trajectory.sequence_starts) == (2, ())


THOUGHT = "<think>\nhm, so\n</think>\n\n"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


@pytest.mark.parametrize(
    ("fields", "sequences"),
    [
        ({"content": "\n\nI add.", "reasoning_content": "\nhm, so\n"}, 1),  # litellm's clients
        ({"content": "I add.", "reasoning": "hm, so"}, 1),
        ({"content": "<think>\n\nhm, so\n\n</think>\n\nI add."}, 1),
        ({"content": "I add."}, 2),  # it does not want it to be seen any more
        ({"content": "I add.", "reasoning_content": "other"}, 2),
    ],
)
async def test_thinking_that_a_client_sends_beside_the_text_is_that_which_was_sampled(
    agents: MakeAgentBench, chat_model: Path, fields: dict[str, str], sequences: int
) -> None:
    async def adds(task: Task, client: AgentClient) -> float:
        async with AsyncOpenAI(base_url=client.base_url, api_key=client.key, max_retries=0) as policy:
            messages: list[Any] = [{"role": "user", "content": "2+3?"}]
            first = await policy.chat.completions.create(model="m", messages=messages, tools=[ADD])  # type: ignore[list-item]
            assert first.choices[0].message.content == f"{THOUGHT}I add."
            (call,) = first.choices[0].message.tool_calls or []
            messages += [{"role": "assistant", "tool_calls": [call.model_dump()], **fields}]
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "5"}]
            await policy.chat.completions.create(model="m", messages=messages, tools=[ADD])  # type: ignore[list-item]
        return 1.0

    saying = Saying(chat_model, lambda prompt: "It is 5." if "\n5" in prompt else f"{THOUGHT}I add.\n{CALL}")
    made = await agents(saying, run=adds)
    (trajectory,) = (await made.finished(lease(environment="agent", group_size=1))).group.trajectories

    assert len(trajectory.turns) == 2
    assert 1 + len(trajectory.sequence_starts) == sequences
    assert (THOUGHT in saying.prompts[1]) == (sequences == 1)
