"""Calls of tools in what the policy wrote, for environments and agents alike: the formats of the common model families.

    hermes        <tool_call>{"name": "look", "arguments": {…}}</tool_call>
    qwen_coder    <tool_call><function=look><parameter=at>north</parameter></function></tool_call>
    glm           <tool_call>look<arg_key>at</arg_key><arg_value>north</arg_value></tool_call>
    mistral       [TOOL_CALLS][{"name": "look", "arguments": {…}}], [TOOL_CALLS]look{…}
    llama         {"name": "look", "parameters": {…}}, alone or behind <|python_tag|>, several with ; between them
    pythonic      [look(at="north"), take()], alone or behind <|python_tag|>, <|python_start|>, <|tool_call_start|>
    granite       <|tool_call|>[{"name": "look", "arguments": {…}}], <tool_call>[…]
    deepseek      <｜tool▁call▁begin｜>look<｜tool▁sep｜>{…}<｜tool▁call▁end｜>; before V3.1 type, name, and a fence
    kimi          <|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{…}<|tool_call_end|>
    harmony       <|channel|>commentary to=functions.look <|constrain|>json<|message|>{…}<|call|>
    gemma         <|tool_call>call:look{at:<|"|>north<|"|>}<tool_call|>, <start_function_call>call:look{…}

A reading has a fault where a format's mark opens what is no call, or one of a tool that is not there. Without a mark,
what is no call of a tool that is offered is text: policies answer in JSON, too. What the policy thinks, up to
`</think>` or another family's mark, is no call; nor are arguments that no message can hold (NaN, half of a surrogate
pair).
"""

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from env_service.environments.gemma_arguments import gemma_arguments_at
from env_service.environments.interface import Tool, ToolCall
from env_service.environments.rules import ToolFormat
from env_service.environments.thinking_marks import CLOSINGS
from services.python_syntax import expression_of

_DECODER = json.JSONDecoder()
_TAG, _END_TAG = "<tool_call>", "</tool_call>"
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_KEY, _KEY_TO_VALUE, _END_VALUE = "<arg_key>", re.compile(r"</arg_key>\s*<arg_value>"), "</arg_value>"
_END_OF_NAME = re.compile(r"[>\s]")
_SPACE = re.compile(r"\s*")
_BETWEEN_OBJECTS = re.compile(r"[; \n]*")
_NAME = re.compile(r"[\w-]+(?:\.[\w-]+)*")
_MISTRAL = "[TOOL_CALLS]"
_HARMONY = ("<|channel|>", "<|start|>")

# The beginning of a call, up to its arguments as JSON; without a name where it is none.
_MISTRAL_HEAD = re.compile(r"\[TOOL_CALLS\]\s*(?P<name>[^\[{]*)(?:\[CALL_ID\](?P<id>[^\[{]*))?(?:\[ARGS\])?")
_DEEPSEEK_HEAD = re.compile(
    r"<｜tool▁call▁begin｜>(?:(?P<name>[^<]*)<｜tool▁sep｜>(?:(?P<fenced>[^\n{`]*)\n```(?:json)?\n)?)?"
)
_KIMI_HEAD = re.compile(
    r"<\|tool_call_begin\|>(?:\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+):\d+)\s*<\|tool_call_argument_begin\|>)?"
)
_HARMONY_HEAD = re.compile(
    r"(?:\A|<\|start\|>)(?P<header>(?:(?!<\|(?:message|start|end)\|>).)*)(?P<message><\|message\|>)?", re.DOTALL
)
_GEMMA_HEAD = re.compile(r"(?:<\|tool_call>|<start_function_call>)(?:\s*call:(?P<name>[\w.-]+))?")
_TO = re.compile(r"(?:\A|\s)to=(?:functions\.)?([^\s<]+)")
_ENDS_OF_LISTS = ("<|python_end|>", "<|tool_call_end|>")
_MAX_QUOTED = 80

