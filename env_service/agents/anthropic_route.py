"""`/v1/messages` of a session: requests and answers in Anthropic's form, on the same turns as OpenAI's.

A request's `system` and messages become one history; results of tools, which are blocks of the user's message there,
become messages of their own. Blocks of text stand apart by an empty line.
"""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from env_service.agents.chat_route import texts_of
from env_service.agents.fields import Fields, Terms, check_switch, positive, template_arguments, unserved
from env_service.agents.messages import AgentMessage, MadeCall, NotUnderstood, function_tool, text_in
from env_service.agents.responses_route import join
from env_service.agents.sessions import AgentRequest, AgentSession, CallRefused, PendingTurn
from env_service.environments.interface import Tool

_READ = frozenset({"messages", "system", "max_tokens", "stop_sequences", "stream", "tools", "chat_template_kwargs"})
_HARMLESS = frozenset(
    {
        "model",
        "betas",
        "billing_policy",
        "cache_control",
        "fallback_credit_token",
        "fallbacks",
        "inference_geo",
        "metadata",
        "service_tier",
        "user_profile_id",
        "workspace_id",
    }
)
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "tool_choice": ({"type": "auto"}, {"type": "none"}),
    "mcp_servers": ([],),
    "output_config": ({},),
    "speed": ("standard",),
}
_HARMLESS_OF_TOOLS = frozenset({"type", "cache_control", "strict", "eager_input_streaming"})
_READ_OF_TOOLS = frozenset({"name", "description", "input_schema"})
_KINDS: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def _forces_a_call(tool_choice: object) -> bool:
    return isinstance(tool_choice, dict) and tool_choice.get("type") in ("any", "tool")


def _wants_no_thinking(thinking: object) -> bool:
    given = {name: value for name, value in thinking.items() if value is not None} if isinstance(thinking, dict) else {}
    return given == {"type": "disabled"}


_FIELDS = Fields(read=_READ, neutral=_NEUTRAL, forces=_forces_a_call, harmless=_HARMLESS)


def asked_of_messages(body: Mapping[str, Any], terms: Terms, *, digest: str, again: bool) -> AgentRequest:
    """The request that a body holds. Raises NotUnderstood, and CallRefused for fields that are not followed."""
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        if choice.get("disable_parallel_tool_use"):
            raise unserved("tool_choice.disable_parallel_tool_use", True)
        choice = {name: value for name, value in choice.items() if name != "disable_parallel_tool_use"}
    thinks_not = _wants_no_thinking(body.get("thinking"))
    ignored = _FIELDS.ignored({**body, "tool_choice": choice, **({"thinking": None} if thinks_not else {})}, terms)
    check_switch(body, "stream")
    return AgentRequest(
        messages=anthropic_messages(body),
        tools=_tools(body.get("tools")),
        calls_wanted=choice != {"type": "none"},
        max_tokens=positive(body, "max_tokens"),
        stop=texts_of(body, "stop_sequences"),
        template_arguments=template_arguments(body),
        no_thinking="thinking" if thinks_not else "",
        ignored=ignored,
        digest=digest,
        again=again,
    )


def anthropic_messages(body: Mapping[str, Any]) -> tuple[AgentMessage, ...]:
    """`system` and `messages` as one history; neighbours of the same role are one message. Raises NotUnderstood."""
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise NotUnderstood("messages: expected a list of at least one message", param="messages")
    found: list[AgentMessage] = []
    if body.get("system"):
        found.append(AgentMessage("system", _apart(_blocks(body["system"], param="system"), param="system")))
    names: dict[str, str] = {}
    for place, message in enumerate(given):
        _add(found, message, names, param=f"messages.{place}")
    if found[-1].role == "assistant":
        last = "an answer is always a new message; end with a message of the user's"
        raise NotUnderstood(f"messages: the last one is the assistant's: {last}", param="messages")
    return tuple(found)


def _add(found: list[AgentMessage], message: Any, names: dict[str, str], *, param: str) -> None:
    match message:
        case {"role": "assistant", "content": content}:
            said = _assistant(_blocks(content, param=f"{param}.content"), param=f"{param}.content")
            names.update({call.id: call.name for call in said.calls})
            join(found, said)
        case {"role": "system", "content": content}:
            found.append(AgentMessage("system", _apart(_blocks(content, param=param), param=f"{param}.content")))
        case {"role": "user", "content": content}:
            _add_user(found, _blocks(content, param=f"{param}.content"), names, param=f"{param}.content")
        case _:
            raise NotUnderstood(f"{param}: expected role user, assistant or system, and content", param=param)


def _blocks(content: object, *, param: str) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise NotUnderstood(f"{param}: expected text or a list of blocks", param=param)
    return content


def _apart(blocks: list[Any], *, param: str) -> str:
    return "\n\n".join(text_in([block], param=param) for block in blocks)


