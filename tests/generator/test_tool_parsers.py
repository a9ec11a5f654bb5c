"""Calls of tools as env_service reads them are those that vLLM's own parsers find in the same texts: what is trained as
a call is one where the model is served. Where the two differ on purpose, `OTHERWISE` says how and why.
"""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from pydantic import JsonValue
from tokenizers import Tokenizer, models

from env_service.environments.interface import Tool
from env_service.environments.rules import ToolFormat
from env_service.environments.tool_formats import read
from generator.engine.options import EngineOptions, prepare_environment

pytestmark = pytest.mark.e2e

Calls = list[tuple[str, dict[str, Any]]]
PARSERS: Mapping[str, ToolFormat] = {
    "hermes": "hermes",
    "qwen3_coder": "qwen_coder",
    "glm45": "glm",
    "mistral": "mistral",
    "mistral before v11": "mistral",
    "llama3_json": "llama",
    "pythonic": "pythonic",
    "llama4_pythonic": "pythonic",
    "lfm2": "pythonic",
    "granite": "granite",
    "granite4": "hermes",
    "deepseek_v3": "deepseek",
    "deepseek_v31": "deepseek",
    "kimi_k2": "kimi",
}
MARKS = (
    "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>", "</think>",
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|python_start|>", "<|python_end|>",
    "<|tool_call_start|>", "<|tool_call_end|>", "<|im_end|>", "</s>", "<|tool_call|>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
)  # fmt: skip

HERE = {"at": "north", "far": True}
LOOK: Calls = [("look", HERE)]
BOTH: Calls = [*LOOK, ("take", {"n": 2})]
NONE: Calls = []
IDLE: Calls = [("take", {})]


def tool(name: str, **types: str) -> Tool:
    properties: dict[str, JsonValue] = {key: {"type": kind} for key, kind in types.items()}
    parameters: dict[str, JsonValue] = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "x", "parameters": parameters}}


TOOLS = (tool("look", at="string", far="boolean"), tool("take", n="integer"))


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def coder(name: str, **arguments: str) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def glm(name: str, **arguments: str) -> str:
    inside = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items())
    return f"<tool_call>{name}\n{inside}</tool_call>"