_OPENERS: Mapping[ToolFormat, tuple[str, ...]] = {
    "hermes": ("<tool_call>",),
    "qwen_coder": ("<tool_call>", "<function="),
    "glm": ("<tool_call>",),
    "mistral": (_MISTRAL,),
    "llama": ("<|python_tag|>",),
    "pythonic": ("<|python_tag|>", "<|python_start|>", "<|tool_call_start|>"),
    "granite": ("<|tool_call|>", _TAG),
    "deepseek": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    "kimi": ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    "harmony": _HARMONY,
    "gemma": ("<|tool_call>", "<start_function_call>"),
}
ALL_FORMATS = tuple(_OPENERS)
_BARE: Mapping[ToolFormat, str] = {"llama": "{", "pythonic": "[", "harmony": "to="}
"""With what a turn begins that is calls without a mark."""

_SIGNS: tuple[tuple[ToolFormat, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>",)),
    ("deepseek", ("<｜tool▁call▁begin｜>",)),
    ("kimi", ("<|tool_call_begin|>", "tool_declare<|im_middle|>")),
    ("mistral", (_MISTRAL,)),
    ("granite", ("<|tool_call|>",)),
    ("gemma", ("<|tool_call>", "<start_function_call>")),
    ("qwen_coder", ("<function=",)),
    ("glm", ("<arg_key>",)),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("<|python_start|>", "<|tool_call_start|>")),
    ("llama", ("<|python_tag|>", '"parameters": ')),
)
"""Marks of a family in its chat template, the surest first."""


