"""A whole conversation of an agent as a prompt, for a model whose template may not know of calls, results or tools.

Forms are tried in turn: the template's own for calls, then calls as text and results as what the user says. One is
taken if the template refuses nothing and loses nothing.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from env_service.agents.messages import AgentMessage
from env_service.environments.interface import ChatMessage, Tool
from env_service.environments.tokenization import ChatTemplateError, Tokenization, call_id
from services.thinking import said_alone

_TOOLS = """You may call one or more of these functions:
<tools>
{tools}
</tools>
For each call write an object with its name and arguments within tags:
<tool_call>
{{"name": <name>, "arguments": <object>}}
</tool_call>"""


def prompt_of(
    messages: Sequence[AgentMessage],
    tools: Sequence[Tool],
    *,
    tokenization: Tokenization,
    now: datetime,
    own_calls: bool = True,
) -> tuple[str, list[int]]:
    """The rendered text and its token ids. Raises ChatTemplateError, with the words of the template's own form.

    Without `own_calls` the template is not told of tools and calls, and the policy is asked to write them as text: of
    the template's own nobody would read any.
    """
    errors = []
    if tokenization.has_own_marks:  # its template would write <think> as text, which the policy has never seen
        messages = [_said_alone(message) for message in messages]
    for given, shown in _attempts(messages, tools) if own_calls else _as_text(messages, tools):
        try:
            text = tokenization.text_of(given, tools=shown, now=now)
            _check_kept(text, messages)
            if shown and text == tokenization.text_of(given, now=now):
                raise ChatTemplateError("the chat template shows no tools")
        except ChatTemplateError as error:
            errors.append(error)
        else:
            return text, tokenization.encode_after("", text)
    raise errors[0]


def _said_alone(message: AgentMessage) -> AgentMessage:
    return replace(message, text=said_alone(message.text)) if message.role == "assistant" else message


def results_as_user(messages: Sequence[AgentMessage]) -> tuple[ChatMessage, ...]:
    """Results of tools as what the user says, for templates that lose them; neighbours become one message."""
    found: list[ChatMessage] = []
    for message in messages:
        text = message.text if message.role != "tool" else f"<tool_response>\n{message.text}\n</tool_response>"
        role = "user" if message.role == "tool" else message.role
        if found and role == "user" and found[-1].role == "user":
            found[-1] = ChatMessage("user", f"{found[-1].content}\n{text}")
        else:
            found.append(ChatMessage(role, text))
    return tuple(found)


def _attempts(
    messages: Sequence[AgentMessage], tools: Sequence[Tool]
) -> Iterator[tuple[list[Mapping[str, object]], Sequence[Tool]]]:
    for given in (_numbered(messages, own=True), _numbered(messages, own=False)):
        yield _native(given, as_object=True), tools
        yield _native(given, as_object=False), tools
    yield _plain(messages), tools
    told = _told(messages, tools)
    yield from ((_native(_numbered(told, own=own), as_object=True), ()) for own in (True, False))
    yield from _as_text(messages, tools)


def _as_text(
    messages: Sequence[AgentMessage], tools: Sequence[Tool]
) -> Iterator[tuple[list[Mapping[str, object]], Sequence[Tool]]]:
    told = _told(messages, tools)
    yield _plain(told), ()
    yield _plain(_without_system(told)), ()


def _numbered(messages: Sequence[AgentMessage], *, own: bool) -> list[AgentMessage]:
    """With ids that all templates take; results have those of the calls that they answer, or of their place. Those that
    are given stay, if they are their `own`: some templates refuse the ids of some clients.
    """
    found: list[AgentMessage] = []
    known: dict[str, str] = {}
    results = 0
    for message in messages:
        results = results + 1 if message.role == "tool" else 0
        calls = tuple(
            call if own and call.id else replace(call, id=call_id(number))
            for number, call in enumerate(message.calls, 1)
        )
        if calls:
            known = {old.id: new.id for old, new in zip(message.calls, calls, strict=True) if old.id}
        answers = known.get(message.call_id) or (own and message.call_id) or call_id(results)
        found.append(replace(message, calls=calls, call_id=answers if message.role == "tool" else ""))
    return found


def _native(messages: Sequence[AgentMessage], *, as_object: bool) -> list[Mapping[str, object]]:
    return [_native_message(message, as_object=as_object) for message in messages]


def _native_message(message: AgentMessage, *, as_object: bool) -> Mapping[str, object]:
    found: dict[str, object] = {"role": message.role, "content": message.text}
    if message.calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.value if as_object else call.arguments},
            }
            for call in message.calls
        ]
    if message.thought:
        found["reasoning_content"] = message.thought  # for templates that show it
    if message.role == "tool":
        found |= {"name": message.name, "tool_call_id": message.call_id}
    return found


def _plain(messages: Sequence[AgentMessage]) -> list[Mapping[str, object]]:
    flat = [AgentMessage(message.role, with_calls(message)) if message.calls else message for message in messages]
    return [{"role": each.role, "content": each.content} for each in results_as_user(flat)]


def with_calls(message: AgentMessage) -> str:
    """An assistant's message as text, its calls too."""
    calls = (
        f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': call.value})}\n</tool_call>"
        for call in message.calls
    )
    return "\n".join([*([message.text] if message.text else []), *calls])


def _told(messages: Sequence[AgentMessage], tools: Sequence[Tool]) -> list[AgentMessage]:
    """With the tools described in a system message, for templates that do not show them."""
    if not tools:
        return list(messages)
    text = _TOOLS.format(tools="\n".join(json.dumps(dict(tool)) for tool in tools))
    if messages[0].role == "system":
        return [AgentMessage("system", f"{messages[0].text}\n\n{text}"), *messages[1:]]
    return [AgentMessage("system", text), *messages]


def _without_system(messages: Sequence[AgentMessage]) -> list[AgentMessage]:
    """With what the system says at the beginning of what the user says next."""
    found: list[AgentMessage] = []
    waiting: list[str] = []
    for message in messages:
        if message.role == "system":
            waiting.append(message.text)
        elif waiting and message.role == "user":
            found.append(AgentMessage("user", "\n\n".join([*waiting, message.text])))
            waiting = []
        else:
            found.append(message)
    return [*found, AgentMessage("user", "\n\n".join(waiting))] if waiting else found


def _check_kept(text: str, messages: Sequence[AgentMessage]) -> None:
    for message in messages:
        words = [call.name for call in message.calls]
        # Templates cut thinking out of earlier turns, and strip: what the policy said may change, the rest may not.
        if message.role != "assistant" and not _has(text, message.text):
            raise ChatTemplateError(f"the chat template loses a message of role {message.role}")
        if not all(word in text for word in words):
            raise ChatTemplateError("the chat template loses the call of a tool")


def _has(text: str, said: str) -> bool:
    return any(
        form in text for form in (said.strip(), json.dumps(said)[1:-1], json.dumps(said, ensure_ascii=False)[1:-1])
    )
