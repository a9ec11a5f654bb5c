"""Calls of tools in what the policy wrote, for environments and agents alike: the formats of the common model families.

    hermes        <tool_call>{"name": "look", "arguments": {…}}</tool_call>
    qwen_coder    <tool_call><function=look><parameter=at>north</parameter></function></tool_call>
    glm           <tool_call>look<arg_key>at</arg_key><arg_value>north</arg_value></tool_call>
    mistral       [TOOL_CALLS][{"name": "look", "arguments": {…}}], [TOOL_CALLS]look{…}
    llama         {"name": "look", "parameters": {…}}, alone or behind <|python_tag|>, several with ; between them
    pythonic      [look(at="north"), take()], alone or behind <|python_tag|>, <|python_start|>, <|tool_call_start|>

A reading has a fault where a format's mark opens what is no call, or one of a tool that is not there. Without a mark,
what is no call of a tool that is offered is text: policies answer in JSON, too.
"""

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from env_service.environments.interface import Tool, ToolCall
from env_service.environments.rules import ToolFormat

_DECODER = json.JSONDecoder()
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_MISTRAL = "[TOOL_CALLS]"
_ENDS_OF_LISTS = ("<|python_end|>", "<|tool_call_end|>")
_MOST_QUOTED = 80

_OPENERS: Mapping[ToolFormat, tuple[str, ...]] = {
    "hermes": ("<tool_call>",),
    "qwen_coder": ("<tool_call>", "<function="),
    "glm": ("<tool_call>",),
    "mistral": (_MISTRAL,),
    "llama": ("<|python_tag|>",),
    "pythonic": ("<|python_tag|>", "<|python_start|>", "<|tool_call_start|>"),
}
ALL_FORMATS = tuple(_OPENERS)
_BARE: Mapping[ToolFormat, str] = {"llama": "{", "pythonic": "["}
"""With what a turn begins that is calls without a mark."""

_SIGNS: tuple[tuple[ToolFormat, tuple[str, ...]], ...] = (
    ("mistral", (_MISTRAL,)),
    ("qwen_coder", ("<function=",)),
    ("glm", ("<arg_key>",)),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("<|python_start|>", "<|tool_call_start|>")),
    ("llama", ("<|python_tag|>", '"parameters": ')),
)
"""What a chat template of the family has in it, the surest first."""


