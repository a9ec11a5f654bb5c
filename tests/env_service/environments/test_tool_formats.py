"""Calls in the native formats of the model families."""

import random
import re
import time
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import JsonValue

from env_service.environments.interface import Tool
from env_service.environments.rules import ToolFormat
from env_service.environments.tokenization import Tokenization
from env_service.environments.tool_formats import ALL_FORMATS, family_of, read, shown_until
from tests.env_service.chat_models import model_with, text_of


def tool(name: str, **types: str) -> Tool:
    properties: dict[str, JsonValue] = {key: {"type": kind} for key, kind in types.items()}
    parameters: dict[str, JsonValue] = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "x", "parameters": parameters}}


TOOLS = (tool("look", at="string", far="boolean"), tool("take", n="integer"))

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
    "gemma": 'I look.<|tool_call>call:look{at:<|"|>north<|"|>,far:true}<tool_call|>',
    "functiongemma": "I look.<start_function_call>call:look{at:<escape>north<escape>,far:true}<end_function_call>",
    "pythonic": '[look(at="north", far=True)]',
    "pythonic with a tag": 'I look.<|python_tag|>look(at="north", far=True)',
}


@pytest.mark.parametrize("text", CALLS.values(), ids=CALLS.keys())
def test_a_call_is_read_in_each_format(text: str) -> None:
    reading = read(text, tools=TOOLS)

    (call,) = reading.calls
    assert (call.name, dict(call.arguments)) == ("look", {"at": "north", "far": True})
    assert reading.text in ("I look.", "")


@pytest.mark.parametrize("text", CALLS.values(), ids=CALLS.keys())
def test_what_may_become_a_call_is_held_back(text: str) -> None:
    shown = [text[:end][: shown_until(text[:end])] for end in range(len(text) + 1)]

    assert all("I look.".startswith(each.rstrip()) for each in shown)


@pytest.mark.parametrize("text", CALLS.values(), ids=CALLS.keys())
def test_a_call_of_a_tool_that_is_not_offered_is_a_fault_if_it_is_marked_as_one(text: str) -> None:
    reading = read(text, tools=(tool("go"),))

    marked = not text.startswith(("{", "["))
    assert reading.fault == ("there is no tool 'look'; there are go" if marked else "")
    assert [call.name for call in reading.calls] == (["look"] if marked else []), "so that an environment can answer it"


def test_several_calls_stand_in_one_answer() -> None:
    two = "".join(f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>\n' for name in ("look", "take"))
    llama = '{"name": "look", "parameters": {}}; {"name": "take", "parameters": {}}'

    gemma = "<|tool_call>call:look{}<tool_call|><|tool_call>call:take{n:1}<tool_call|>"
    for text in (two, llama, gemma, "[look(), take()]", '[TOOL_CALLS]look{}[TOOL_CALLS]take{"n": 1}'):
        assert [call.name for call in read(text, tools=TOOLS).calls] == ["look", "take"]


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
        "<tool_call></tool_call>",
        '<tool_call>{"name": "take"}</tool_call>',
        '<tool_call>so: {"name": "take", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "take", "arguments": "{}"}</tool_call>',
        "[TOOL_CALLS][{",
        "[" * 5000,
        "{" * 5000,
        "<|python_tag|>import os",
        "<|tool_call>",
        "<|tool_call>call:look{at:north",
        "<|tool_call>call:look{at}<tool_call|>",
        "<|tool_call>call:look{a[t:1}<tool_call|>",
        '<|tool_call>call:look{at:<|"|>north}<tool_call|>',
        "<|tool_call>call:look{at:1}, I think",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    reading = read(text, tools=TOOLS)
    assert (reading.text, reading.calls) == (text, ())
    assert bool(reading.fault) == text.startswith(("<", "[TOOL_CALLS]")), "a mark promises a call"


def test_text_without_calls_is_shown_as_it_comes() -> None:
    assert shown_until("three < four") == len("three < four")
    assert shown_until("so: <tool") == len("so: ")


FAMILIES: dict[str, ToolFormat] = {
    "hermes": "hermes",
    "qwen coder": "qwen_coder",
    "glm": "glm",
    "newer mistral": "mistral",
    "llama": "llama",
    "pythonic": "pythonic",
    "gemma": "gemma",
    "functiongemma": "gemma",
}


@pytest.mark.parametrize("written", FAMILIES)
@pytest.mark.parametrize("name", ALL_FORMATS)
def test_a_format_that_is_named_reads_its_own_calls_alone(written: str, name: ToolFormat) -> None:
    reading = read(CALLS[written], tools=TOOLS, formats=(name,))

    assert bool(reading.calls) == (name == FAMILIES[written])
    tagged = ("hermes", "qwen_coder", "glm")
    shared = name in ("granite", *tagged) and FAMILIES[written] in tagged
    assert bool(reading.fault) == (shared and not reading.calls), "they have a mark in common"


def test_what_is_bare_in_another_format_is_shown_as_it_comes() -> None:
    assert shown_until('{"name": "loo', formats=("hermes",)) == len('{"name": "loo')
    assert shown_until('{"name": "loo', formats=("llama",)) == 0


def test_an_argument_is_of_the_type_that_its_tool_wants() -> None:
    coder = (
        "<tool_call><function=look><parameter=at>7</parameter><parameter=far>true</parameter></function></tool_call>"
    )
    glm = "<tool_call>take<arg_key>n</arg_key><arg_value>7</arg_value></tool_call>"

    assert read(coder, tools=TOOLS).calls[0].arguments == {"at": "7", "far": True}
    assert read(glm, tools=TOOLS).calls[0].arguments == {"n": 7}


OPTIONAL_TEXT: JsonValue = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}


