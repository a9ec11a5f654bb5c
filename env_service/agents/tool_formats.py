"""Calls of tools in what the policy wrote: the formats of the common model families.

    Hermes, Qwen        <tool_call>{"name": "look", "arguments": {…}}</tool_call>
    Qwen-Coder          <tool_call><function=look><parameter=at>north</parameter></function></tool_call>
    GLM                 <tool_call>look<arg_key>at</arg_key><arg_value>north</arg_value></tool_call>
    Mistral             [TOOL_CALLS][{"name": "look", "arguments": {…}}], [TOOL_CALLS]look{…}
    Llama               {"name": "look", "parameters": {…}}, alone or behind <|python_tag|>, several with ; between them
    pythonic            [look(at="north"), take()]

A call is one of a tool that the request offers; what names no such tool stays text. So no format needs configuring.
"""

import ast
import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from env_service.environments.interface import ToolCall
from env_service.rollouts.speech import calls_in

_DECODER = json.JSONDecoder()
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_MISTRAL = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"
OPENERS = ("<tool_call>", "<function=", _MISTRAL, _PYTHON_TAG)
_WHOLE = ("{", "[")


@dataclass(frozen=True)
class Reading:
    """What the policy wrote: the text before its calls, and the calls."""

    text: str
    calls: tuple[ToolCall, ...] = ()


def read(text: str, *, offered: Collection[str]) -> Reading:
    """The text and its calls of tools whose names are `offered`. All of it is text if there is no such call."""
    if offered:
        for start, calls in _candidates(text):
            if calls and all(call.name in offered for call in calls):
                return Reading(text[:start].rstrip(), tuple(calls))
    return Reading(text)


def shown_until(text: str) -> int:
    """How much of an unfinished text can be shown before it is known whether a call begins in it."""
    if text.lstrip().startswith(_WHOLE) or not text.strip():
        return 0
    starts = [text.index(opener) for opener in OPENERS if opener in text]
    starts += [len(text) - size for opener in OPENERS for size in range(1, len(opener)) if text.endswith(opener[:size])]
    return min(starts, default=len(text))


def _candidates(text: str) -> Iterator[tuple[int, Sequence[ToolCall]]]:
    if "<tool_call>" in text or "<function=" in text:
        yield _first(text, ("<tool_call>", "<function=")), _tagged(text)
    if _MISTRAL in text:
        yield text.index(_MISTRAL), _mistral(text)
    start = text.index(_PYTHON_TAG) if _PYTHON_TAG in text else 0
    rest = text[start:].removeprefix(_PYTHON_TAG).strip()
    if rest.startswith("{"):
        yield start, _objects(rest)
    if rest.startswith("[") or start:
        yield start, _pythonic(rest)


def _first(text: str, words: Sequence[str]) -> int:
    return min(text.index(word) for word in words if word in text)


def _tagged(text: str) -> list[ToolCall]:
    found = list(calls_in(text))
    if found:
        return found
    insides = _TAGGED.findall(text) or [text]
    return [call for inside in insides for call in _marked(inside)]


def _marked(inside: str) -> Iterator[ToolCall]:
    functions = _FUNCTION.findall(inside)
    for name, body in functions:
        yield ToolCall(name, {key: _value(value) for key, value in _PARAMETER.findall(body)})
    name = inside.partition("<arg_key>")[0].strip()
    if not functions and name and "{" not in name:
        yield ToolCall(name, {key.strip(): _value(value) for key, value in _ARGUMENT.findall(inside)})


def _value(text: str) -> JsonValue:
    """JSON where it is such, else the text."""
    try:
        value: JsonValue = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value


def _mistral(text: str) -> list[ToolCall]:
    rest = text.partition(_MISTRAL)[2].strip()
    if rest.startswith("["):
        try:
            listed, _ = _DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            return []
        return [call for each in listed for call in _as_calls(each)]
    found = []
    for part in rest.split(_MISTRAL):
        name, brace, arguments = part.partition("{")
        # Newer ones put [ARGS] or [CALL_ID]… between name and arguments.
        found += [ToolCall(name.partition("[")[0].strip(), value) for value in _decoded(brace + arguments)]
    return found


def _decoded(text: str) -> Iterator[dict[str, JsonValue]]:
    try:
        value, _ = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return
    if isinstance(value, dict):
        yield value


def _objects(text: str) -> list[ToolCall]:
    found: list[ToolCall] = []
    while text.startswith("{"):
        try:
            value, end = _DECODER.raw_decode(text)
        except (ValueError, RecursionError):
            return []
        calls = list(_as_calls(value))
        if not calls:
            return []
        found += calls
        text = text[end:].lstrip("; \n")
    return [] if text.strip() else found


def _as_calls(value: object) -> Iterator[ToolCall]:
    match value:
        case {"name": str(name), "parameters": dict(arguments)} | {"name": str(name), "arguments": dict(arguments)}:
            yield ToolCall(name, arguments)


def _pythonic(text: str) -> list[ToolCall]:
    try:
        body = ast.parse(text if text.startswith("[") else f"[{text}]", mode="eval").body
        if not isinstance(body, ast.List):
            return []
        return [_python_call(each) for each in body.elts]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute) or node.args:
        raise ValueError("no call with named arguments")
    arguments = {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg is not None}
    json.dumps(arguments)  # sets and bytes are literals, too, and no JSON: ValueError or TypeError
    return ToolCall(ast.unparse(node.func), arguments)