@dataclass(frozen=True)
class Reading:
    """What the policy wrote: the text before its calls, and the calls, those of tools that are not there as well.

    `fault` says why what began as a call is none, or is one of no tool; empty if there is nothing wrong.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    fault: str = ""


@dataclass(frozen=True)
class _Found:
    """Calls that begin at `start`; `broken` is the first one that cannot be read."""

    start: int
    calls: Sequence[ToolCall]
    broken: str = ""
    marked: bool = True


def read(text: str, *, tools: Sequence[Tool], formats: Sequence[ToolFormat] = ALL_FORMATS) -> Reading:
    """The text and its calls in the first of the formats that reads them. `tools` are those that are offered; without
    any, every name will do.
    """
    schemas = _schemas(tools)
    faults: list[Reading] = []
    for name in formats:
        found = _READERS[name](text, schemas)
        if found is None:
            continue
        fault = _fault(found, name, schemas)
        reading = Reading(text[: found.start].rstrip() if found.calls else text, tuple(found.calls), fault)
        if found.calls and not fault:
            return reading
        if found.marked and fault:
            faults.append(reading)
    return next((each for each in faults if each.calls), faults[0] if faults else Reading(text))


def shown_until(text: str, *, formats: Sequence[ToolFormat] = ALL_FORMATS) -> int:
    """How much of an unfinished text can be shown before it is known whether a call begins in it."""
    bare = tuple(_BARE[name] for name in formats if name in _BARE)
    if not text.strip() or (bare and text.lstrip().startswith(bare)):
        return 0
    openers = {opener for name in formats for opener in _OPENERS[name]}
    starts = [text.index(opener) for opener in openers if opener in text]
    starts += [len(text) - size for opener in openers for size in range(1, len(opener)) if text.endswith(opener[:size])]
    return min(starts, default=len(text))


def family_of(template: str) -> ToolFormat | None:
    """The format of the calls that a chat template writes; None if it is none of these."""
    return next((name for name, signs in _SIGNS if any(sign in template for sign in signs)), None)


def no_such_tool(name: str, offered: Iterable[str]) -> str:
    """What the policy is told of a call of a tool that is not there."""
    return f"there is no tool {name[:_MOST_QUOTED]!r}; there are {', '.join(offered)}"


_Schemas = Mapping[str, Mapping[str, JsonValue]]
"""What is said of the arguments of each tool that is offered, by its name."""


def _schemas(tools: Sequence[Tool]) -> _Schemas:
    found: dict[str, Mapping[str, JsonValue]] = {}
    for tool in tools:
        match tool:
            case {"function": {"name": str(name), "parameters": {"properties": dict(properties)}}}:
                found[name] = properties
            case {"function": {"name": str(name)}}:
                found[name] = {}
    return found


def _fault(found: _Found, name: ToolFormat, schemas: _Schemas) -> str:
    if found.broken:
        return f"a call cannot be read in the format {name}: {found.broken[:_MOST_QUOTED]!r}"
    strange = next((call.name for call in found.calls if schemas and call.name not in schemas), None)
    return "" if strange is None else no_such_tool(strange, schemas)


def _hermes(text: str, schemas: _Schemas) -> _Found | None:
    return _tagged(text, lambda inside: _call_of(_json(inside)))


def _glm(text: str, schemas: _Schemas) -> _Found | None:
    def call(inside: str) -> ToolCall | None:
        name = inside.partition("<arg_key>")[0].strip()
        arguments = {key.strip(): value for key, value in _ARGUMENT.findall(inside)}
        whole = _ARGUMENT.sub("", inside).strip() == name
        return _typed(name, arguments, schemas) if re.fullmatch(r"[\w.-]+", name) and whole else None

    return _tagged(text, call)


def _tagged(text: str, read_call: Callable[[str], ToolCall | None]) -> _Found | None:
    insides = _TAGGED.findall(text)
    calls = [read_call(inside) for inside in insides]
    broken = next((inside for inside, call in zip(insides, calls, strict=True) if call is None), "")
    missing = broken or ("<tool_call>" if None in calls else "")
    return _Found(text.index("<tool_call>"), [call for call in calls if call], missing) if insides else None


def _qwen_coder(text: str, schemas: _Schemas) -> _Found | None:
    starts = [text.index(opener) for opener in _OPENERS["qwen_coder"] if opener in text]
    if not starts:
        return None
    functions = _FUNCTION.findall(text)
    calls = [_typed(name, dict(_PARAMETER.findall(body)), schemas) for name, body in functions]
    # Of a call that was cut off, arguments are missing.
    whole = bool(calls) and not any(_PARAMETER.sub("", body).strip() for _, body in functions)
    empty = next((inside for inside in _TAGGED.findall(text) if not _FUNCTION.search(inside)), None)
    return _Found(min(starts), calls, "" if whole and empty is None else empty or text[min(starts) :])


def _typed(name: str, given: Mapping[str, str], schemas: _Schemas) -> ToolCall:
    """Text stays text where the tool wants that; else it is JSON, if it can be."""
    properties = schemas.get(name, {})
    return ToolCall(name, {key: _value(text, properties.get(key)) for key, text in given.items()})


def _value(text: str, schema: JsonValue) -> JsonValue:
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        value: JsonValue = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value


def _mistral(text: str, schemas: _Schemas) -> _Found | None:
    before, mark, rest = text.partition(_MISTRAL)
    if not mark:
        return None
    if rest.lstrip().startswith("["):
        listed = _first_json(rest.lstrip())
        calls = [_call_of(each) for each in listed] if isinstance(listed, list) else []
    else:
        calls = [_named(part) for part in rest.split(_MISTRAL)]
    broken = rest if None in calls or not calls else ""
    return _Found(len(before), [call for call in calls if call], broken.strip() or (mark if broken else ""))


def _named(part: str) -> ToolCall | None:
    # Newer ones put [ARGS] or [CALL_ID]… between name and arguments.
    name, brace, arguments = part.partition("{")
    value = _first_json(brace + arguments)
    return ToolCall(name.partition("[")[0].strip(), value) if isinstance(value, dict) else None


def _llama(text: str, schemas: _Schemas) -> _Found | None:
    start, rest = _behind_mark(text, _OPENERS["llama"])
    if start is None and not rest.startswith("{"):
        return None
    calls, marked, left = [], start is not None, rest
    while left.startswith("{"):
        try:
            value, end = _DECODER.raw_decode(left)
        except (ValueError, RecursionError):
            break
        calls.append(_call_of(value))
        left = left[end:].lstrip("; \n")
    broken = rest or text if left.strip() or None in calls or not calls else ""
    return _Found(start or 0, [] if broken else [call for call in calls if call], broken, marked)


def _pythonic(text: str, schemas: _Schemas) -> _Found | None:
    start, rest = _behind_mark(text, _OPENERS["pythonic"])
    for end in _ENDS_OF_LISTS:
        rest = rest.removesuffix(end).strip()
    if start is None and not rest.startswith("["):
        return None
    try:
        body = ast.parse(rest if rest.startswith("[") else f"[{rest}]", mode="eval").body
        calls = [_python_call(each) for each in body.elts] if isinstance(body, ast.List) else []
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        calls = []
    return _Found(start or 0, calls, "" if calls else rest, start is not None)


def _behind_mark(text: str, marks: Sequence[str]) -> tuple[int | None, str]:
    """Where the first of the marks is, and what is behind it; without one, all of the text."""
    there = [(text.index(mark), mark) for mark in marks if mark in text]
    start, mark = min(there, default=(None, ""))
    return start, text[(start or 0) + len(mark) :].strip()


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute) or node.args:
        raise ValueError("no call with named arguments")
    arguments = {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg is not None}
    json.dumps(arguments)  # sets and bytes are literals, too, and no JSON: ValueError or TypeError
    return ToolCall(ast.unparse(node.func), arguments)


def _json(text: str) -> JsonValue:
    try:
        value: JsonValue = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value


def _first_json(text: str) -> JsonValue:
    try:
        value, _ = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None
    found: JsonValue = value
    return found


def _call_of(value: JsonValue) -> ToolCall | None:
    match value:
        case {"name": str(name), "arguments": dict(arguments)} | {"name": str(name), "parameters": dict(arguments)}:
            return ToolCall(name, arguments)
    return None


_READERS: Mapping[ToolFormat, Callable[[str, _Schemas], _Found | None]] = {
    "hermes": _hermes,
    "qwen_coder": _qwen_coder,
    "glm": _glm,
    "mistral": _mistral,
    "llama": _llama,
    "pythonic": _pythonic,
}
