"""`/v1/chat/completions` of a session: requests and answers in OpenAI's form."""

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from env_service.agents.messages import MadeCall, NotUnderstood, chat_messages, chat_tools
from env_service.agents.sessions import Answering, Asked, CallRefused, Session
from env_service.rollouts.completions import Completion
from protocol.generation import Sampling

_FIXED: Mapping[str, float] = {
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "n": 1,
}
"""What a request may set to these values only: sampling is the learner's affair."""
HARMLESS = frozenset(
    {
        "model",
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "service_tier",
        "stream_options",
        "seed",
    }
)
"""What may be ignored, whatever it says: no answer would be another one. Seeds are the lease's."""
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "store": (False,),
    "parallel_tool_calls": (True,),
    "tool_choice": ("auto", "none", "required"),
    "top_logprobs": (0,),
}
"""What may be said of fields that are not served: what holds here anyway, or is a wish. None is always taken."""
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **NEUTRAL,
    "add_generation_prompt": (True,),
    "bad_words": ([],),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "function_call": ("auto",),
    "functions": ([],),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "stop_token_ids": ([],),
}
SAMPLING = frozenset({*_FIXED, "temperature", "top_k", "logit_bias", "response_format"})
_READ = frozenset({"messages", "tools", "max_completion_tokens", "max_tokens", "stop", "stream", "logprobs"})
_ADVICE: Mapping[str, str] = {
    "background": "answers come in the reply to their request",
    "conversation": "responses are not stored; send the conversation in input",
    "continue_final_message": "an answer is always a new message; end the messages before it",
    "function_call": "use tools",
    "functions": "send them as tools",
    "logprobs": "ask for them without stream",
    "parallel_tool_calls": "the policy may make several calls in one answer",
    "prompt": "send the text in input or instructions",
    "store": "responses are not stored",
    "tool_choice": "the policy chooses which tool it calls; offer that tool alone",
    "top_logprobs": "of each token only its own logprob is known; set logprobs alone",
}
_MOST_STOPS = 16


def asked_of_chat(body: Mapping[str, Any], sampling: Sampling, *, digest: str, again: bool) -> Asked:
    """The request that a body holds. Raises NotUnderstood, and CallRefused for sampling that is not the learner's."""
    refuse_other_sampling(body, sampling)
    refuse_unserved(body, read=_READ, neutral=_NEUTRAL)
    for name in ("stream", "logprobs"):
        check_switch(body, name)
    if body.get("stream") and body.get("logprobs"):
        raise unserved("logprobs", True)
    return Asked(
        messages=chat_messages(body.get("messages")),
        tools=chat_tools(body.get("tools")),
        calls_wanted=body.get("tool_choice") != "none",
        max_tokens=positive(body, "max_completion_tokens") or positive(body, "max_tokens"),
        stop=_stops(body.get("stop")),
        digest=digest,
        again=again,
    )


def refuse_other_sampling(body: Mapping[str, Any], sampling: Sampling) -> None:
    """Raises CallRefused, naming the field, where a request wants other tokens to be likely than the lease does."""
    wanted: dict[str, float] = {**_FIXED, "temperature": sampling.temperature, "top_k": sampling.top_k}
    for name, value in wanted.items():
        given = body.get(name)
        same = (value, -1) if name == "top_k" else (value,)
        if given is not None and given not in same:
            raise CallRefused(
                400,
                "unsupported_value",
                f"{name}: {given!r} would make other tokens likely than the run samples with ({value:g}); leave it out",
                param=name,
            )
    if body.get("logit_bias"):
        raise CallRefused(400, "unsupported_value", "logit_bias: leave it out", param="logit_bias")
    form = body.get("response_format") or {"type": "text"}
    if not isinstance(form, dict) or form.get("type") != "text":
        message = "response_format: answers are not constrained to a form; ask for it in words, or by a tool"
        raise CallRefused(400, "unsupported_value", message, param="response_format")


def refuse_unserved(
    body: Mapping[str, Any], *, read: frozenset[str], neutral: Mapping[str, tuple[object, ...]]
) -> None:
    """Raises CallRefused for a field that would be ignored, though the agent may count on what it says."""
    for name, given in body.items():
        if given is None or name in read or name in HARMLESS or name in SAMPLING:
            continue
        # A flag is no number here: 0 is not False.
        if not any(
            given == value and isinstance(given, bool) == isinstance(value, bool) for value in neutral.get(name, ())
        ):
            raise unserved(name, given)


def unserved(name: str, given: object) -> CallRefused:
    """The refusal of a field that this endpoint does not follow."""
    advice = f": {_ADVICE[name]}" if name in _ADVICE else ""
    shown = repr(given)
    text = f"{name[:64]}: {shown[:80]} is not supported{advice}; leave the field out"
    return CallRefused(400, "unsupported_value", text, param=name[:64])


def check_switch(body: Mapping[str, Any], name: str) -> None:
    """Raises NotUnderstood for a flag that is neither true nor false."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise NotUnderstood(f"{name}: expected true or false, got {value!r}", param=name)


def positive(body: Mapping[str, Any], name: str) -> int | None:
    """A whole number above 0 in a request; None if it is not given. Raises NotUnderstood."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise NotUnderstood(f"{name}: expected a whole number above 0, got {value!r}", param=name)
    return value


def _stops(given: object) -> tuple[str, ...]:
    texts = [given] if isinstance(given, str) else given or []
    if not isinstance(texts, list) or len(texts) > _MOST_STOPS or not all(isinstance(text, str) for text in texts):
        raise NotUnderstood(f"stop: expected a text or a list of at most {_MOST_STOPS}", param="stop")
    return tuple(text for text in texts if text)


def chat_answer(session: Session, answering: Answering, *, logprobs: bool) -> dict[str, Any]:
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


async def chat_chunks(session: Session, answering: Answering, *, usage: bool) -> AsyncIterator[dict[str, Any]]:
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


def _head(session: Session, answering: Answering, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answering.id}", "object": kind, "created": int(time.time()), "model": session.model}


def _call(call: MadeCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _reason(answering: Answering) -> str:
    assert answering.reply is not None, "an unfinished answer"
    return "tool_calls" if answering.reply.calls else str(answering.completion.finish_reason)


def _usage(answering: Answering) -> dict[str, int]:
    given, sampled = len(answering.prompt), len(answering.completion.token_ids)
    return {"prompt_tokens": given, "completion_tokens": sampled, "total_tokens": given + sampled}


def _logprobs(answering: Answering) -> dict[str, Any]:
    completion: Completion = answering.completion
    texts = answering.language.tokenization.decode([[token] for token in completion.token_ids], special=True)
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, completion.behavior_logprobs, strict=True)
        ]
    }
