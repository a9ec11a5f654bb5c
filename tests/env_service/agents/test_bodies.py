"""What a body of a request may hold: fields that would be ignored, and bodies that are malformed, are a 400."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from env_service.environments.interface import AgentClient, Task
from tests.env_service.agents.served import MakeAgentBench, Saying
from tests.env_service.peers import lease

GO: Any = [{"role": "user", "content": "go"}]
HALF = r'"\ud800"'
DEEP = "[" * 3000 + "]" * 3000

UNSERVED: list[tuple[str, Any]] = [
    ("chat_template_kwargs", {"enable_thinking": False}),
    ("continue_final_message", True),
    ("structured_outputs", {"regex": "a"}),
    ("guided_json", {"type": "object"}),
    ("guided_choice", ["a"]),
    ("bad_words", ["a"]),
    ("min_tokens", 5),
    ("stop_token_ids", [2]),
    ("functions", [{"name": "add"}]),
    ("tool_choice", {"type": "function", "function": {"name": "add"}}),
    ("parallel_tool_calls", False),
    ("reasoning_effort", "low"),
    ("top_logprobs", 3),
    ("store", True),
    ("n_probs", 1),
]
UNSERVED_BY_RESPONSES: list[tuple[str, Any]] = [
    ("reasoning", {"effort": "low"}),
    ("conversation", "conv_1"),
    ("prompt", {"id": "pmpt_1"}),
    ("background", True),
    ("max_tool_calls", 1),
    ("tool_choice", {"type": "function", "name": "add"}),
    ("parallel_tool_calls", False),
    ("truncation", "auto"),
    ("include", ["message.output_text.logprobs"]),
    ("n_probs", 1),
]
MALFORMED_CHATS = [
    "",
    "[]",
    "null",
    '"go"',
    "{}",
    DEEP,
    '{"messages": "go"}',
    '{"messages": {}}',
    '{"messages": []}',
    '{"messages": [3]}',
    '{"messages": [{"role": 3, "content": "go"}]}',
    '{"messages": [{"role": "user", "content": 3}]}',
    '{"messages": [{"role": "user", "content": {"text": "go"}}]}',
    '{"messages": [{"role": "user", "content": [3]}]}',
    '{"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}',
    '{"messages": [{"role": "user", "content": HALF}]}',
    '{"messages": [{"role": HALF, "content": "go"}]}',
    '{"messages": [{"role": "user", "content": [{"type": HALF}]}]}',
    '{"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": 3}]}',
    '{"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": true}]}',
    '{"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": {"function": 3}}]}',
    '{"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": [{"function": {}}]}]}',
    '{"messages": MESSAGES, "tools": 3}',
    '{"messages": MESSAGES, "tools": [3]}',
    '{"messages": MESSAGES, "tools": [{"type": "function"}]}',
    '{"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": 3}}]}',
    '{"messages": MESSAGES, "max_tokens": NaN}',
    '{"messages": MESSAGES, "seed": NaN}',
    '{"messages": MESSAGES, "temperature": 1e999}',
    '{"messages": MESSAGES, "stream": "yes"}',
    '{"messages": MESSAGES, "stop": {"a": 1}}',
    '{"messages": MESSAGES, "response_format": "text"}',
]
MALFORMED_RESPONSES = [
    "[]",
    "{}",
    '{"input": 3}',
    '{"input": []}',
    '{"input": [3]}',
    '{"input": [{"type": "function_call", "call_id": "1", "name": "add"}]}',
    '{"input": [{"type": "function_call_output", "call_id": "1", "output": 3}]}',
    '{"input": HALF}',
    '{"input": "go", "instructions": 3}',
    '{"input": "go", "text": 3}',
    '{"input": "go", "text": {"format": 3}}',
    '{"input": "go", "text": {"format": "text"}}',
    '{"input": "go", "tools": [{"type": "function"}]}',
    '{"input": "go", "max_output_tokens": NaN}',
    '{"input": "go", "stream": 1}',
]


async def said_to(client: AgentClient, route: str, body: str) -> tuple[int, Mapping[str, Any]]:
    headers = {"Authorization": f"Bearer {client.key}"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{client.base_url}/{route}", data=body.encode(), headers=headers) as said,
    ):
        text = await said.text()
        return said.status, json.loads(text) if text.startswith("{") else {"text": text}


async def answers(
    agents: MakeAgentBench, model: Path, asked: list[tuple[str, str]]
) -> list[tuple[int, Mapping[str, Any]]]:
    """What is said to each body of a route, in one session."""
    found = []

    async def asks(task: Task, client: AgentClient) -> float:
        for route, body in asked:
            found.append(await said_to(client, route, body))
        status, _ = await said_to(client, "chat/completions", json.dumps({"model": "m", "messages": GO}))
        assert status == 200
        return 1.0

    made = await agents(Saying(model, lambda _: "one"), run=asks)
    await made.finished(lease(environment="agent", group_size=1))
    return found


async def test_a_field_that_would_be_ignored_is_refused_by_its_name(agents: MakeAgentBench, chat_model: Path) -> None:
    chats = [("chat/completions", name, {"messages": GO, name: value}) for name, value in UNSERVED]
    chats.append(("chat/completions", "logprobs", {"messages": GO, "logprobs": True, "stream": True}))
    others = [("responses", name, {"input": "go", name: value}) for name, value in UNSERVED_BY_RESPONSES]
    others.append(("responses", "text.verbosity", {"input": "go", "text": {"verbosity": "low"}}))
    asked = [*chats, *others]
    said = await answers(agents, chat_model, [(route, json.dumps(body)) for route, _, body in asked])

    served = [(asked[place][1], status) for place, (status, _) in enumerate(said) if status != 400]
    assert not served
    for (_, name, _), (_, answer) in zip(asked, said, strict=True):
        error = answer["error"]
        assert (error["param"], error["code"], error["type"]) == (name, "unsupported_value", "invalid_request_error")
        assert error["message"].startswith(f"{name}: ")
        assert "leave the field out" in error["message"]


async def test_what_clients_say_by_default_is_taken(agents: MakeAgentBench, chat_model: Path) -> None:
    both: dict[str, Any] = {
        "model": "m",
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "temperature": None,
        "unknown": None,
    }
    chat: dict[str, Any] = {"n": 1, "seed": 3, "logprobs": False, "top_logprobs": None, "stop": [],
            "stream": False, "response_format": {"type": "text"}, "logit_bias": {}, "functions": None}  # fmt: skip
    responses = {"include": ["reasoning.encrypted_content"], "reasoning": {"effort": None, "summary": None},
                 "truncation": "disabled", "text": {"format": {"type": "text"}}, "background": False}  # fmt: skip
    asked = [
        ("chat/completions", json.dumps({**both, **chat, "messages": GO})),
        ("responses", json.dumps({**both, **responses, "input": "go"})),
    ]

    assert [status for status, _ in await answers(agents, chat_model, asked)] == [200, 200]


async def test_a_malformed_body_is_a_400(agents: MakeAgentBench, chat_model: Path) -> None:
    bodies = [("chat/completions", body) for body in MALFORMED_CHATS]
    bodies += [("responses", body) for body in MALFORMED_RESPONSES]
    asked = [(route, body.replace("MESSAGES", json.dumps(GO)).replace("HALF", HALF)) for route, body in bodies]
    said = await answers(agents, chat_model, asked)

    wrong = [(asked[place][1][:120], status) for place, (status, _) in enumerate(said) if status != 400]
    assert not wrong
    assert all(answer["error"]["message"] and answer["error"]["param"] for _, answer in said)