GEMMA: dict[str, JsonValue] = {
    "{}": {},
    "{ a : 1 , b : -2.5e3 }": {"a": 1, "b": -2500.0},
    "{a:null,b:false,c:[]}": {"a": None, "b": False, "c": []},
    '{a:[1,{b:<|"|>x, {y}: ]<|"|>},[2]],c:{d:<|"|><|"|>}}': {"a": [1, {"b": "x, {y}: ]"}, [2]], "c": {"d": ""}},
    '{<|"|>a b<|"|>:<|"|>"q" <escape><|"|>}': {"a b": '"q" <escape>'},
    "{a:north,b:two words}": {"a": "north", "b": "two words"},
    "{a:1,}": {"a": 1},
}


@pytest.mark.parametrize(("text", "arguments"), GEMMA.items())
def test_gemmas_own_form_of_arguments_is_read(text: str, arguments: JsonValue) -> None:
    (call,) = read(f"<|tool_call>call:look{text}<tool_call|>", tools=(), formats=("gemma",)).calls
    assert call.arguments == arguments


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (OPTIONAL_TEXT, "123", "123"),
        (OPTIONAL_TEXT, '{"a": 1}', '{"a": 1}'),
        (OPTIONAL_TEXT, '"quoted"', "quoted"),
        (OPTIONAL_TEXT, "null", None),
        ({"type": ["string", "null"]}, "true", "true"),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, "123", 123),
        ({"anyOf": [{"type": "string"}, {"type": "number"}]}, "12", 12),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "[1]", [1]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "12", 12),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": "yes"}, "yes", "yes"),
        ({"type": "integer"}, "1.5", 1.5),
        ({"anyOf": [{"$ref": "#/$defs/A"}, {"type": "string"}]}, "12", 12),
        ({}, "12", 12),
    ],
)
@pytest.mark.parametrize("family", ["qwen_coder", "glm"])
def test_an_argument_stays_text_where_its_tool_takes_that_and_not_what_it_would_be(
    schema: JsonValue, text: str, value: JsonValue, family: ToolFormat
) -> None:
    parameters: dict[str, JsonValue] = {"type": "object", "properties": {"at": schema}}
    tools: list[Tool] = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
    written = {
        "qwen_coder": f"<tool_call><function=look><parameter=at>\n{text}\n</parameter></function></tool_call>",
        "glm": f"<tool_call>look<arg_key>at</arg_key><arg_value>{text}</arg_value></tool_call>",
    }[family]

    (call,) = read(written, tools=tools, formats=(family,)).calls

    assert call.arguments == {"at": value}


def test_what_can_be_read_beside_a_broken_call_is_kept_and_the_fault_told() -> None:
    text = '<tool_call>{"name": "take", "arguments": {}}</tool_call><tool_call>{"name": </tool_call>'

    reading = read(text, tools=TOOLS)

    assert [call.name for call in reading.calls] == ["take"]
    assert reading.fault == """a call cannot be read in the format hermes: '{"name": '"""


def test_without_tools_every_name_is_a_call() -> None:
    assert read(CALLS["hermes"], tools=()).calls[0].name == "look"
    assert not read(CALLS["hermes"], tools=()).fault


TEMPLATES: dict[ToolFormat | None, str] = {
    "hermes": "<tool_call>{{ call | tojson }}</tool_call>",
    "qwen_coder": "<tool_call>\n<function={{ call.name }}>",
    "glm": "<tool_call>{{ call.name }}<arg_key>",
    "mistral": "[TOOL_CALLS]",
    "llama": """{"name": {{ name }}, "parameters": """,
    "pythonic": "<|tool_call_start|>[",
    "gemma": "{{ '<|tool_call>call:' + call.name }}",
    None: "<|im_start|>",
}