@dataclass(frozen=True)
class ParsedTurn:
    """A parsed turn of the policy: the text before its calls, and the calls, those of tools that are not there as well.

    `fault` says why what began as a call is none, or is one of no tool; empty if there is nothing wrong.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    fault: str = ""


@dataclass(frozen=True)
class _FoundCalls:
    """Calls that begin at `start`; `broken` is the first one that cannot be read."""

    start: int
    calls: Sequence[ToolCall]
    broken: str = ""
    marked: bool = True


def read(text: str, *, tools: Sequence[Tool], formats: Sequence[ToolFormat] = ALL_FORMATS) -> ParsedTurn:
    """The text and its calls in the first of the formats that reads them. `tools` are those that are offered; without
    any, every name will do.
    """
    schemas = _schemas(tools)
    faults: list[ParsedTurn] = []
    thought = _thought_until(text)
    for name in formats:
        found = _READERS[name](text[thought:], schemas)
        if found is None:
            continue
        fault = _fault(found, name, schemas)
        before = text[: thought + found.start].rstrip()
        reading = ParsedTurn(before if found.calls else text, tuple(found.calls), fault)
        if found.calls and not fault:
            return reading
        if found.marked and fault:
            faults.append(reading)
    return next((each for each in faults if each.calls), faults[0] if faults else ParsedTurn(text))


def shown_until(text: str, *, formats: Sequence[ToolFormat] = ALL_FORMATS) -> int:
    """Length of the part of an unfinished text that can be shown before it is known if a call begins in it."""
    thought = _thought_until(text)
    if thought:
        return thought + shown_until(text[thought:], formats=formats)
    bare = tuple(_BARE[name] for name in formats if name in _BARE)
    began = text.strip()
    if not began or began.startswith(bare) or any(each.startswith(began) for each in bare):
        return 0
    openers = {opener for name in formats for opener in _OPENERS[name]}
    starts = [text.index(opener) for opener in openers if opener in text]
    starts += [len(text) - size for opener in openers for size in range(1, len(opener)) if text.endswith(opener[:size])]
    return min(starts, default=len(text))


def _thought_until(text: str) -> int:
    """End of thinking that was closed; 0 without any. The prompt may have opened it."""
    return max((text.index(mark) + len(mark) for mark in CLOSINGS if mark in text), default=0)


def family_of(template: str) -> ToolFormat | None:
    """The format of the calls that a chat template writes; None if it is none of these."""
    return next((name for name, signs in _SIGNS if any(sign in template for sign in signs)), None)


def no_such_tool(name: str, offered: Iterable[str]) -> str:
    """Tells the policy that it called a tool that is not there."""
    return f"there is no tool {name[:_MAX_QUOTED]!r}; there are {', '.join(offered)}"


_ReadAt = Callable[[str, int], tuple[JsonValue, int]]
"""Reads a value at a place; returns where it ends, 0 if there is none."""
_Schemas = Mapping[str, Mapping[str, JsonValue]]
"""Schemas of the arguments of each tool that is offered, by its name."""


def _schemas(tools: Sequence[Tool]) -> _Schemas:
    found: dict[str, Mapping[str, JsonValue]] = {}
    for tool in tools:
        match tool:
            case {"function": {"name": str(name), "parameters": {"properties": dict(properties)}}}:
                found[name] = properties
            case {"function": {"name": str(name)}}:
                found[name] = {}
    return found


def _fault(found: _FoundCalls, name: ToolFormat, schemas: _Schemas) -> str:
    if found.broken:
        return f"a call cannot be read in the format {name}: {found.broken[:_MAX_QUOTED]!r}"
    strange = next((call.name for call in found.calls if schemas and call.name not in schemas), None)
    return "" if strange is None else no_such_tool(strange, schemas)


def _hermes(text: str, schemas: _Schemas) -> _FoundCalls | None:
    start = at = text.find(_TAG)
    calls: list[ToolCall] = []
    broken = ""
    while at >= 0:
        inside = at + len(_TAG)
        value, end = _json_at(text, inside)
        call = _call_of(value)
        if call is not None and _closed(text, end, (_END_TAG,)):
            calls.append(call)
        else:
            closing = text.find(_END_TAG, inside)
            end = closing if closing >= 0 else len(text)
            broken = broken or text[inside:end] or _TAG
        at = text.find(_TAG, end)
    return _FoundCalls(start, calls, broken) if start >= 0 else None


def _glm(text: str, schemas: _Schemas) -> _FoundCalls | None:
    def call(inside: str) -> ToolCall | None:
        name = inside.partition(_KEY)[0].strip()
        found = list(_glm_arguments(inside))
        arguments = {each.name.strip(): each.content for each in found}
        whole = _beside(inside, found).strip() == name
        return _typed(name, arguments, schemas) if _NAME.fullmatch(name) and whole else None

    insides = _TAGGED.findall(text)
    calls = [call(inside) for inside in insides]
    broken = next((inside for inside, read in zip(insides, calls, strict=True) if read is None), "")
    missing = broken or (_TAG if None in calls else "")
    return _FoundCalls(text.index(_TAG), [read for read in calls if read], missing) if insides else None


def _qwen_coder(text: str, schemas: _Schemas) -> _FoundCalls | None:
    starts = [text.index(opener) for opener in _OPENERS["qwen_coder"] if opener in text]
    if not starts:
        return None
    functions = list(_named(text, "function"))
    parameters = [[each for each in _named(one.content, "parameter") if each.closed] for one in functions]
    # Of a call that was cut off, arguments are missing.
    whole = [
        one.closed and not _beside(one.content, given).strip() for one, given in zip(functions, parameters, strict=True)
    ]
    calls = [
        _typed(one.name, {each.name: _unwrapped(each.content) for each in given}, schemas)
        for one, given, is_whole in zip(functions, parameters, whole, strict=True)
        if is_whole
    ]
    empty = next((inside for inside in _TAGGED.findall(text) if next(_named(inside, "function"), None) is None), None)
    return _FoundCalls(
        min(starts), calls, "" if whole and all(whole) and empty is None else empty or text[min(starts) :]
    )


@dataclass(frozen=True)
class _Element:
    """A piece `[start, end)` of a text that has a name and a content; not `closed`, it goes on to the text's end."""

    start: int
    end: int
    name: str
    content: str
    closed: bool = True


