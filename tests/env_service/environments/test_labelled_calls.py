"""Calls of tools in each family's own words, labelled by hand from the chat templates, model cards and format guides
that the families publish: what a reader of these would say is called, and where there is a fault.

A fault is what the policy is told (and charged) for: a mark was written and what follows is no call. Without a mark,
what is no call is text.
"""

# ruff: noqa: E501 - a case is a line
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import JsonValue

from env_service.environments.interface import Tool
from env_service.environments.rules import ToolFormat
from env_service.environments.tool_formats import ALL_FORMATS, family_of, read, shown_until

Calls = Sequence[tuple[str, Mapping[str, Any]]]


def tool(name: str, **types: str) -> Tool:
    properties: dict[str, JsonValue] = {key: {"type": kind} for key, kind in types.items()}
    parameters: dict[str, JsonValue] = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "x", "parameters": parameters}}


TOOLS = (
    tool("look", at="string", far="boolean"),
    tool("take", n="integer"),
    tool("write", text="string", **{"in": "object"}),
)

NORTH = '{"at": "north", "far": true}'
LOOK: Calls = [("look", {"at": "north", "far": True})]
BOTH: Calls = [*LOOK, ("take", {"n": 2})]
NONE: Calls = ()

BRACES = '{"text": "}{ \\"}\\" ]", "in": {"a": {"b": [{}, {"c": "}}"}]}}}'
"""Braces in strings, in quotes, and nested."""
BRACED: Calls = [("write", json.loads(BRACES))]
ESCAPES = '{"text": "caf\\u00e9 \\ud83d\\ude00 \\u4f60\\n\\t\\\\"}'
ESCAPED: Calls = [("write", {"text": "café 😀 你\n\t\\"})]
RAW = '{"text": "café 😀 你"}'
RAWLY: Calls = [("write", {"text": "café 😀 你"})]
HALF_A_PAIR = '{"text": "\\ud83d"}'
"""Half of a surrogate pair is no character: no text file, request or tokenizer takes it."""
NOT_A_NUMBER = '{"n": NaN}'
TOO_LARGE = '{"n": 1e999}'
NO_JSON = "{at: 'north'}"
CUT = '{"at": "nor'


@dataclass(frozen=True)
class Family:
    """Format of a family of models: a call of `name` with `arguments` as JSON, several of them, and the text before."""

    format: ToolFormat
    before: str
    one: str
    between: str
    after: str

    def call(self, *calls: tuple[str, str], closed: bool = True) -> str:
        written = [self.one.replace("NAME", name).replace("JSON", arguments) for name, arguments in calls]
        written = [each.replace("INDEX", str(index)) for index, each in enumerate(written)]
        return self.before + self.between.join(written) + (self.after if closed else "")


