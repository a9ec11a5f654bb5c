"""Messages of agents in one form, whatever API they came by, and what of them survives a client.

A client sends the history anew with every request, as text: it gives calls other spacing, drops ids, adds empty fields,
and takes the policy's thinking out of the text into a field beside it. So two messages are the same here if their
roles, their texts, what was thought before these, and their calls, as values, are.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue

from env_service.environments.interface import ChatMessage, Role, Tool
from env_service.environments.tokenization import TemplateArguments

_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


_BEGUN, _THOUGHT = "<think>", "</think>"
_MAX_EXACT = 1 << 53
_MAX_FLOAT = 1 << 1023
"""Whole numbers up to these are exact in a float, and in its range."""


class NotUnderstood(ValueError):
    """A request holds what is no message, or none that can be answered; `param` is the field that it is about."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class MadeCall:
    """A call of a tool, as an assistant's message holds it. `arguments` is JSON as text."""

    id: str
    name: str
    arguments: str

    @property
    def value(self) -> JsonValue:
        """The arguments as a value; the text itself where it is no JSON."""
        return self._read(whole=int, broken=float)

    @property
    def value_of_any_client(self) -> JsonValue:
        """The same with numbers as they are after a client of one kind of number: JavaScript writes 1.0 as 1, and knows
        no whole number beyond 2^53 exactly.
        """
        return self._read(whole=_whole_number, broken=_number)

    def _read(self, *, whole: Callable[[str], int | float], broken: Callable[[str], int | float]) -> JsonValue:
        try:
            value: JsonValue = json.loads(self.arguments, parse_int=whole, parse_float=broken)
        except (ValueError, RecursionError):
            return self.arguments
        return value


def _whole_number(text: str) -> int | float:
    number = int(text)
    return float(number) if _MAX_EXACT < abs(number) < _MAX_FLOAT else number


