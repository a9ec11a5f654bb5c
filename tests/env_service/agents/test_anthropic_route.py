"""Anthropic's route, asked by Anthropic's own client: the same turns, the same tokens, errors in its form."""

import json
from pathlib import Path
from typing import Any

import anthropic
import pytest

from env_service.agents.registry import AgentLimits
from env_service.environments.interface import AgentClient, Task
from env_service.environments.rules import Rules
from env_service.environments.tokenization import Tokenization
from tests.env_service.agents.raw_calls import answers, said_to
from tests.env_service.agents.served import MakeAgentBench, Saying
from tests.env_service.peers import lease

GO: Any = [{"role": "user", "content": "go"}]
ADD: Any = {
    "name": "add",
    "description": "adds",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "cache_control": {"type": "ephemeral"},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2,  "b": 3}}\n</tool_call>'

FIELDS: list[tuple[str, str, dict[str, Any]]] = [
    ("400", "thinking", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
    ("400", "thinking", {"thinking": {"type": "adaptive"}}),
    ("400", "compaction", {"compaction": {"trigger": {}}}),
    ("400", "diagnostics", {"diagnostics": {"previous_message_id": "m"}}),
    ("400", "thread", {"thread": {"type": "create"}}),
    ("400", "chat_template_kwargs", {"chat_template_kwargs": {"enable_thinking": False}}),
    ("400", "container", {"container": "c"}),
    ("400", "mcp_servers", {"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}),
    ("400", "context_management", {"context_management": {"edits": []}}),
    ("400", "output_config", {"output_config": {"effort": "low"}}),
    ("400", "speed", {"speed": "fast"}),
    ("400", "prefill", {"prefill": "It is"}),
    ("400", "temperature", {"temperature": 0.2}),
    ("400", "top_p", {"top_p": 0.9}),
    ("400", "top_k", {"top_k": 5}),
    ("400", "tool_choice", {"tool_choice": {"type": "any"}}),
    ("400", "tool_choice", {"tool_choice": {"type": "tool", "name": "add"}}),
    ("400", "tool_choice", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
    ("400", "tools.0", {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
    ("400", "tools.0.defer_loading", {"tools": [{**ADD, "defer_loading": True}]}),
    ("400", "messages", {"messages": [*GO, {"role": "assistant", "content": "It is"}]}),
    ("400", "messages", {"messages": []}),
    ("400", "messages.0", {"messages": [3]}),
    ("400", "messages.0", {"messages": [{"role": "user"}]}),
    ("400", "messages.0.content", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
    ("400", "system", {"system": 3}),
    ("400", "max_tokens", {"max_tokens": 0}),
    ("400", "stop_sequences", {"stop_sequences": {"a": 1}}),
    ("400", "stream", {"stream": "yes"}),
    ("harmless", "metadata", {"metadata": {"user_id": "me"}}),
    ("harmless", "service_tier", {"service_tier": "auto"}),
    ("harmless", "cache_control", {"cache_control": {"type": "ephemeral"}}),
    ("harmless", "thinking", {"thinking": {"type": "disabled"}}),
    ("harmless", "betas", {"betas": ["b"], "billing_policy": {"bill_to": "self"}}),
    ("harmless", "fallbacks", {"fallbacks": "default", "fallback_credit_token": "t"}),
    ("harmless", "chat_template_kwargs", {"chat_template_kwargs": {}}),
    ("harmless", "temperature", {"temperature": 1.0, "top_p": 1.0}),
    ("harmless", "tool_choice", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": False}}),
    ("honoured", "system", {"system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]}),
    ("honoured", "tools", {"tools": [ADD], "tool_choice": {"type": "none"}}),
]


def client_of(client: AgentClient, **settings: Any) -> Any:
    return anthropic.AsyncAnthropic(base_url=client.anthropic_url, api_key=client.key, **{"max_retries": 0, **settings})


def adds(prompt: str) -> str:
    return "It is 5." if "5<|im_end|>\n<|im_start|>assistant" in prompt else f"I add. {CALL}"


async def asked(policy: Any, how: str, **request: Any) -> Any:
    """The finished message, by either way."""
    if how == "whole":
        return await policy.messages.create(**request)
    async with policy.messages.stream(**request) as stream:
        return await stream.get_final_message()


@pytest.mark.parametrize("how", ["whole", "streamed"])
async def test_an_agent_with_tools_goes_on_from_its_tokens(agents: MakeAgentBench, chat_model: Path, how: str) -> None:
    found: list[Any] = []

    async def run(task: Task, client: AgentClient) -> float:
        request = {"model": client.model, "max_tokens": 100, "tools": [ADD], "system": "You add."}
        async with client_of(client) as policy:
            messages: list[Any] = [{"role": "user", "content": "2+3?"}]
            first = await asked(policy, how, messages=messages, **request)
            result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": [text("5")]}
            messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            found.extend([first, await asked(policy, how, messages=messages, **request)])
        return 1.0

    made = await agents(Saying(chat_model, adds, size=3), run=run)
    finished = await made.finished(lease(environment="agent", group_size=1))

    first, second = found
    assert [block.type for block in first.content] == ["text", "tool_use"]
    assert (first.content[0].text, first.content[1].name) == ("I add.", "add")
    assert first.content[1].input == {"a": 2, "b": 3}
    assert (first.stop_reason, second.stop_reason) == ("tool_use", "end_turn")
    assert second.content[0].text == "It is 5."
    (trajectory,) = finished.group.trajectories
    assert (len(trajectory.turns), len(trajectory.sequence_starts)) == (2, 0)
    assert first.usage.input_tokens == trajectory.turns[0].completion_start
    assert second.usage.output_tokens == trajectory.turns[1].end - trajectory.turns[1].completion_start
    (whole,) = Tokenization(chat_model).decode([trajectory.token_ids.tolist()], special=True)
    assert CALL in whole, "the policy's own spacing"
    assert "You add." in whole


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


async def test_a_stream_is_the_events_of_anthropics_api(agents: MakeAgentBench, chat_model: Path) -> None:
    kinds: list[str] = []

    async def run(task: Task, client: AgentClient) -> float:
        async with client_of(client) as policy:
            events = await policy.messages.create(model="m", max_tokens=90, messages=GO, tools=[ADD], stream=True)
            kinds.extend([event.type async for event in events])
        return 1.0

    made = await agents(Saying(chat_model, adds), run=run)
    await made.finished(lease(environment="agent", group_size=1))
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert kinds == ["message_start", *block, *block, "message_delta", "message_stop"]


@pytest.mark.parametrize("how", ["whole", "streamed"])
async def test_why_a_turn_ended_is_told(agents: MakeAgentBench, chat_model: Path, how: str) -> None:
    found: list[Any] = []

    async def run(task: Task, client: AgentClient) -> float:
        async with client_of(client) as policy:
            for request in ({"max_tokens": 90}, {"max_tokens": 90, "stop_sequences": [" zero", " two"]}):
                found.append(await asked(policy, how, model="m", messages=GO, **request))
            counted = await policy.messages.count_tokens(model="m", messages=GO)
            found.append(counted.input_tokens)
        return 1.0

    made = await agents(Saying(chat_model, lambda _: "one two three", size=1), run=run)
    await made.finished(lease(environment="agent", group_size=1))
    ended, stopped, counted = found
    assert (ended.stop_reason, ended.stop_sequence, ended.content[0].text) == ("end_turn", None, "one two three")
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", " two", "one")
    assert counted == ended.usage.input_tokens > 0


async def test_errors_are_those_of_anthropics_api(agents: MakeAgentBench, chat_model: Path) -> None:
    async def run(task: Task, client: AgentClient) -> float:
        async with client_of(client) as policy:
            with pytest.raises(anthropic.BadRequestError, match="top_k") as refused:
                await policy.messages.create(model="m", max_tokens=9, messages=GO, extra_body={"top_k": 3})
            assert str(refused.value.body).startswith("{'type': 'error', 'error': {'type': 'invalid_request_error'")
            with pytest.raises(anthropic.RequestTooLargeError):
                await policy.messages.create(model="m", max_tokens=9, messages=[{**GO[0], "content": "x" * 20_000}])
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
                await policy.messages.create(model="m", max_tokens=9, messages=[{**GO[0], "content": "x " * 400}])
            with pytest.raises(anthropic.APIStatusError, match="prompt is too long"):
                await asked(policy, "streamed", model="m", max_tokens=9, messages=[{**GO[0], "content": "y " * 400}])
            await policy.messages.create(model="m", max_tokens=9, messages=GO)
        async with anthropic.AsyncAnthropic(base_url=client.anthropic_url, api_key="sk-other") as stranger:
            with pytest.raises(anthropic.AuthenticationError):
                await stranger.messages.create(model="m", max_tokens=9, messages=GO)
        return 1.0

    rules, limits = Rules(max_turns=64, trajectory_tokens=200), AgentLimits(body_bytes=10_000)
    made = await agents(Saying(chat_model, adds), run=run, rules=rules, limits=limits)
    (trajectory,) = (await made.finished(lease(environment="agent", group_size=1))).group.trajectories
    assert (len(trajectory.turns), trajectory.stop_reason) == (1, "token_budget")


@pytest.mark.parametrize(("label", "name", "fields"), FIELDS, ids=[f"{case[0]}-{case[1]}" for case in FIELDS])
async def test_a_field_of_messages_is_what_its_label_says(
    agents: MakeAgentBench, chat_model: Path, label: str, name: str, fields: dict[str, Any]
) -> None:
    body = {"model": "m", "max_tokens": 50, "messages": GO, **fields}
    ((status, said),) = await answers(agents, chat_model, [("messages", json.dumps(body))])

    if label != "400":
        assert status == 200, said
        return
    assert (status, said["type"], said["error"]["type"]) == (400, "error", "invalid_request_error")
    assert said["error"]["message"].startswith(name), said


async def test_one_session_may_be_asked_by_both_apis(agents: MakeAgentBench, chat_model: Path) -> None:
    async def run(task: Task, client: AgentClient) -> float:
        async with client_of(client) as policy:
            first = await policy.messages.create(model="m", max_tokens=90, messages=GO)
        said = {"role": "assistant", "content": first.content[0].text}
        body = {"messages": [*GO, said, {"role": "user", "content": "more"}]}
        status, _ = await said_to(client, "chat/completions", json.dumps(body))
        return float(status == 200)

    made = await agents(Saying(chat_model, lambda _: "one"), run=run)
    (trajectory,) = (await made.finished(lease(environment="agent", group_size=1))).group.trajectories
    assert (len(trajectory.turns), len(trajectory.sequence_starts), trajectory.reward.reward) == (2, 0, 1.0)
