"""`/v1/responses` of a session: OpenAI's other API, in which a conversation is a list of items.

Nothing is stored for `previous_response_id`: clients send the whole conversation, as they do unless they are told
otherwise.
"""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from env_service.agents.chat_route import NO_EFFORT, forces_a_call
from env_service.agents.fields import (
    HARMLESS,
    NEUTRAL,
    Fields,
    Terms,
    check_switch,
    positive,
    template_arguments,
    unserved,
)
from env_service.agents.messages import (
    AgentMessage,
    MadeCall,
    NotUnderstood,
    function_tool,
    no_function,
    role_of,
    text_in,
)
from env_service.agents.sessions import AgentRequest, AgentSession, CallRefused, PendingTurn
from env_service.environments.interface import Tool

_PASSED_OVER = {"reasoning"}
_READ = frozenset(
    {
        "input",
        "instructions",
        "tools",
        "max_output_tokens",
        "stream",
        "text",
        "include",
        "previous_response_id",
        "chat_template_kwargs",
    }
)
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **NEUTRAL,
    "background": (False,),
    "reasoning": ({},),
    "truncation": ("disabled",),
}
_FIELDS = Fields(read=_READ, neutral=_NEUTRAL, forces=forces_a_call, harmless=HARMLESS | {"stream_options"})


