"""`/v1/chat/completions` of a session: requests and answers in OpenAI's form."""

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from env_service.agents.fields import NEUTRAL, Fields, Terms, check_switch, positive, template_arguments, unserved
from env_service.agents.messages import MadeCall, NotUnderstood, chat_messages, chat_tools
from env_service.agents.sessions import AgentRequest, AgentSession, PendingTurn
from env_service.rollouts.completions import Completion

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **NEUTRAL,
    "add_generation_prompt": (True,),
    "bad_words": ([],),
    "continue_final_message": (False,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "response_format": ({"type": "text"}, {}),
    "stop_token_ids": ([],),
    "verbosity": ("medium",),
}
_READ = frozenset(
    {
        "messages",
        "tools",
        "max_completion_tokens",
        "max_tokens",
        "stop",
        "stream",
        "stream_options",
        "logprobs",
        "chat_template_kwargs",
    }
)
_MAX_STOPS = 16
NO_EFFORT = "none"
"""The effort of reasoning, on both of OpenAI's routes, that wants none."""


def forces_a_call(tool_choice: object) -> bool:
    """Tells whether a `tool_choice` of OpenAI's wants a call, or one of certain tools."""
    return tool_choice == "required" or isinstance(tool_choice, dict)


_FIELDS = Fields(read=_READ, neutral=_NEUTRAL, forces=forces_a_call)


def asked_of_chat(body: Mapping[str, Any], terms: Terms, *, digest: str, again: bool) -> AgentRequest:
    """The request that a body holds. Raises NotUnderstood, and CallRefused for fields that are not followed."""
    thinks_not = body.get("reasoning_effort") == NO_EFFORT
    ignored = _FIELDS.ignored({**body, "reasoning_effort": None} if thinks_not else body, terms)
    for name in ("stream", "logprobs"):
        check_switch(body, name)
    if body.get("stream") and body.get("logprobs"):
        raise unserved("logprobs", True)
    if not isinstance(body.get("stream_options") or {}, dict):
        raise NotUnderstood(
            'stream_options: expected an object such as {"include_usage": true}', param="stream_options"
        )
    return AgentRequest(
        messages=chat_messages(body.get("messages")),
        tools=chat_tools(body.get("tools")),
        calls_wanted=body.get("tool_choice") != "none",
        max_tokens=positive(body, "max_completion_tokens") or positive(body, "max_tokens"),
        stop=texts_of(body, "stop"),
        template_arguments=template_arguments(body),
        no_thinking="reasoning_effort" if thinks_not else "",
        ignored=ignored,
        digest=digest,
        again=again,
    )


def texts_of(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """The texts of a field, such as those that end an answer. Raises NotUnderstood."""
    given = body.get(name)
    texts = [given] if isinstance(given, str) else given or []
    if not isinstance(texts, list) or len(texts) > _MAX_STOPS or not all(isinstance(text, str) for text in texts):
        raise NotUnderstood(f"{name}: expected a text or a list of at most {_MAX_STOPS}", param=name)
    return tuple(text for text in texts if text)


def chat_answer(session: AgentSession, answering: PendingTurn, *, logprobs: bool) -> dict[str, Any]:
    """A finished turn as a chat completion."""
    assert answering.reply is not None, "an unfinished answer"
    reply = answering.reply
    message: dict[str, Any] = {"role": "assistant", "content": reply.text or (None if reply.calls else "")}
    if reply.calls:
        message["tool_calls"] = [_call(call) for call in reply.calls]
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": _reason(answering),
        "logprobs": _logprobs(answering) if logprobs else None,
    }
    return {**_head(session, answering, "chat.completion"), "choices": [choice], "usage": _usage(answering)}


async def chat_chunks(session: AgentSession, answering: PendingTurn, *, usage: bool) -> AsyncIterator[dict[str, Any]]:
    """The same as it grows. Raises CallRefused when the turn cannot be finished."""
    head = _head(session, answering, "chat.completion.chunk")
    yield _chunk(head, {"role": "assistant", "content": ""})
    sent = ""
    async for text in answering.texts():
        yield _chunk(head, {"content": text})
        sent += text
    assert answering.reply is not None, "an unfinished answer"
    for index, call in enumerate(answering.reply.calls):
        function = {"name": call.name, "arguments": ""}
        yield _chunk(head, {"tool_calls": [{"index": index, "id": call.id, "type": "function", "function": function}]})
        yield _chunk(head, {"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]})
    yield _chunk(head, {}, reason=_reason(answering))
    if usage:
        yield {**head, "choices": [], "usage": _usage(answering)}


def _chunk(head: Mapping[str, Any], delta: Mapping[str, Any], *, reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
    return {**head, "choices": [choice]}


def _head(session: AgentSession, answering: PendingTurn, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answering.id}", "object": kind, "created": int(time.time()), "model": session.model}


def _call(call: MadeCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _reason(answering: PendingTurn) -> str:
    assert answering.reply is not None, "an unfinished answer"
    return "tool_calls" if answering.reply.calls else str(answering.completion.finish_reason)


def _usage(answering: PendingTurn) -> dict[str, int]:
    given, sampled = len(answering.prompt), len(answering.completion.token_ids)
    return {"prompt_tokens": given, "completion_tokens": sampled, "total_tokens": given + sampled}


def _logprobs(answering: PendingTurn) -> dict[str, Any]:
    completion: Completion = answering.completion
    texts = answering.language.tokenization.decode([[token] for token in completion.token_ids], special=True)
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, completion.behavior_logprobs, strict=True)
        ]
    }