def _glm_arguments(text: str) -> Iterator[_Element]:
    """Pairs of a key and its value. By search for marks, in one pass: a pattern of all would try each beginning with
    each end.
    """
    at = 0
    while (start := text.find(_KEY, at)) >= 0:
        between = _KEY_TO_VALUE.search(text, start + len(_KEY))
        end = -1 if between is None else text.find(_END_VALUE, between.end())
        if between is None or end < 0:
            return
        at = end + len(_END_VALUE)
        yield _Element(start, at, text[start + len(_KEY) : between.start()], text[between.end() : end])


def _named(text: str, tag: str) -> Iterator[_Element]:
    """Elements `<tag=name>…</tag>`, none within another one, in one pass as well."""
    opener, closer, at = f"<{tag}=", f"</{tag}>", 0
    while (start := text.find(opener, at)) >= 0:
        named = start + len(opener)
        head = _END_OF_NAME.search(text, named)
        if head is None:
            return
        at = head.start()
        if head[0] != ">" or at == named:
            continue
        end = text.find(closer, head.end())
        closed, at = end >= 0, end + len(closer) if end >= 0 else len(text)
        yield _Element(start, at, text[named : head.start()], text[head.end() : end if closed else at], closed)


def _beside(text: str, elements: Iterable[_Element]) -> str:
    """The text without them."""
    kept, at = [], 0
    for each in elements:
        kept.append(text[at : each.start])
        at = each.end
    return "".join((*kept, text[at:]))


def _unwrapped(content: str) -> str:
    """Without the ends of line that its tags stand on."""
    return content.removeprefix("\n").removesuffix("\n")


def _typed(name: str, given: Mapping[str, str], schemas: _Schemas) -> ToolCall:
    """Text stays text where the tool wants that, or takes it and not what it would be as JSON; else it is JSON."""
    properties = schemas.get(name, {})
    return ToolCall(name, {key: _value(text, properties.get(key)) for key, text in given.items()})


def _value(text: str, schema: JsonValue) -> JsonValue:
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text
    value, end = _json_at(text, 0)
    is_json = bool(end) and _closed(text, end, ()) and is_sound(value)
    return value if is_json and ("string" not in kinds or kinds & _kinds_of(value)) else text


def _kinds(schema: JsonValue, *, several: bool = True) -> frozenset[str]:
    """The types that a schema takes, by JSON Schema's names; none where it does not say. `several`: in several ways,
    one of which is not read in several ways again: clients may nest them to any depth.
    """
    match schema:
        case {"type": str(name)}:
            return frozenset((name,))
        case {"type": [*names]}:
            return frozenset(map(str, names))
        case {"anyOf": [*ways]} | {"oneOf": [*ways]} if several:
            found = [_kinds(way, several=False) for way in ways]
            return frozenset().union(*found) if all(found) else frozenset()
        case {"enum": [*values]}:
            return frozenset().union(*map(_kinds_of, values))
        case {"const": value}:
            return _kinds_of(value)
    return frozenset()


def _kinds_of(value: JsonValue) -> frozenset[str]:
    match value:
        case None:
            return frozenset(("null",))
        case bool():
            return frozenset(("boolean",))
        case int():
            return frozenset(("integer", "number"))
        case float():
            return frozenset(("number",))
        case str():
            return frozenset(("string",))
        case list():
            return frozenset(("array",))
    return frozenset(("object",))


def _mistral(text: str, schemas: _Schemas) -> _FoundCalls | None:
    before, mark, rest = text.partition(_MISTRAL)
    if not mark:
        return None
    if rest.lstrip().startswith("[") and not rest.lstrip().startswith(("[ARGS]", "[CALL_ID]")):
        return _listed(len(before), rest)
    return _headed(text, _MISTRAL_HEAD, lambda head: head["name"], (_MISTRAL,))