def _assistant(blocks: list[Any], *, param: str) -> AgentMessage:
    text, calls = "", []
    for block in blocks:
        match block:
            case {"type": "tool_use", "id": str(name_of_call), "name": str(name), "input": dict(given)}:
                calls.append(MadeCall(name_of_call, name, json.dumps(given, ensure_ascii=False)))
            case _:
                text += text_in([block], param=param)
    return AgentMessage("assistant", text, tuple(calls))


def _add_user(found: list[AgentMessage], blocks: list[Any], names: Mapping[str, str], *, param: str) -> None:
    texts: list[str] = []
    results = False
    for block in blocks:
        match block:
            case {"type": "tool_result", "tool_use_id": str(call_id)}:
                _add_text(found, texts)
                content = _apart(_blocks(block.get("content") or [], param=param), param=param)
                found.append(AgentMessage("tool", content, call_id=call_id, name=names.get(call_id, "")))
                results = True
            case _:
                texts.append(text_in([block], param=param))
    if texts or not results:
        _add_text(found, texts or [""])


def _add_text(found: list[AgentMessage], texts: list[str]) -> None:
    """Empties the texts into a message of the user's."""
    if not texts:
        return
    if found and found[-1].role == "user":
        texts.insert(0, found.pop().text)
    found.append(AgentMessage("user", "\n\n".join(texts)))
    texts.clear()


def _tools(given: object) -> tuple[Tool, ...]:
    if given is None:
        return ()
    if not isinstance(given, list):
        raise NotUnderstood("tools: expected a list", param="tools")
    return tuple(_tool(each, param=f"tools.{place}") for place, each in enumerate(given))


def _tool(given: Any, *, param: str) -> Tool:
    match given:
        case {"type": str(kind)} if kind != "custom":
            raise NotUnderstood(f"{param}: tools of type {kind} are not run here; offer one of your own", param=param)
        case {"name": str(name), "input_schema": dict(schema)}:
            for each, value in given.items():
                if value and each not in _READ_OF_TOOLS | _HARMLESS_OF_TOOLS:
                    raise unserved(f"{param}.{each}", value)
            return function_tool(name, {"description": given.get("description"), "parameters": schema})
    raise NotUnderstood(f"{param}: expected a tool with name and input_schema", param=param)


def message_answer(session: AgentSession, answering: PendingTurn) -> dict[str, Any]:
    """A finished turn as a message."""
    assert answering.reply is not None, "an unfinished answer"
    text, calls = answering.reply.text, answering.reply.calls
    content: list[dict[str, Any]] = [{"type": "text", "text": text, "citations": None}] if text else []
    content += [{**_call(call), "input": call.value} for call in calls]
    return {**_head(session, answering), "content": content, **_ending(answering), "usage": _usage(answering)}


async def message_events(session: AgentSession, answering: PendingTurn) -> AsyncIterator[dict[str, Any]]:
    """The same as it grows. Raises CallRefused when the turn cannot be finished."""
    begun = {**_usage(answering), "output_tokens": 0}
    unfinished: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": begun}
    yield {"type": "message_start", "message": {**_head(session, answering), **unfinished}}
    blocks = 0
    async for text in answering.texts():
        if not blocks:
            yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
            blocks = 1
        yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
    if blocks:
        yield {"type": "content_block_stop", "index": 0}
    assert answering.reply is not None, "an unfinished answer"
    for index, call in enumerate(answering.reply.calls, blocks):
        part = {"type": "input_json_delta", "partial_json": call.arguments}
        yield {"type": "content_block_start", "index": index, "content_block": {**_call(call), "input": {}}}
        yield {"type": "content_block_delta", "index": index, "delta": part}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": _ending(answering), "usage": _usage(answering)}
    yield {"type": "message_stop"}


def anthropic_error(refusal: CallRefused) -> dict[str, Any]:
    """A refusal in Anthropic's form; agents know by its first words that their history is too long."""
    kind = _KINDS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    text = f"prompt is too long: {refusal}" if refusal.code == "context_length_exceeded" else str(refusal)
    return {"type": "error", "error": {"type": kind, "message": text}}


def _head(session: AgentSession, answering: PendingTurn) -> dict[str, Any]:
    return {"id": f"msg_{answering.id}", "type": "message", "role": "assistant", "model": session.model}


def _call(call: MadeCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _ending(answering: PendingTurn) -> dict[str, Any]:
    """Stop reason of the turn, and the stop text of the request that ended it."""
    assert answering.reply is not None, "an unfinished answer"
    text = answering.language.tokenization.said(answering.completion.token_ids)
    places = {text.index(stop): stop for stop in answering.asked.stop if stop in text}
    if answering.reply.calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if answering.completion.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if places:
        return {"stop_reason": "stop_sequence", "stop_sequence": places[min(places)]}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(answering: PendingTurn) -> dict[str, int]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {
        "input_tokens": len(answering.prompt),
        "output_tokens": len(answering.completion.token_ids),
        **cached,
    }