# The word `one` is the text of a call up to the end of its arguments and what always closes them.
FAMILIES: Mapping[str, Family] = {
    # Qwen2.5, Qwen3, Hermes 2 Pro and 3, Granite 4: a JSON object between tags.
    "hermes": Family(
        "hermes", "", '<tool_call>\n{"name": "NAME", "arguments": JSON}\n</tool_call>', "\n", ""
    ),
    # Llama 3.1 to 3.3: "parameters"; several calls are divided by "; ".
    "llama": Family("llama", "", '{"name": "NAME", "parameters": JSON}', "; ", ""),
    "llama, behind its tag": Family("llama", "<|python_tag|>", '{"name": "NAME", "parameters": JSON}', "; ", ""),
    # Mistral up to v7: a list; from v11 on a name and arguments.
    "mistral": Family("mistral", "[TOOL_CALLS] [", '{"name": "NAME", "arguments": JSON}', ", ", "]"),
    "mistral v11": Family("mistral", "", "[TOOL_CALLS]NAME[ARGS]JSON", "", ""),
    # Granite 3.0 to 3.3, Phi-4-mini: a list behind a mark.
    "granite": Family("granite", "<|tool_call|>[", '{"name": "NAME", "arguments": JSON}', ", ", "]"),
    "granite 3.1": Family("granite", "<tool_call>[", '{"name": "NAME", "arguments": JSON}', ", ", "]"),
    "granite, arguments first": Family("granite", "<|tool_call|> [", '{"arguments": JSON, "name": "NAME"}', ",\n", "]"),
    # DeepSeek-V3 and R1: a type, a name, and arguments in a fence; V3.1: a name and arguments.
    "deepseek v3": Family(
        "deepseek",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nJSON\n```<｜tool▁call▁end｜>",
        "\n",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek v3.1": Family(
        "deepseek",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON<｜tool▁call▁end｜>",
        "",
        "<｜tool▁calls▁end｜>",
    ),
    # Kimi-K2: an id that holds the name.
    "kimi": Family(
        "kimi",
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>JSON<|tool_call_end|>",
        "",
        "<|tool_calls_section_end|>",
    ),
    # gpt-oss: a message to a recipient, who stands behind the channel or behind the role. The prompt ends in the role.
    "harmony": Family(
        "harmony",
        "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant",
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>JSON<|call|>",
        "<|start|>assistant",
        "",
    ),
    "harmony, to whom behind the role": Family(
        "harmony",
        "",
        " to=functions.NAME<|channel|>commentary json<|message|>JSON<|call|>",
        "<|start|>assistant",
        "",
    ),
}  # fmt: skip


def labelled(family: Family) -> Sequence[tuple[str, str, Calls, bool]]:
    """Cases alike in all families that write JSON: the text, its calls, and if there is a fault."""
    marked = not (family.before + family.one).startswith("{")
    good = ("look", NORTH)
    last = family.one.partition("JSON")[0].replace("NAME", "look").replace("INDEX", "0")
    return (
        ("one", family.call(good), LOOK, False),
        ("two", family.call(good, ("take", '{"n": 2}')), BOTH, False),
        ("the same one twice", family.call(good, good), [*LOOK, *LOOK], False),
        ("no arguments", family.call(("take", "{}")), [("take", {})], False),
        ("over several lines", family.call(("look", '{\n  "at": "north",\n  "far": true\n}')), LOOK, False),
        ("nested braces", family.call(("write", BRACES)), BRACED, False),
        ("unicode escapes", family.call(("write", ESCAPES)), ESCAPED, False),
        ("other characters as they are", family.call(("write", RAW)), RAWLY, False),
        ("half a character", family.call(("write", HALF_A_PAIR)), NONE, marked),
        ("no number", family.call(("take", NOT_A_NUMBER)), NONE, marked),
        ("a number beyond all", family.call(("take", TOO_LARGE)), NONE, marked),
        ("no JSON", family.call(("look", NO_JSON)), NONE, marked),
        ("arguments that are a list", family.call(("look", "[1]")), NONE, marked),
        ("arguments that are text", family.call(("look", '"north"')), NONE, marked),
        ("cut off in the arguments", family.before + last + CUT, NONE, marked),
        ("cut off before the arguments", family.before + last, NONE, marked),
    )


CASES = [
    pytest.param(family.format, text, calls, fault, id=f"{name}: {what}")
    for name, family in FAMILIES.items()
    for what, text, calls, fault in labelled(family)
]


@pytest.mark.parametrize(("name", "text", "calls", "fault"), CASES)
def test_what_a_family_writes_is_read_as_it_is_meant(name: ToolFormat, text: str, calls: Calls, fault: bool) -> None:
    reading = read(text, tools=TOOLS, formats=(name,))
    assert [(call.name, dict(call.arguments)) for call in reading.calls] == list(calls)
    assert bool(reading.fault) == fault


@pytest.mark.parametrize(("name", "text", "calls", "fault"), CASES)
def test_it_is_read_alike_where_the_format_is_not_known(name: ToolFormat, text: str, calls: Calls, fault: bool) -> None:
    reading = read(text, tools=TOOLS)
    assert [(call.name, dict(call.arguments)) for call in reading.calls] == list(calls)
    assert bool(reading.fault) == fault


D_BEGIN, D_CALL, D_SEP, D_END = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)
K_BEGIN, K_CALL, K_ARGS, K_END = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
HERMES = FAMILIES["hermes"].call(("look", NORTH))
CODER = "<tool_call>\n<function=look>\n<parameter=at>\nnorth\n</parameter>\n<parameter=far>\ntrue\n</parameter>\n</function>\n</tool_call>"
CODER_WRITES = "<tool_call>\n<function=write>\n<parameter=text>\nTEXT\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>north</arg_value>\n<arg_key>far</arg_key>\n<arg_value>true</arg_value>\n</tool_call>"
GLM_WRITES = "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>TEXT</arg_value>\n</tool_call>"
PYTHON = "[look(at='north', far=True)]"

OWN: Sequence[tuple[ToolFormat, str, str, Calls, bool]] = (
    ("hermes", "text before", "I look.\n" + HERMES, LOOK, False),
    ("hermes", "text behind", HERMES + "\nSo.", LOOK, False),
    ("hermes", "its end is the stop text", HERMES.removesuffix("</tool_call>"), LOOK, False),
    ("hermes", "one is broken", HERMES + '\n<tool_call>\n{"name": "take", "arg', LOOK, True),
    ("hermes", "its own end in a string", '<tool_call>{"name": "write", "arguments": {"text": "a </tool_call> b"}}</tool_call>', [("write", {"text": "a </tool_call> b"})], False),
    ("hermes", "its own mark in a string", '<tool_call>{"name": "write", "arguments": {"text": "<tool_call>"}}</tool_call>', [("write", {"text": "<tool_call>"})], False),
    ("hermes", "words within the tags", "<tool_call>\nlook north\n</tool_call>", NONE, True),
    ("hermes", "arguments in quotes", '<tool_call>{"name": "take", "arguments": "{\\"n\\": 2}"}</tool_call>', NONE, True),
    ("hermes", "no name", '<tool_call>{"arguments": {}}</tool_call>', NONE, True),
    ("hermes", "a name that is none", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', NONE, True),
    ("hermes", "a tool that is not there", '<tool_call>{"name": "go", "arguments": {}}</tool_call>', [("go", {})], True),
    ("hermes", "nothing", "I do not look.", NONE, False),
    ("qwen_coder", "one", CODER, LOOK, False),
    ("qwen_coder", "two", CODER + "\n<tool_call>\n<function=take>\n<parameter=n>\n2\n</parameter>\n</function>\n</tool_call>", BOTH, False),
    ("qwen_coder", "two in a pair of tags", CODER.replace("\n</tool_call>", "\n<function=take>\n<parameter=n>\n2\n</parameter>\n</function>\n</tool_call>"), BOTH, False),
    ("qwen_coder", "no arguments", "<tool_call>\n<function=take>\n</function>\n</tool_call>", [("take", {})], False),
    ("qwen_coder", "cut off in an argument", CODER[: CODER.index("th\n")], NONE, True),
    ("qwen_coder", "cut off between arguments", CODER[: CODER.index("<parameter=far")], NONE, True),
    ("qwen_coder", "cut off in its name", "<tool_call>\n<function=lo", NONE, True),
    ("qwen_coder", "no escapes: as it stands", CODER_WRITES.replace("TEXT", "caf\\u00e9 {\"}{\""), [("write", {"text": "caf\\u00e9 {\"}{\""})], False),
    ("qwen_coder", "text that looks like JSON", CODER_WRITES.replace("TEXT", '{"a": 1}'), [("write", {"text": '{"a": 1}'})], False),
    ("qwen_coder", "over several lines", CODER_WRITES.replace("TEXT", "a\n\n  b"), [("write", {"text": "a\n\n  b"})], False),
    ("qwen_coder", "an object", "<tool_call>\n<function=write>\n<parameter=in>\n{\"a\": {\"b\": [1]}}\n</parameter>\n</function>\n</tool_call>", [("write", {"in": {"a": {"b": [1]}}})], False),
    ("glm", "one", GLM, LOOK, False),
    ("glm", "two", GLM + "\n<tool_call>take\n<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n</tool_call>", BOTH, False),
    ("glm", "no arguments", "<tool_call>take\n</tool_call>", [("take", {})], False),
    ("glm", "on one line", GLM.replace("\n", ""), LOOK, False),
    ("glm", "cut off in an argument", GLM[: GLM.index("th</arg_value>")], NONE, True),
    ("glm", "cut off in a key", GLM[: GLM.index("ar</arg_key>")], NONE, True),
    ("glm", "an argument without a value", "<tool_call>look\n<arg_key>at</arg_key>\n</tool_call>", NONE, True),
    ("glm", "no escapes: as it stands", GLM_WRITES.replace("TEXT", "caf\\u00e9 {\"}{\""), [("write", {"text": "caf\\u00e9 {\"}{\""})], False),
    ("glm", "words within the tags", "<tool_call>I look north</tool_call>", NONE, True),
    ("mistral", "text before", f"I look.[TOOL_CALLS]look[ARGS]{NORTH}", LOOK, False),
    ("mistral", "with an id", f"[TOOL_CALLS]look[CALL_ID]a1b2c3d4e[ARGS]{NORTH}", LOOK, False),
    ("mistral", "thought before", f'[THINK]I might [TOOL_CALLS]take[ARGS]{{"n": 1}}[/THINK][TOOL_CALLS]look[ARGS]{NORTH}', LOOK, False),
    ("mistral", "no name", f"[TOOL_CALLS][ARGS]{NORTH}", NONE, True),
    ("mistral", "one of the list is broken", f'[TOOL_CALLS][{{"name": "look", "arguments": {NORTH}}}, {{"name": 3}}]', LOOK, True),
    ("mistral", "an empty list", "[TOOL_CALLS][]", NONE, True),
    ("llama", "its old name of a function", '{"type": "function", "name": "look", "parameters": ' + NORTH + "}", LOOK, False),
    ("llama", "JSON that is an answer", '{"answer": 3}', NONE, False),
    ("llama", "JSON in the midst of an answer", f'I look. {{"name": "look", "parameters": {NORTH}}}', NONE, False),
    ("llama", "code behind its tag", "<|python_tag|>print(1)", NONE, True),
    ("pythonic", "one", PYTHON, LOOK, False),
    ("pythonic", "two", "[look(at='north', far=True), take(n=2)]", BOTH, False),
    ("pythonic", "no arguments", "[take()]", [("take", {})], False),
    ("pythonic", "marked", f"<|python_start|>{PYTHON}<|python_end|>", LOOK, False),
    ("pythonic", "marked, its end is the stop text", f"<|tool_call_start|>{PYTHON}", LOOK, False),
    ("pythonic", "nested", """[write(text="}{ '", more={'a': [1]})]""", [("write", {"text": "}{ '", "more": {"a": [1]}})], False),
    ("pythonic", "escapes", r"[write(text='caf\u00e9 \U0001F600')]", [("write", {"text": "café 😀"})], False),
    ("pythonic", "half a character", r"<|python_start|>[write(text='\ud83d')]<|python_end|>", NONE, True),
    ("pythonic", "a number beyond all", "<|python_start|>[take(n=1e999)]<|python_end|>", NONE, True),
    ("pythonic", "cut off", "[look(at='nor", NONE, False),
    ("pythonic", "cut off behind its mark", "<|python_start|>[look(at='nor", NONE, True),
    ("pythonic", "arguments without a name", "<|python_start|>[look('north')]<|python_end|>", NONE, True),
    ("pythonic", "arguments that are computed", "<|python_start|>[look(at=f())]<|python_end|>", NONE, True),
    ("pythonic", "a list of others", "[1, 2]", NONE, False),
    ("granite", "text before", f'I look.\n<|tool_call|>[{{"name": "look", "arguments": {NORTH}}}]', LOOK, False),
    ("granite", "text behind", f'<|tool_call|>[{{"name": "look", "arguments": {NORTH}}}]\nSo.', LOOK, False),
    ("granite", "no list", f'<|tool_call|>{{"name": "look", "arguments": {NORTH}}}', NONE, True),
    ("granite", "with an end", f'<|tool_call|>[{{"name": "look", "arguments": {NORTH}}}]<|/tool_call|>', LOOK, False),
    ("deepseek", "text before", f"I look.\n{D_BEGIN}{D_CALL}look{D_SEP}{NORTH}{D_END}<｜tool▁calls▁end｜>", LOOK, False),
    ("deepseek", "all but the ends", f"{D_BEGIN}{D_CALL}look{D_SEP}{NORTH}", LOOK, False),
    ("deepseek", "a fence in a string", f'{D_BEGIN}{D_CALL}function{D_SEP}write\n```json\n{{"text": "```json\\n```"}}\n```{D_END}', [("write", {"text": "```json\n```"})], False),
    ("deepseek", "one is broken", f"{D_BEGIN}{D_CALL}look{D_SEP}{NORTH}{D_END}{D_CALL}take{D_SEP}{{n}}{D_END}", LOOK, True),
    ("deepseek", "nothing in it", f"{D_BEGIN}<｜tool▁calls▁end｜>", NONE, True),
    ("deepseek", "no name", f"{D_BEGIN}{D_CALL}{D_SEP}{{}}{D_END}", NONE, True),
    ("deepseek", "words in front of the fence", f"{D_BEGIN}{D_CALL}function{D_SEP}look around\n```json\n{NORTH}\n```{D_END}", NONE, True),
    ("kimi", "spaces around the id", f"I look.{K_BEGIN} {K_CALL} functions.look:0 {K_ARGS} {NORTH} {K_END}", LOOK, False),
    ("kimi", "numbered through the conversation", f"{K_BEGIN}{K_CALL}functions.look:17{K_ARGS}{NORTH}{K_END}", LOOK, False),
    ("kimi", "without functions", f"{K_BEGIN}{K_CALL}look:0{K_ARGS}{NORTH}{K_END}", LOOK, False),
    ("kimi", "without a number", f"{K_BEGIN}{K_CALL}functions.look{K_ARGS}{NORTH}{K_END}", NONE, True),
    ("kimi", "an id without a name", f"{K_BEGIN}{K_CALL}functions.:0{K_ARGS}{NORTH}{K_END}", NONE, True),
    ("kimi", "all but the ends", f"{K_BEGIN}{K_CALL}functions.look:0{K_ARGS}{NORTH}", LOOK, False),
    ("kimi", "one is broken", f"{K_BEGIN}{K_CALL}functions.look:0{K_ARGS}{NORTH}{K_END}{K_CALL}functions.take:1{K_ARGS}{{", LOOK, True),
    ("kimi", "nothing in it", f"{K_BEGIN}<|tool_calls_section_end|>", NONE, True),
    ("gemma", "one", '<|tool_call>call:look{at:<|"|>north<|"|>,far:true}<tool_call|>', LOOK, False),
    ("gemma", "two, and its stop token", '<|tool_call>call:look{at:<|"|>north<|"|>,far:true}<tool_call|><|tool_call>call:take{n:2}<tool_call|><|tool_response>', BOTH, False),
    ("gemma", "text before", 'I look.<|tool_call>call:look{at:<|"|>north<|"|>,far:true}<tool_call|>', LOOK, False),
    ("gemma", "its end is the stop token", '<|tool_call>call:look{at:<|"|>north<|"|>,far:true}', LOOK, False),
    ("gemma", "ended by the end of the turn", '<|tool_call>call:look{at:<|"|>north<|"|>,far:true}<turn|>', LOOK, False),
    ("gemma", "no arguments", "<|tool_call>call:take{}<tool_call|>", [("take", {})], False),
    ("gemma", "braces and commas in text", '<|tool_call>call:write{text:<|"|>}, {a: [1]}<|"|>,in:{a:{b:[1]}}}<tool_call|>', [("write", {"text": "}, {a: [1]}", "in": {"a": {"b": [1]}}})], False),
    ("gemma", "the functions' own model", "<start_function_call>call:look{at:<escape>north<escape>,far:true}<end_function_call><start_function_response>", LOOK, False),
    ("gemma", "thought before", '<|channel>thought\nI might <|tool_call>call:take{n:1}<tool_call|><channel|><|tool_call>call:look{at:<|"|>north<|"|>,far:true}<tool_call|>', LOOK, False),
    ("gemma", "cut off in an argument", '<|tool_call>call:look{at:<|"|>nor', NONE, True),
    ("gemma", "cut off behind a comma", '<|tool_call>call:look{at:<|"|>north<|"|>,', NONE, True),
    ("gemma", "no call", "<|tool_call>look north<tool_call|>", NONE, True),
    ("gemma", "JSON in place of its own form", '<|tool_call>{"name": "look", "arguments": {}}<tool_call|>', NONE, True),
    ("gemma", "one is broken", '<|tool_call>call:look{at:<|"|>north<|"|>,far:true}<tool_call|><|tool_call>call:take{n', LOOK, True),
    ("gemma", "a tool that is not there", "<|tool_call>call:go{}<tool_call|>", [("go", {})], True),
    ("gemma", "its words without a mark", "I write call:look{} to look.", NONE, False),
    ("harmony", "an answer", "<|channel|>analysis<|message|>3?<|end|><|start|>assistant<|channel|>final<|message|>3<|return|>", NONE, False),
    ("harmony", "words to the user before it", f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.look<|constrain|>json<|message|>{NORTH}<|call|>", LOOK, False),
    ("harmony", "in the channel of thinking", f"<|channel|>analysis to=functions.look <|constrain|>json<|message|>{NORTH}<|call|>", LOOK, False),
    ("harmony", "a recipient alone", f"<|channel|>commentary to=functions.look<|message|>{NORTH}<|call|>", LOOK, False),
    ("harmony", "its end is the stop token", f"<|channel|>commentary to=functions.look <|constrain|>json<|message|>{NORTH}", LOOK, False),
    ("harmony", "a tool that is not there", '<|channel|>analysis to=python code<|message|>{"code": "1"}<|call|>', [("python", {"code": "1"})], True),
    ("harmony", "code", "<|channel|>analysis to=python code<|message|>print(1)<|call|>", NONE, True),
    ("harmony", "its words in an answer", "<|channel|>final<|message|>I write to=functions.look to look.<|return|>", NONE, False),
    ("harmony", "cut off in its header", "<|channel|>commentary to=functions.lo", NONE, True),
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "calls", "fault"), [pytest.param(*case[:1], *case[2:], id=f"{case[0]}: {case[1]}") for case in OWN]
)
def test_what_is_a_familys_own_is_read_as_it_is_meant(name: ToolFormat, text: str, calls: Calls, fault: bool) -> None:
    reading = read(text, tools=TOOLS, formats=(name,))
    assert [(call.name, dict(call.arguments)) for call in reading.calls] == list(calls)
    assert bool(reading.fault) == fault


MARKED = [name for name, family in FAMILIES.items() if family.format != "harmony"]


@pytest.mark.parametrize("opened", ["<think>\n", ""], ids=["opened", "opened by the prompt"])
@pytest.mark.parametrize("name", MARKED)
def test_a_call_inside_of_thinking_is_thought_and_not_made(name: str, opened: str) -> None:
    family = FAMILIES[name]
    thought = f"{opened}I might write {family.call(('look', NORTH))} or <tool_call> alone.\n</think>\n\n"

    idle = read(thought + "I do not look.", tools=TOOLS, formats=(family.format,))
    assert (idle.calls, idle.fault, idle.text) == ((), "", thought + "I do not look.")

    made = read(thought + family.call(("take", '{"n": 2}')), tools=TOOLS, formats=(family.format,))
    assert [(call.name, dict(call.arguments)) for call in made.calls] == [("take", {"n": 2})]
    assert (made.text, made.fault) == (thought.rstrip(), "")


@pytest.mark.parametrize("name", [name for name in MARKED if FAMILIES[name].call()[:1] not in ("{", "")])
def test_thinking_that_does_not_end_is_ended_by_a_call(name: str) -> None:
    family = FAMILIES[name]
    reading = read("<think>\nI look. " + family.call(("look", NORTH)), tools=TOOLS, formats=(family.format,))
    assert [(call.name, dict(call.arguments)) for call in reading.calls] == list(LOOK)


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_of_a_call_is_shown_before_it_is_read(name: str) -> None:
    family = FAMILIES[name]
    text = "" if family.call(("look", NORTH))[0] in "{ <" and family.format in ("llama", "harmony") else "I look.\n"
    whole = text + family.call(("look", NORTH), ("take", '{"n": 2}'))
    for end in range(len(whole) + 1):
        shown = whole[:end][: shown_until(whole[:end], formats=(family.format,))]
        until = read(whole, tools=TOOLS, formats=(family.format,)).text
        assert until.startswith(shown.rstrip()), f"{shown!r} of {whole[:end]!r}"


@pytest.mark.parametrize(("signs", "family"), [
    ("<|start|>assistant to=functions.' + tool_call.name + '<|channel|>commentary json<|message|>", "harmony"),
    ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name']", "deepseek"),
    ("<|tool_calls_section_begin|>{%- for tool_call in message['tool_calls'] -%}<|tool_call_begin|>", "kimi"),
    ("<|im_system|>tool_declare<|im_middle|>", "kimi"),
    ("When a tool is required, respond only with <|tool_call|> followed by a JSON list of tools used.", "granite"),
    ('return a json object within <tool_call></tool_call> XML tags: {"name": <function-name>, "arguments":', "hermes"),
])  # fmt: skip
def test_a_family_is_known_by_what_its_template_says(signs: str, family: ToolFormat) -> None:
    assert family_of(signs) == family


def test_every_format_has_labelled_calls() -> None:
    assert {family.format for family in FAMILIES.values()} | {case[0] for case in OWN} == set(ALL_FORMATS)


@pytest.mark.parametrize(
    ("family", "text", "ids"),
    [
        ("kimi", f"{K_BEGIN}{K_CALL} functions.look:3 {K_ARGS}{NORTH}{K_END}", ["functions.look:3"]),
        ("mistral", f"[TOOL_CALLS]look[CALL_ID]a1b2c3d4e[ARGS]{NORTH}", ["a1b2c3d4e"]),
        ("mistral", f'[TOOL_CALLS][{{"name": "look", "arguments": {NORTH}, "id": "a1b2c3d4e"}}]', ["a1b2c3d4e"]),
        ("mistral", f'[TOOL_CALLS][{{"name": "look", "arguments": {NORTH}, "id": 3}}]', [""]),
        ("mistral", f"[TOOL_CALLS]look[ARGS]{NORTH}", [""]),
        ("hermes", f'<tool_call>{{"name": "look", "arguments": {NORTH}}}</tool_call>', [""]),
    ],
)
def test_a_call_has_the_id_that_the_policy_wrote(family: ToolFormat, text: str, ids: Sequence[str]) -> None:
    assert [call.id for call in read(text, tools=TOOLS, formats=(family,)).calls] == ids