def asked_of_responses(body: Mapping[str, Any], terms: Terms, *, digest: str, again: bool) -> AgentRequest:
    """The request that a body holds. Raises NotUnderstood and CallRefused."""
    if body.get("previous_response_id"):
        message = "previous_response_id: responses are not stored; send the conversation in input"
        raise CallRefused(400, "unsupported_value", message, param="previous_response_id")
    given = body.get("reasoning")
    wished = {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given
    thinks_not = wished == {"effort": NO_EFFORT}
    ignored = _FIELDS.ignored({**body, "reasoning": None if thinks_not else wished}, terms)
    check_switch(body, "stream")
    if isinstance(include := body.get("include"), list) and "message.output_text.logprobs" in include:
        raise unserved("include", include)
    _refuse_forms(body.get("text"))
    return AgentRequest(
        messages=response_messages(body),
        tools=_tools(body.get("tools")),
        calls_wanted=body.get("tool_choice") != "none",
        max_tokens=positive(body, "max_output_tokens"),
        template_arguments=template_arguments(body),
        no_thinking="reasoning" if thinks_not else "",
        ignored=ignored,
        digest=digest,
        again=again,
    )


def _refuse_forms(text: object) -> None:
    """Raises NotUnderstood and CallRefused for a `text` that wants more than text."""
    if text is None:
        return
    form = (text.get("format") or {"type": "text"}) if isinstance(text, dict) else None
    if not isinstance(text, dict) or not isinstance(form, dict):
        raise NotUnderstood('text: expected an object such as {"format": {"type": "text"}}', param="text")
    if form.get("type") != "text":
        message = "text.format: answers are not constrained to a form; ask for it in words, or by a tool"
        raise CallRefused(400, "unsupported_value", message, param="text")
    for name, value in text.items():
        if name != "format" and value is not None and (name, value) != ("verbosity", "medium"):
            raise unserved(f"text.{name}", value)


def response_messages(body: Mapping[str, Any]) -> tuple[AgentMessage, ...]:
    """`instructions` and `input` as messages; neighbouring items of the assistant are one message.

    Raises NotUnderstood, and CallRefused for what is referred to and not sent.
    """
    given = body.get("input")
    items: object = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise NotUnderstood("input: expected text or a list of at least one item", param="input")
    found: list[AgentMessage] = []
    if body.get("instructions"):
        found.append(AgentMessage("system", text_in(body["instructions"], param="instructions")))
    names: dict[str, str] = {}
    for place, item in enumerate(items):
        _add(found, item, names, param=f"input.{place}")
    if not found:
        raise NotUnderstood("input: it holds reasoning alone; expected a message of somebody's, too", param="input")
    return tuple(found)


def _add(found: list[AgentMessage], item: Any, names: dict[str, str], *, param: str) -> None:
    match item:
        case {"type": "function_call", "call_id": str(call_id), "name": str(name), "arguments": str(arguments)}:
            names[call_id] = name
            join(found, AgentMessage("assistant", calls=(MadeCall(call_id, name, arguments),)))
        case {"type": "function_call_output", "call_id": str(call_id), "output": output}:
            text = text_in(output, param=f"{param}.output")
            found.append(AgentMessage("tool", text, call_id=call_id, name=names.get(call_id, "")))
        case {"type": str(kind)} if kind in _PASSED_OVER:
            return
        case {"type": "item_reference"}:
            told = "responses are not stored; send the item itself, as clients do that are told store = false"
            raise CallRefused(400, "unsupported_value", f"{param}: an item_reference: {told}", param=param)
        case {"role": str(role)}:
            said = AgentMessage(role_of(role, param=param), text_in(item.get("content"), param=f"{param}.content"))
            if said.role == "assistant":
                join(found, said)
            else:
                found.append(said)
        case _:
            other = item.get("type") if isinstance(item, dict) else None
            was = "" if other is None else f"it is of type {str(other)[:64]}; "
            expected = "a message, function_call or function_call_output"
            raise NotUnderstood(f"{param}: {was}expected {expected}", param=param)


def join(found: list[AgentMessage], said: AgentMessage) -> None:
    """Append what the assistant said, to its message before if that is the last one."""
    if found and found[-1].role == "assistant":
        found[-1] = AgentMessage("assistant", found[-1].text + said.text, (*found[-1].calls, *said.calls))
    else:
        found.append(said)


def _tools(given: object) -> tuple[Tool, ...]:
    if given is None:
        return ()
    if not isinstance(given, list):
        raise NotUnderstood("tools: expected a list", param="tools")
    found = []
    for place, each in enumerate(given):
        match each:
            case {"type": "function", "name": str(name)}:
                found.append(function_tool(name, each))
            case _:
                raise no_function(each, place)
    return tuple(found)


def response_answer(session: AgentSession, answering: PendingTurn) -> dict[str, Any]:
    """A finished turn as a response."""
    length = answering.completion.finish_reason == "length"
    return {
        **_head(session, answering),
        "status": "incomplete" if length else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if length else None,
        "output": _output(answering),
        "usage": _usage(answering),
    }


async def response_events(session: AgentSession, answering: PendingTurn) -> AsyncIterator[dict[str, Any]]:
    """The same as it grows: named events, each with its number. Raises CallRefused when it cannot be finished."""
    number = 0
    async for event in _events(session, answering):
        yield {**event, "sequence_number": number}
        number += 1


async def _events(session: AgentSession, answering: PendingTurn) -> AsyncIterator[dict[str, Any]]:
    unfinished = {**_head(session, answering), "status": "in_progress", "output": [], "usage": None}
    yield {"type": "response.created", "response": unfinished}
    yield {"type": "response.in_progress", "response": unfinished}
    place = {"item_id": _message_id(answering), "output_index": 0, "content_index": 0}
    begun = False
    async for text in answering.texts():
        if not begun:
            begun = True
            for event in _message_begun(answering, place):
                yield event
        yield {"type": "response.output_text.delta", **place, "delta": text, "logprobs": []}
    output = _output(answering)
    for index, item in enumerate(output):
        if item["type"] == "message":
            for event in [] if begun else _message_begun(answering, place):
                yield event
            for event in _message_done(item, place):
                yield event
        else:
            for event in _call_events(item, index):
                yield event
    done = response_answer(session, answering)
    kind = "response.completed" if done["status"] == "completed" else "response.incomplete"
    yield {"type": kind, "response": done}


def _message_begun(answering: PendingTurn, place: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    item = {"id": place["item_id"], "type": "message", "role": "assistant", "status": "in_progress", "content": []}
    return (
        {"type": "response.output_item.added", "output_index": 0, "item": item},
        {"type": "response.content_part.added", **place, "part": _part("")},
    )


def _message_done(item: Mapping[str, Any], place: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    part = item["content"][0]
    return (
        {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []},
        {"type": "response.content_part.done", **place, "part": part},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
    )


def _call_events(item: Mapping[str, Any], index: int) -> Sequence[dict[str, Any]]:
    place = {"item_id": item["id"], "output_index": index}
    begun = {**item, "arguments": "", "status": "in_progress"}
    return (
        {"type": "response.output_item.added", "output_index": index, "item": begun},
        {"type": "response.function_call_arguments.delta", **place, "delta": item["arguments"]},
        {
            "type": "response.function_call_arguments.done",
            **place,
            "name": item["name"],
            "arguments": item["arguments"],
        },
        {"type": "response.output_item.done", "output_index": index, "item": item},
    )


def _output(answering: PendingTurn) -> list[dict[str, Any]]:
    reply = answering.reply
    assert reply is not None, "an unfinished answer"
    found: list[dict[str, Any]] = []
    if reply.text or not reply.calls:
        found.append(
            {
                "id": _message_id(answering),
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [_part(reply.text)],
            }
        )
    return found + [
        {
            "id": f"fc_{call.id}",
            "type": "function_call",
            "status": "completed",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
        }
        for call in reply.calls
    ]


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message_id(answering: PendingTurn) -> str:
    return f"msg_{answering.id}"


def _head(session: AgentSession, answering: PendingTurn) -> dict[str, Any]:
    return {
        "id": f"resp_{answering.id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": session.model,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": session.speaker.request.sampling.temperature,
        "top_p": session.speaker.request.sampling.top_p,
        "tool_choice": "auto",
        "tools": [],
    }


def _usage(answering: PendingTurn) -> dict[str, Any]:
    given, sampled = len(answering.prompt), len(answering.completion.token_ids)
    return {
        "input_tokens": given,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": given + sampled,
    }
