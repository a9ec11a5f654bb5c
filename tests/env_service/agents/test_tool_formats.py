"""Calls in the native formats of the model families."""

import pytest

from env_service.agents.tool_formats import read, shown_until

LOOK = {"look", "take"}

CALLS = {
    "hermes": 'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "north", "far": true}}\n</tool_call>',
    "cut off at the end": 'I look.\n<tool_call>{"name": "look", "arguments": {"at": "north", "far": true}}',
    "qwen coder": "I look.\n<tool_call>\n<function=look>\n<parameter=at>\nnorth\n</parameter>\n<parameter=far>\ntrue\n"
    "</parameter>\n</function>\n</tool_call>",
    "glm": "I look.\n<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>north</arg_value>\n<arg_key>far</arg_key>\n"
    "<arg_value>true</arg_value>\n</tool_call>",
    "mistral": 'I look.[TOOL_CALLS] [{"name": "look", "arguments": {"at": "north", "far": true}}]',
    "newer mistral": 'I look.[TOOL_CALLS]look[ARGS]{"at": "north", "far": true}',
    "mistral with an id": 'I look.[TOOL_CALLS]look[CALL_ID]abc[ARGS]{"at": "north", "far": true}',
    "llama": '{"name": "look", "parameters": {"at": "north", "far": true}}',
    "llama with its tag": 'I look.<|python_tag|>{"name": "look", "parameters": {"at": "north", "far": true}}',
    "pythonic": '[look(at="north", far=True)]',
    "pythonic with a tag": 'I look.<|python_tag|>look(at="north", far=True)',
}


@pytest.mark.parametrize("text", CALLS.values(), ids=CALLS.keys())
def test_a_call_is_read_in_each_format(text: str) -> None:
    reading = read(text, offered=LOOK)

    (call,) = reading.calls
    assert (call.name, dict(call.arguments)) == ("look", {"at": "north", "far": True})
    assert reading.text in ("I look.", "")


@pytest.mark.parametrize("text", CALLS.values(), ids=CALLS.keys())
def test_what_may_become_a_call_is_held_back(text: str) -> None:
    shown = [text[:end][: shown_until(text[:end])] for end in range(len(text) + 1)]

    assert all("I look.".startswith(each.rstrip()) for each in shown)


@pytest.mark.parametrize("text", CALLS.values(), ids=CALLS.keys())
def test_a_call_of_a_tool_that_is_not_offered_is_text(text: str) -> None:
    assert read(text, offered={"go"}).text == text
    assert read(text, offered=()).calls == ()


def test_several_calls_stand_in_one_answer() -> None:
    two = '<tool_call>{"name": "look", "arguments": {}}</tool_call>\n<tool_call>{"name": "take"}</tool_call>'
    llama = '{"name": "look", "parameters": {}}; {"name": "take", "parameters": {}}'

    for text in (two, llama, "[look(), take()]", '[TOOL_CALLS]look{}[TOOL_CALLS]take{"n": 1}'):
        assert [call.name for call in read(text, offered=LOOK).calls] == ["look", "take"]


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        '{"name": "look"}',
        '{"name": "look", "parameters": {}} and more',
        "[1, 2]",
        "[look(1)]",
        "[look(at={1})]",
        "[look(at=open('x'))]",
        "<tool_call>{broken",
        "[TOOL_CALLS][{",
        "[" * 5000,
        "{" * 5000,
        "<|python_tag|>import os",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert (read(text, offered=LOOK).text, read(text, offered=LOOK).calls) == (text, ())


def test_text_without_calls_is_shown_as_it_comes() -> None:
    assert shown_until("three < four") == len("three < four")
    assert shown_until("so: <tool") == len("so: ")
