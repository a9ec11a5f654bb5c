"""Answers to users that may be rated: each gets an id and a key, and the learner is told of it.

    request ─▶ id drawn ─▶ vLLM's route ─▶ answer, with the key in a header ─▶ user
                                               └─ its text and version ─▶ line ─▶ POST /v1/served at the learner

The line holds some hundred answers while the learner is away; beyond that the oldest are left out and counted, and
cannot be rated. No answer waits for the learner. Prompts and answers leave this process only where the settings say so
(`join.feedback`).
"""

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

from pydantic import ValidationError
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protocol.feedback import (
    KEY_HEADER,
    MAX_ANSWER_CHARS,
    Feedback,
    FeedbackAnswer,
    ServedAnswer,
    ServedCompletion,
)
from services.http.client import HttpClient, ServiceError, ServiceRefused
from services.http.metrics import Metrics, one_label
from services.http.refusals import RequestRefused

logger = logging.getLogger(__name__)

_ELSEWHERE = ("tool_calls", "function_call", "reasoning", "reasoning_content", "refusal", "audio")
"""Parts into which a parser puts what was sampled, beside the content: the text alone was never sampled."""
_MAKE_ANOTHER_PROMPT = (
    "tools",
    "functions",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "continue_final_message",
    "truncate_prompt_tokens",
    "prompt_embeds",
    "suffix",
    "echo",
)
"""Of a request: with one of these the prompt was not what a training file makes of messages or text alone, or the
answer holds more than was sampled.
"""
_ROUTES = ("/v1/chat/completions", "/v1/completions")
_MAX_WAITING = 512
_RETRY_S = 1.0
_DEADLINE_S = 10.0
_KEY_BYTES = 24


class ServedLine:
    """Answers on their way to the learner."""

    def __init__(self, *, learner: str, client: HttpClient, metrics: Metrics) -> None:
        self._url = f"{learner.rstrip('/')}/v1/served"
        self._client = client
        self._waiting: deque[ServedCompletion] = deque()
        self._came = asyncio.Event()
        self._counts = metrics.counter(
            "rateable_answers",
            "Answers to users, by what became of them: told to the learner, refused by it, or left out.",
            labels=("outcome",),
            known=one_label("told", "refused", "left_out"),
        )

    def put(self, answer: ServedCompletion) -> None:
        """Tells the learner as soon as it listens."""
        if len(self._waiting) >= _MAX_WAITING:
            self._waiting.popleft()
            self._counts.labels(outcome="left_out").inc()
        self._waiting.append(answer)
        self._came.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self._came.wait()
            self._came.clear()
            while self._waiting:
                answer = self._waiting[0]
                try:
                    await self._client.post(self._url, answer, ServedAnswer, deadline_s=_DEADLINE_S)
                except ServiceRefused as error:  # or it can be sent to nobody
                    logger.warning("the learner does not keep answer %s, which cannot be rated: %s", answer.id, error)
                    self._done(answer, "refused")
                except ServiceError:
                    await asyncio.sleep(_RETRY_S)
                else:
                    self._done(answer, "told")

    def _done(self, answer: ServedCompletion, outcome: str) -> None:
        with contextlib.suppress(ValueError):  # it was left out meanwhile
            self._waiting.remove(answer)
            self._counts.labels(outcome=outcome).inc()


async def relayed(told: Feedback, *, learner: str, client: HttpClient) -> FeedbackAnswer:
    """Passes a user's reward on; returns the learner's answer. Raises RequestRefused, also where it does not answer."""
    try:
        return await client.post(f"{learner.rstrip('/')}/v1/feedback", told, FeedbackAnswer, deadline_s=_DEADLINE_S)
    except ServiceRefused as error:
        raise RequestRefused(error.status, error.kind, error.message) from error
    except ServiceError as error:
        message = f"the learner does not answer, so the reward is not kept: tell it again ({error})"
        raise RequestRefused(503, "learner_away", message, retry_after_s=_DEADLINE_S) from error


class RateableAnswers:
    """An application whose completions may be rated. `version` tells the version that is served now."""

    def __init__(
        self, app: ASGIApp, *, version: Callable[[], str | None], told: Callable[[ServedCompletion], None]
    ) -> None:
        self._app = app
        self._version = version
        self._told = told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith(_ROUTES):
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(version=self._version(), is_chat=scope["path"].endswith(_ROUTES[0]))
        headers = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
        heard = {**scope, "headers": [*headers, (b"x-request-id", exchange.name.encode())]}
        await self._app(heard, exchange.reading(receive), exchange.writing(send))
        with contextlib.suppress(ValidationError, ValueError, KeyError, TypeError):
            answer = exchange.answer(until=self._version())
            if answer is not None:
                answer.model_dump_json()  # raises for text that UTF-8 does not have, such as half of a pair
                self._told(answer)