def _number(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() and abs(number) <= _MAX_EXACT else number


def call_id_of(text: str) -> str:
    """An id for a call, the same for the same text: nine letters and digits, since some templates refuse others."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()[:9]


@dataclass(frozen=True)
class AgentMessage:
    """A message. `call_id` is that of the call that a tool's result answers, `name` the tool's. `thought` is thinking
    that a client sends beside the text; in what the policy says it is in the text.
    """

    role: Role
    text: str = ""
    calls: tuple[MadeCall, ...] = ()
    call_id: str = ""
    name: str = ""
    thought: str = ""

    @property
    def canonical(self) -> bytes:
        """The form of a message that is the same when a client took it in and sent it again."""
        calls = [[call.name, json.dumps(call.value_of_any_client, sort_keys=True)] for call in self.calls]
        thought, text = self._parted if self.role == "assistant" else ("", self.text)
        return json.dumps([self.role, thought.strip(), text.strip(), calls]).encode()

    @property
    def _parted(self) -> tuple[str, str]:
        """The thinking, wherever it stands, and the text without it."""
        before, closed, after = self.text.partition(_THOUGHT)
        return (before.strip().removeprefix(_BEGUN), after) if closed else (self.thought, self.text)


def chain_of(messages: Sequence[AgentMessage], tools: Sequence[Tool], told: TemplateArguments) -> list[bytes]:
    """Keys of a conversation's beginnings: the first of none of its messages, the last of all of them. Conversations
    with other tools, or of which the chat template is `told` other things, have none in common.
    """
    links = [_link(b"", json.dumps([[dict(tool) for tool in tools], told], sort_keys=True).encode())]
    for message in messages:
        links.append(_link(links[-1], message.canonical))
    return links


def _link(before: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(before + content, digest_size=16).digest()


def chat_messages(given: object) -> tuple[AgentMessage, ...]:
    """The `messages` of a chat request. Raises NotUnderstood."""
    if not isinstance(given, list) or not given:
        raise NotUnderstood("messages: expected a list of at least one message", param="messages")
    names: dict[str, str] = {}
    found = []
    for place, message in enumerate(given):
        said = _chat_message(message, names, param=f"messages.{place}")
        names |= {call.id: call.name for call in said.calls}
        found.append(said)
    return tuple(found)


def _chat_message(given: Any, names: Mapping[str, str], *, param: str) -> AgentMessage:
    if not isinstance(given, dict):
        raise NotUnderstood(f"{param}: expected an object with role and content", param=param)
    role = role_of(given.get("role"), param=param)
    made = given.get("tool_calls") or []
    if not isinstance(made, list):
        raise NotUnderstood(f"{param}.tool_calls: expected a list", param=param)
    _check_carried(given, "function_call", "send it in tool_calls", param=param)
    _check_carried(given, "audio", "only text is taken", param=param)
    if made and role != "assistant":
        raise NotUnderstood(f"{param}.tool_calls: only the assistant makes calls", param=f"{param}.tool_calls")
    calls = tuple(_chat_call(call, param=param) for call in made)
    text = text_in(given.get("content"), param=f"{param}.content")
    call_id = str(given.get("tool_call_id") or "")
    name = str(given.get("name") or names.get(call_id, "")) if role == "tool" else ""
    thought = _thought(given) if role == "assistant" else ""
    return AgentMessage(role, text, calls, call_id=call_id, name=name, thought=thought)


def _thought(given: Mapping[str, Any]) -> str:
    """Thinking beside the text, under the names by which servers give it to clients."""
    found = (given.get(name) for name in ("reasoning_content", "reasoning"))
    return next((each for each in found if isinstance(each, str) and each), "")


def _check_carried(given: Mapping[str, Any], name: str, advice: str, *, param: str) -> None:
    """Raises NotUnderstood for a part of a message that no chat template is given, so that it would be lost."""
    if given.get(name):
        raise NotUnderstood(f"{param}.{name} is not taken: {advice}", param=f"{param}.{name}")


def role_of(given: object, *, param: str) -> Role:
    """The role that a request names. Raises NotUnderstood."""
    if not isinstance(given, str) or given not in _ROLES:
        raise NotUnderstood(f"{param}: expected a role of {', '.join(_ROLES)}", param=param)
    return _ROLES[given]


def _chat_call(given: Any, *, param: str) -> MadeCall:
    match given:
        case {"function": {"name": str(name), "arguments": str(arguments)}}:
            return MadeCall(str(given.get("id") or ""), name, arguments)
        case {"function": {"name": str(name), "arguments": dict(arguments)}}:
            return MadeCall(str(given.get("id") or ""), name, json.dumps(arguments))
    raise NotUnderstood(f"{param}.tool_calls: expected function calls with name and arguments", param=param)


def text_in(content: object, *, param: str) -> str:
    """The text of a message's content: text as it is, or that of its parts. Raises NotUnderstood for other parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise NotUnderstood(f"{param}: expected text or a list of parts", param=param)
    return "".join(_part(part, param=param) for part in content)


def _part(part: object, *, param: str) -> str:
    match part:
        case str(text):
            return text
        case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
            return text
        case {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": kind}:
            raise NotUnderstood(f"{param}: parts of type {kind} are not taken, only text", param=param)
    raise NotUnderstood(f"{param}: expected parts of type text", param=param)


def chat_tools(given: object) -> tuple[Tool, ...]:
    """The tools of a chat request, as chat templates take them. Raises NotUnderstood."""
    if given is None:
        return ()
    if not isinstance(given, list):
        raise NotUnderstood("tools: expected a list", param="tools")
    return tuple(_tool(each, place) for place, each in enumerate(given))


def _tool(given: Any, place: int) -> Tool:
    match given:
        case {"type": "function", "function": {"name": str(name)} as function}:
            return function_tool(name, function)
    raise no_function(given, place)


def no_function(given: object, place: int) -> NotUnderstood:
    """The refusal of a tool that is no function of the agent's."""
    kind = given.get("type") if isinstance(given, dict) else None
    was = f"it is of type {str(kind)[:64]}, and such tools are not run here; " if kind not in (None, "function") else ""
    return NotUnderstood(f"tools.{place}: {was}expected a function with a name", param=f"tools.{place}")


def function_tool(name: str, given: Mapping[str, Any]) -> Tool:
    """A tool from what a request says of a function; what templates do not show, such as `strict`, is left out."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": given.get("description") or "",
            "parameters": given.get("parameters") or {"type": "object", "properties": {}},
        },
    }


def as_chat(message: AgentMessage) -> ChatMessage:
    """As the bridges take it: text alone."""
    return ChatMessage(message.role, message.text, name=message.name, tool_call_id=message.call_id)
