"""Bodies of requests: one that is malformed is a 400."""

import json
from pathlib import Path

from tests.env_service.agents.raw_calls import GO, answers
from tests.env_service.agents.served import MakeAgentBench

HALF = r'"\ud800"'
DEEP = "[" * 3000 + "]" * 3000

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
    '{"input": [{"type": "reasoning", "id": "rs_1", "summary": []}]}',
    '{"input": [{"type": "reasoning", "id": "rs_1", "summary": []}], "tools": [{"type": "function", "name": "a"}]}',
    '{"input": [{"role": "user", "content": "go"}, {"type": "item_reference", "id": "msg_1"}]}',
    '{"input": "go", "instructions": 3}',
    '{"input": "go", "text": 3}',
    '{"input": "go", "text": {"format": 3}}',
    '{"input": "go", "text": {"format": "text"}}',
    '{"input": "go", "tools": [{"type": "function"}]}',
    '{"input": "go", "max_output_tokens": NaN}',
    '{"input": "go", "stream": 1}',
]


async def test_a_malformed_body_is_a_400(agents: MakeAgentBench, chat_model: Path) -> None:
    bodies = [("chat/completions", body) for body in MALFORMED_CHATS]
    bodies += [("responses", body) for body in MALFORMED_RESPONSES]
    asked = [(route, body.replace("MESSAGES", json.dumps(GO)).replace("HALF", HALF)) for route, body in bodies]
    said = await answers(agents, chat_model, asked)

    wrong = [(asked[place][1][:120], status) for place, (status, _) in enumerate(said) if status != 400]
    assert not wrong
    assert all(answer["error"]["message"] and answer["error"]["param"] for _, answer in said)


async def test_a_body_is_a_400_at_whatever_depth_it_cannot_be_handled(agents: MakeAgentBench, chat_model: Path) -> None:
    function = '{"type": "function", "function": {"name": "a", "parameters": {"x": NESTED}}}'
    body = '{"messages": MESSAGES, "tools": [FUNCTION]}'.replace("FUNCTION", function).replace(
        "MESSAGES", json.dumps(GO)
    )
    asked = [("chat/completions", body.replace("NESTED", "[" * depth + "]" * depth)) for depth in range(900, 1000, 4)]

    said = await answers(agents, chat_model, asked)

    assert {status for status, _ in said} == {200, 400}


async def test_a_tool_or_an_item_of_another_kind_is_refused_by_that(agents: MakeAgentBench, chat_model: Path) -> None:
    tools = '"tools": [{"type": "function", "name": "a", "function": {"name": "a"}}, {"type": "web_search"}]'
    item = '{"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": "x"}'
    asked = [
        ("chat/completions", f'{{"messages": {json.dumps(GO)}, {tools}}}'),
        ("responses", f'{{"input": "go", {tools}}}'),
        ("responses", f'{{"input": [{{"role": "user", "content": "go"}}, {item}]}}'),
    ]

    said = [answer["error"]["message"] for _, answer in await answers(agents, chat_model, asked)]

    tool = "tools.1: it is of type web_search, and such tools are not run here; expected a function with a name"
    expected = "expected a message, function_call or function_call_output"
    assert said == [tool, tool, f"input.1: it is of type custom_tool_call; {expected}"]