class _Exchange:
    """A request and its answer, as they pass."""

    def __init__(self, *, version: str | None, is_chat: bool) -> None:
        self.name = secrets.token_hex(16)
        self._key = secrets.token_urlsafe(_KEY_BYTES)
        self._version = version
        self._is_chat = is_chat
        self._asked = bytearray()
        self._said = bytearray()
        self._status = 0
        self._is_stream = False

    def reading(self, receive: Receive) -> Receive:
        """Notes the body."""

        async def noted() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                self._asked += message.get("body", b"")
            return message

        return noted

    def writing(self, send: Send) -> Send:
        """Notes the answer, and adds its key."""

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._status = message["status"]
                headers = MutableHeaders(scope=message)
                self._is_stream = headers.get("content-type", "").startswith("text/event-stream")
                if self._status == 200:
                    headers[KEY_HEADER] = self._key
            elif message["type"] == "http.response.body" and len(self._said) <= 16 * MAX_ANSWER_CHARS:
                self._said += message.get("body", b"")
            await send(message)

        return noted

    def answer(self, *, until: str | None) -> ServedCompletion | None:
        """The answer that may be rated; None for one that failed. Raises ValueError, KeyError, TypeError."""
        if self._status != 200 or self._version is None or until is None:
            return None
        asked = json.loads(self._asked)
        prompt = _prompt_of(asked, is_chat=self._is_chat)
        name, texts, endings = self._streamed() if self._is_stream else self._whole()
        return ServedCompletion(
            id=name,
            key_hash=sha256(self._key.encode()).hexdigest(),
            version=self._version,
            until=until,
            served_at=time.time(),
            prompt=prompt,
            choices=tuple(texts[index] for index in sorted(texts)),
            cut_off=tuple(
                place for place, index in enumerate(sorted(texts)) if not _has_ended(endings.get(index, {}), asked)
            ),
        )

    def _whole(self) -> tuple[str, dict[int, str], dict[int, Mapping[str, Any]]]:
        """The id, texts by index, and what says how they ended."""
        said = json.loads(self._said)
        texts = {choice["index"]: self._text(choice, "message") for choice in said["choices"]}
        return said["id"], texts, {choice["index"]: choice for choice in said["choices"]}

    def _streamed(self) -> tuple[str, dict[int, str], dict[int, Mapping[str, Any]]]:
        name, texts, endings = "", dict[int, str](), dict[int, Mapping[str, Any]]()
        # Of bytes, since a text has ends of lines, such as U+2028, that are none of the stream's and stand in answers.
        for line in map(bytes.decode, bytes(self._said).splitlines()):
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            part = json.loads(line.removeprefix("data: "))
            name = part["id"]
            for choice in part["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + self._text(choice, "delta")
                if choice.get("finish_reason"):
                    endings[choice["index"]] = choice
        return name, texts, endings

    def _text(self, choice: dict[str, Any], within: str) -> str:
        """Raises ValueError for an answer of which the content is not all that was sampled."""
        if not self._is_chat:
            return str(choice["text"])
        if cut := [name for name in _ELSEWHERE if choice[within].get(name)]:
            raise ValueError(f"the answer has {' and '.join(cut)} beside its text")
        return str(choice[within].get("content") or "")


def _has_ended(choice: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    """The policy sampled an end token: no `max_tokens`, no `stop` of the request, and no user who left ended it. Of a
    model with several end tokens the engine names the others as a reason.
    """
    reason = choice.get("stop_reason")
    stopped = isinstance(reason, str) or (reason is not None and reason in (asked.get("stop_token_ids") or ()))
    return choice.get("finish_reason") == "stop" and not stopped


def _prompt_of(asked: Mapping[str, Any], *, is_chat: bool) -> Any:
    """The text, or the messages, whose contents are texts. Raises ValueError for a request of which these alone do not
    say what was answered: trained from them, the answer would be one to another prompt.
    """
    if beside := [name for name in _MAKE_ANOTHER_PROMPT if asked.get(name)]:
        raise ValueError(f"the request has {' and '.join(beside)} beside its prompt")
    if asked.get("add_special_tokens", not is_chat) is is_chat or asked.get("add_generation_prompt") is False:
        raise ValueError("the request changes how its prompt is tokenized")
    if is_chat:
        return [_message_of(message) for message in asked["messages"]]
    if not isinstance(asked["prompt"], str):
        raise ValueError("of several prompts, or of token ids, no text says what an answer is to")
    return asked["prompt"]


def _message_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """With a text as its content, also where the client sent that as the only part of a list. Raises ValueError."""
    if beside := [name for name in _ELSEWHERE if message.get(name)]:
        raise ValueError(f"a message of the request has {' and '.join(beside)} beside its text")
    match message.get("content"):
        case str(text) | [{"type": "text", "text": str(text)}]:
            return {**message, "content": text}
    raise ValueError("a message of the request is no text")