def _granite(text: str, schemas: _Schemas) -> _FoundCalls | None:
    starts = [(text.index(opener), opener) for opener in _OPENERS["granite"] if opener in text]
    start, opener = min(starts, default=(0, ""))
    return _listed(start, text[start + len(opener) :]) if starts else None


def _listed(start: int, rest: str) -> _FoundCalls:
    """Calls in a list, with anything behind it."""
    listed, _ = _json_at(rest, 0)
    calls = [_call_of(each) for each in listed] if isinstance(listed, list) else []
    whole = bool(calls) and None not in calls
    return _FoundCalls(start, [call for call in calls if call], "" if whole else rest.strip() or "no list")


def _deepseek(text: str, schemas: _Schemas) -> _FoundCalls | None:
    def name(head: re.Match[str]) -> str | None:
        return head["name"] if head["fenced"] is None else head["fenced"]

    return _headed(text, _DEEPSEEK_HEAD, name, ("```", "<｜tool▁call"), openers=_OPENERS["deepseek"])


def _kimi(text: str, schemas: _Schemas) -> _FoundCalls | None:
    ends = ("<|tool_call_", "<|tool_calls_section_end|>")
    return _headed(text, _KIMI_HEAD, lambda head: head["name"], ends, openers=_OPENERS["kimi"])


def _gemma(text: str, schemas: _Schemas) -> _FoundCalls | None:
    ends = ("<tool_call|>", "<end_function_call>", "<|tool_response>", "<start_function_response>", "<turn|>")
    return _headed(
        text,
        _GEMMA_HEAD,
        lambda head: head["name"],
        (*ends, *_OPENERS["gemma"]),
        openers=_OPENERS["gemma"],
        arguments=gemma_arguments_at,
    )


def _harmony(text: str, schemas: _Schemas) -> _FoundCalls | None:
    if not any(mark in text for mark in (*_HARMONY, "<|message|>")):
        return None

    def name(head: re.Match[str]) -> str | None:
        to = _TO.search(head["header"])
        return to[1] if to and head["message"] else None

    def calls() -> Iterator[re.Match[str]]:
        at = 0
        while head := _HARMONY_HEAD.search(text, at):
            if _TO.search(head["header"]):
                yield head
            at = max(head.end(), at + 1)

    return _found(text, calls(), name, ("<|call|>", "<|end|>", "<|return|>", "<|start|>"), _json_at)


def _headed(
    text: str,
    head: re.Pattern[str],
    name: Callable[[re.Match[str]], str | None],
    ends: tuple[str, ...],
    *,
    openers: Sequence[str] = (),
    arguments: _ReadAt | None = None,
) -> _FoundCalls | None:
    """Calls that begin with a head and go on with arguments, in JSON or as they are read, behind which something of
    `ends` comes, or nothing.
    """
    read_at = arguments or _json_at
    found = _found(text, _heads(text, head, read_at), name, ends, read_at)
    starts = [text.index(opener) for opener in openers if opener in text]
    if found is None:
        return _FoundCalls(min(starts), (), text[min(starts) :]) if starts else None
    return _FoundCalls(min([found.start, *starts]), found.calls, found.broken)


def _heads(text: str, pattern: re.Pattern[str], read_at: _ReadAt) -> Iterator[re.Match[str]]:
    """None of them within the arguments of the one before."""
    at = 0
    while head := pattern.search(text, at):
        yield head
        at = max(head.end(), read_at(text, head.end())[1])


def _found(
    text: str,
    heads: Iterable[re.Match[str]],
    name: Callable[[re.Match[str]], str | None],
    ends: tuple[str, ...],
    read_at: _ReadAt,
) -> _FoundCalls | None:
    start, calls, broken = -1, [], ""
    for head in heads:
        start = head.start() if start < 0 else start
        called = (name(head) or "").strip()
        value, end = read_at(text, head.end())
        sound = isinstance(value, dict) and is_sound(value) and _closed(text, end, ends)
        if isinstance(value, dict) and sound and _NAME.fullmatch(called):
            calls.append(ToolCall(called, value, id=(head.groupdict().get("id") or "").strip()))
        else:
            broken = broken or text[head.start() :]
    return _FoundCalls(start, calls, broken) if start >= 0 else None