@pytest.mark.parametrize(("family", "template"), TEMPLATES.items())
def test_a_family_is_known_by_its_template(family: ToolFormat | None, template: str) -> None:
    assert family_of(template) == family


def test_a_template_that_shows_no_tools_says_nothing_about_calls(tmp_path: Path) -> None:
    assert Tokenization(model_with("chatml", tmp_path)).call_format is None
    assert Tokenization(model_with("tools_in_system", tmp_path)).call_format == "hermes"


GEMMA_TEXTS = ("", "north", "a, b", "x:y", "{", "}]", '"q"', "two\nlines", "<esc", "true", "12")


def _drawn(chance: random.Random, depth: int) -> JsonValue:
    kind = chance.randrange(6 if depth else 4)
    if kind < 2:
        return chance.choice(GEMMA_TEXTS) if kind else chance.choice((True, False))
    if kind < 4:
        return chance.choice((1.5, -0.25, 1e20)) if kind == 2 else chance.randrange(-5, 1000)
    if kind == 4:
        return [_drawn(chance, depth - 1) for _ in range(chance.randrange(4))]
    return _drawn_arguments(chance, depth - 1)


def _drawn_arguments(chance: random.Random, depth: int) -> dict[str, JsonValue]:
    return {f"{chance.choice('abc')}{number}": _drawn(chance, depth) for number in range(chance.randrange(5))}


def test_arguments_as_gemmas_template_writes_them_are_read_back() -> None:
    before, _, _ = text_of("results_within_calls").partition("{{- bos_token")
    written = ImmutableSandboxedEnvironment().from_string(f"{before}{{{{- written(arguments) -}}}}")
    chance = random.Random(1)
    for _ in range(500):
        arguments = _drawn_arguments(chance, 3)
        text = f"<|tool_call>call:look{written.render(arguments=arguments)}<tool_call|>"
        (call,) = read(text, tools=(), formats=("gemma",)).calls
        assert call.arguments == arguments


PIECES = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<parameter=", "</parameter>", "a", ">", " ", "\n")
ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def test_what_is_found_in_one_pass_is_what_the_patterns_find() -> None:
    chance = random.Random(3)
    found = 0
    for _ in range(3000):
        text = "".join(chance.choices(PIECES, k=chance.randrange(24)))
        glm = read(f"<tool_call>take{text}</tool_call>", tools=(), formats=("glm",))
        slow = {key.strip(): value for key, value in ARGUMENT.findall(text)}
        name = f"take{text.partition('<arg_key>')[0]}".strip()
        whole = name.isalpha() and name == f"take{ARGUMENT.sub('', text)}".strip()
        assert [call.arguments for call in glm.calls] == ([slow] if whole else []), text
        coder = read(f"<function=take>{text}</function>", tools=(), formats=("qwen_coder",))
        given = dict(PARAMETER.findall(text))
        whole = not PARAMETER.sub("", text).strip()
        assert [call.arguments for call in coder.calls] == ([given] if whole else []), text
        found += bool(given and coder.calls) + bool(slow and glm.calls)
    assert found > 20, "most texts are no calls, some are"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm", "<tool_call>f" + "<arg_key>a</arg_key><arg_value>" * 1500),
        ("glm", "<tool_call>f" + "<arg_key>" * 20_000),
        ("qwen_coder", "<function=f>" + "<parameter=a>" * 20_000),
        ("qwen_coder", "<function=f>" + "<parameter=" * 20_000),
        ("qwen_coder", "<function=" * 20_000),
        ("hermes", "<tool_call></tool_call>" * 10_000),
        ("llama", "{}" * 50_000),
        ("kimi", "<|tool_call_begin|>" * 10_000),
        ("gemma", "<|tool_call>" * 20_000),
        ("gemma", "<|tool_call>call:f{a:" * 10_000),
        ("gemma", "<|tool_call>call:f{a:[" * 10_000),
        ("gemma", '<|tool_call>call:f{a:<|"|>' * 10_000),
        ("gemma", "<|tool_call>call:f{a:[" + "1," * 20_000),
        ("gemma", "<|tool_call>call:f{a:" + "[" * 100_000),
    ],
)
def test_a_long_text_without_an_end_holds_nobody_up(name: ToolFormat, text: str) -> None:
    began = time.process_time()

    assert not read(text, tools=(), formats=(name,)).calls

    assert time.process_time() - began < 2.0, "far more than one pass takes, and far less than one for each mark"
