"""What the policy's text means to an environment: the forms of actions that its rules can name."""

import json
import re
from collections.abc import Iterator

from pydantic import JsonValue

from env_service.environments.interface import ToolCall
from env_service.environments.rules import ActionForm

_DECODER = json.JSONDecoder()
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def value_in(text: str, form: ActionForm) -> JsonValue:
    """What the form finds in the text, None if nothing: see `Action.value`."""
    if form == "json":
        return last_object(text)
    if form.startswith("tag:"):
        return last_tag(text, form.removeprefix("tag:"))
    return text if form == "text" else None


def last_tag(text: str, name: str) -> str | None:
    """What stands in the last <name>…</name>, without space around it. The end may be missing: a stop text cuts it."""
    _, opened, rest = text.rpartition(f"<{name}>")
    return rest.partition(f"</{name}>")[0].strip() if opened else None


def last_object(text: str) -> dict[str, JsonValue] | None:
    """The last JSON object in the text that is in no other one."""
    found: dict[str, JsonValue] | None = None
    end = 0
    for match in re.finditer(r"\{", text):
        if match.start() >= end:
            try:
                found, end = _DECODER.raw_decode(text, match.start())
            except (ValueError, RecursionError):
                continue
    return found


def calls_in(text: str) -> tuple[ToolCall, ...]:
    """The calls of <tool_call>{"name": …, "arguments": …}</tool_call>; what is no such object is left out."""
    return tuple(_calls(text))


def _calls(text: str) -> Iterator[ToolCall]:
    for inside in _CALL.findall(text):
        match last_object(inside):
            case {"name": str(name), "arguments": dict(arguments)}:
                yield ToolCall(name=name, arguments=arguments)
            case {"name": str(name)}:
                yield ToolCall(name=name, arguments={})


def cut_at_stop(text: str, stop: tuple[str, ...]) -> str:
    """The text before the first of the stop texts."""
    places = [text.index(each) for each in stop if each in text]
    return text[: min(places)] if places else text