def _llama(text: str, schemas: _Schemas) -> _FoundCalls | None:
    start, rest = _behind_mark(text, _OPENERS["llama"])
    if start is None and not rest.startswith("{"):
        return None
    calls, marked, at = [], start is not None, 0
    while rest.startswith("{", at):
        value, end = _json_at(rest, at)
        if not end:
            break
        calls.append(_call_of(value))
        at = _behind(_BETWEEN_OBJECTS, rest, end)
    broken = rest or text if rest[at:].strip() or None in calls or not calls else ""
    return _FoundCalls(start or 0, [] if broken else [call for call in calls if call], broken, marked)


def _pythonic(text: str, schemas: _Schemas) -> _FoundCalls | None:
    start, rest = _behind_mark(text, _OPENERS["pythonic"])
    for end in _ENDS_OF_LISTS:
        rest = rest.removesuffix(end).strip()
    if start is None and not rest.startswith("["):
        return None
    try:
        body = expression_of(rest if rest.startswith("[") else f"[{rest}]")
        calls = [_python_call(each) for each in body.elts] if isinstance(body, ast.List) else []
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        calls = []
    return _FoundCalls(start or 0, calls, "" if calls else rest, start is not None)


def _behind_mark(text: str, marks: Sequence[str]) -> tuple[int | None, str]:
    """Place of the first of the marks, and the text behind it; without one, all of the text."""
    there = [(text.index(mark), mark) for mark in marks if mark in text]
    start, mark = min(there, default=(None, ""))
    return start, text[(start or 0) + len(mark) :].strip()


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute) or node.args:
        raise ValueError("no call with named arguments")
    arguments = {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg is not None}
    if not is_sound(arguments):
        raise ValueError("arguments that are no JSON")
    return ToolCall(ast.unparse(node.func), arguments)


def _json_at(text: str, at: int) -> tuple[JsonValue, int]:
    """The JSON that begins there, behind any space, and where it ends; 0, if there is none."""
    try:
        value, end = _DECODER.raw_decode(text, _behind(_SPACE, text, at))
    except (ValueError, RecursionError):
        return None, 0
    found: JsonValue = value
    return found, end


def _closed(text: str, end: int, ends: tuple[str, ...]) -> bool:
    """True if nothing is behind that place, or what may be there."""
    at = _behind(_SPACE, text, end)
    return at == len(text) or text.startswith(ends, at)


def _behind(pattern: re.Pattern[str], text: str, at: int) -> int:
    """The end of what the pattern, which matches nothing as well, finds there."""
    found = pattern.match(text, at)
    return at if found is None else found.end()


def is_sound(value: object) -> bool:
    """True if it can be written as JSON in a message. Of what Python reads that is not NaN, infinity, and half of a
    surrogate pair; of its literals, sets and bytes.
    """
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def _call_of(value: JsonValue) -> ToolCall | None:
    match value:
        case {"name": str(name), "arguments": dict(arguments), "id": str(own)}:
            return ToolCall(name, arguments, id=own) if is_sound([name, arguments, own]) else None
        case {"name": str(name), "arguments": dict(arguments)} | {"name": str(name), "parameters": dict(arguments)}:
            return ToolCall(name, arguments) if is_sound([name, arguments]) else None
    return None


_READERS: Mapping[ToolFormat, Callable[[str, _Schemas], _FoundCalls | None]] = {
    "hermes": _hermes,
    "qwen_coder": _qwen_coder,
    "glm": _glm,
    "mistral": _mistral,
    "llama": _llama,
    "pythonic": _pythonic,
    "granite": _granite,
    "deepseek": _deepseek,
    "kimi": _kimi,
    "harmony": _harmony,
    "gemma": _gemma,
}