def deepseek(*calls: tuple[str, str]) -> str:
    inside = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def deepseek_31(*calls: tuple[str, str]) -> str:
    inside = "".join(f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{given}<｜tool▁call▁end｜>" for name, given in calls)
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def kimi(*calls: tuple[str, str]) -> str:
    inside = "".join(
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{given}<|tool_call_end|>"
        for number, (name, given) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inside}<|tool_calls_section_end|>"


NORTH = '{"at": "north", "far": true}'
LOOKS, TAKES = ("look", NORTH), ("take", '{"n": 2}')
NESTED = '{"at": "}{ \\"}\\" \\u00e9", "far": {"a": [{}, {"b": "}}"}]}}'
LATER: Mapping[str, Callable[..., str]] = {"deepseek_v3": deepseek, "deepseek_v31": deepseek_31, "kimi_k2": kimi}
GRANITE_BOTH = f'<|tool_call|>[{{"arguments": {NORTH}, "name": "look"}}, {{"arguments": {{"n": 2}}, "name": "take"}}]'
CASES: Sequence[tuple[str, str, Calls]] = (
    ("hermes", hermes("look", NORTH), LOOK),
    ("hermes", "I look.\n" + hermes("look", NORTH), LOOK),
    ("hermes", hermes("look", NORTH) + "\n" + hermes("take", '{"n": 2}'), BOTH),
    ("hermes", '<tool_call>{"name": "look", "arguments": ' + NORTH + "}", LOOK),
    ("hermes", "<tool_call>{broken</tool_call>", NONE),
    ("hermes", hermes("look", NORTH) + "<tool_call>{broken</tool_call>", NONE),
    ("hermes", '<tool_call>{"name": "take"}</tool_call>', NONE),
    ("hermes", "<tool_call>so: " + hermes("look", NORTH).removeprefix("<tool_call>"), NONE),
    ("hermes", "nothing to call", NONE),
    ("hermes", f'{{"name": "look", "arguments": {NORTH}}}', NONE),
    ("qwen3_coder", coder("look", at="north", far="true"), LOOK),
    ("qwen3_coder", "I look.\n" + coder("look", at="north", far="true") + "\n" + coder("take", n="2"), BOTH),
    ("qwen3_coder", coder("look", at="7"), [("look", {"at": "7"})]),
    ("qwen3_coder", coder("look", at="two\nlines"), [("look", {"at": "two\nlines"})]),
    ("qwen3_coder", coder("take"), [("take", {})]),
    ("qwen3_coder", coder("look", at="north", far="true").replace("<tool_call>\n", ""), LOOK),
    ("qwen3_coder", "nothing to call", NONE),
    ("glm45", glm("look", at="north", far="true"), LOOK),
    ("glm45", "I look.\n" + glm("look", at="north", far="true") + glm("take", n="2"), BOTH),
    ("glm45", glm("look", at="7"), [("look", {"at": "7"})]),
    ("glm45", glm("take"), [("take", {})]),
    ("glm45", "nothing to call", NONE),
    ("mistral before v11", f'[TOOL_CALLS][{{"name": "look", "arguments": {NORTH}}}]', LOOK),
    ("mistral before v11", 'I look.[TOOL_CALLS] [{"name": "take", "arguments": {}}]', [("take", {})]),
    ("mistral before v11", "[TOOL_CALLS][{", NONE),
    ("mistral", f"[TOOL_CALLS]look[ARGS]{NORTH}", LOOK),
    ("mistral", f'I look.[TOOL_CALLS]look[ARGS]{NORTH}[TOOL_CALLS]take[ARGS]{{"n": 2}}', BOTH),
    ("mistral", "nothing to call", NONE),
    ("llama3_json", f'{{"name": "look", "parameters": {NORTH}}}', LOOK),
    ("llama3_json", f'<|python_tag|>{{"name": "look", "parameters": {NORTH}}}', LOOK),
    ("llama3_json", f'{{"name": "look", "parameters": {NORTH}}}; {{"name": "take", "parameters": {{"n": 2}}}}', BOTH),
    ("llama3_json", '{"name": "look"}', NONE),
    ("llama3_json", '{"answer": 3}', NONE),
    ("llama3_json", "nothing to call", NONE),
    ("pythonic", "[look(at='north', far=True)]", LOOK),
    ("pythonic", "[look(at='north', far=True), take(n=2)]", BOTH),
    ("pythonic", "[take()]", [("take", {})]),
    ("pythonic", "[1, 2]", NONE),
    ("pythonic", "nothing to call", NONE),
    ("llama4_pythonic", "<|python_start|>[look(at='north', far=True), take(n=2)]<|python_end|>", BOTH),
    ("granite", f'<|tool_call|>[{{"name": "look", "arguments": {NORTH}}}]', LOOK),
    ("granite", f'<tool_call> [{{"name": "look", "arguments": {NORTH}}}]', LOOK),
    ("granite", GRANITE_BOTH, BOTH),
    ("granite", "nothing to call", NONE),
    ("granite4", hermes("look", NORTH) + "\n" + hermes("take", '{"n": 2}'), BOTH),
    ("granite4", "<tool_call>{broken</tool_call>", NONE),
    *((name, write(LOOKS), LOOK) for name, write in LATER.items()),
    *((name, "I look." + write(LOOKS, TAKES), BOTH) for name, write in LATER.items()),
    *((name, write(("take", "{}")), IDLE) for name, write in LATER.items()),
    *((name, write(("look", NESTED)), [("look", json.loads(NESTED))]) for name, write in LATER.items()),
    *((name, "nothing to call", NONE) for name in LATER),
    ("kimi_k2", "<think>I look.</think>" + kimi(LOOKS), LOOK),
    ("lfm2", "<|tool_call_start|>[look(at='north', far=True), take(n=2)]<|tool_call_end|>", BOTH),
)


@pytest.fixture(scope="module")
def parsed() -> Callable[[str, str], Calls]:
    """Calls of a text by a parser of vLLM."""
    prepare_environment(EngineOptions(model="none"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import PreTrainedTokenizerFast
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        def tokenizer_with(marks: Sequence[str]) -> Any:
            words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
            tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
            tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
            return tokenizer

        new, old = tokenizer_with(MARKS), tokenizer_with([mark for mark in MARKS if mark != "[ARGS]"])

        def parse(name: str, text: str) -> Calls:
            request = ChatCompletionRequest(
                model="m", messages=[{"role": "user", "content": "x"}], tools=[dict(each) for each in TOOLS]
            )
            kind, before, _ = name.partition(" before ")
            parser = ToolParserManager.get_tool_parser(kind)(old if before else new, request.tools)
            found = parser.extract_tool_calls(text, request=request)
            return [(call.function.name, json.loads(call.function.arguments)) for call in found.tool_calls]

        return parse


def ours(text: str, name: str) -> Calls:
    """Calls of a text as an agent gets them: none, where there is a fault."""
    reading = read(text, tools=TOOLS, formats=(PARSERS[name],))
    return [] if reading.fault else [(call.name, dict(call.arguments)) for call in reading.calls]


@pytest.mark.parametrize(("name", "text", "calls"), CASES)
def test_both_find_the_calls_that_are_there(
    name: str, text: str, calls: Calls, parsed: Callable[[str, str], Calls]
) -> None:
    assert ours(text, name) == calls
    assert parsed(name, text) == calls


NO_TOOL = "an agent's client knows no tool but those that it offers; an environment gets the call, and answers it"
OTHERWISE: Sequence[tuple[str, str, Calls, Calls, str]] = (
    ("hermes", hermes("go", "{}"), NONE, [("go", {})], NO_TOOL),
    ("qwen3_coder", coder("go"), NONE, [("go", {})], NO_TOOL),
    (
        "llama3_json",
        f'I look. {{"name": "look", "parameters": {NORTH}}}',
        NONE,
        LOOK,
        "JSON in the midst of an answer is part of it: the template wants a call alone",
    ),
    (
        "mistral before v11",
        '[TOOL_CALLS][{"name": "take"}]',
        NONE,
        [("take", {})],
        "a call without arguments says so, as in the other formats",
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=look>\n<parameter=at>\nnor",
        NONE,
        [("look", {})],
        "what was cut off is no call: an argument is missing",
    ),
    (
        "pythonic",
        "<|python_tag|>look(at='north', far=True)",
        LOOK,
        NONE,
        "some models of the family put the mark before it",
    ),
)


@pytest.mark.parametrize(("name", "text", "here", "there", "reason"), OTHERWISE)
def test_where_they_differ_it_is_on_purpose(
    name: str, text: str, here: Calls, there: Calls, reason: str, parsed: Callable[[str, str], Calls]
) -> None:
    assert ours(text, name) == here, reason
    assert parsed(name, text) == there
