"""The routes of sessions.

    POST /v1/sessions                              a task of a lease that waits for an agent from outside
    POST /v1/sessions/{id}/v1/chat/completions     the policy, for the session's key
    POST /v1/sessions/{id}/v1/responses
    POST /v1/sessions/{id}/v1/messages             the same as Anthropic's API, with `/count_tokens`
    GET  /v1/sessions/{id}/v1/models
    POST /v1/sessions/{id}/commands                runs a command on the computer of its task, if that has one
    POST /v1/sessions/{id}/reward                  ends the session

Errors have the form of the API that is asked: clients decide by status and code whether they try again.
"""

import asyncio
import hashlib
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response
from pydantic import Field, JsonValue, SecretStr, ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from env_service.agents.anthropic_route import anthropic_error, asked_of_messages, message_answer, message_events
from env_service.agents.chat_route import asked_of_chat, chat_answer, chat_chunks
from env_service.agents.commands import CommandAsked
from env_service.agents.fields import Terms
from env_service.agents.messages import NotUnderstood
from env_service.agents.program import task_json
from env_service.agents.registry import AgentLimits, AgentSessions
from env_service.agents.responses_route import asked_of_responses, response_answer, response_events
from env_service.agents.results import RewardPosted
from env_service.agents.sessions import AgentRequest, AgentSession, CallRefused, PendingTurn
from protocol.codec import describe
from protocol.model import WireModel
from protocol.status import Readiness
from services.http.app import OPEN_PATHS, create_app
from services.http.bodies import json_answer, json_body
from services.http.metrics import Metrics
from services.http.refusals import RequestRefused
from services.http.server import Listener, serve_http

OPEN_FOLDER = "/v1/sessions/"
"""Below it the sessions' own keys count, not the process's token."""


class SessionWanted(WireModel):
    """`POST /v1/sessions`: an agent from outside wants a task, of an environment if it names one."""

    environment: str | None = Field(None, max_length=256, description="name of the environment; any if not given")
    wait_s: float = Field(30.0, ge=0, le=300, description="how long to wait for a task, in seconds")


class SessionOpened(WireModel):
    """A session of an agent: the address at which it asks the policy, its key, and its task."""

    session_id: str
    base_url: str
    key: str
    model: str
    reward_url: str
    environment: str
    purpose: str
    task: dict[str, JsonValue]


def add_session_routes(app: FastAPI, sessions: AgentSessions) -> None:
    """Add them to the process's application."""

    @app.post("/v1/sessions", response_model=SessionOpened)
    async def open_session(
        request: Request, body: Annotated[SessionWanted, Depends(json_body(SessionWanted))]
    ) -> Response:
        """Hands out the session that waits longest; 503 if none comes in the time that the body gives."""
        session = await sessions.claim(environment=body.environment, within_s=body.wait_s, gone=request.is_disconnected)
        if session is None and sessions.stopping:
            raise RequestRefused(503, "stopping", "the env-service stops: ask another one for a task")
        if session is None:
            raise RequestRefused(503, "no_task", "no task waits for an agent from outside", retry_after_s=1.0)
        client = session.client(seed=0)
        opened = SessionOpened(
            session_id=session.id,
            base_url=client.base_url,
            key=client.key,
            model=client.model,
            reward_url=f"{session.url}/reward",
            environment=session.speaker.offered.name,
            purpose=session.speaker.request.purpose,
            task=task_json(session.task),
        )
        return json_answer(opened)

    @app.post("/v1/sessions/{name}/v1/chat/completions")
    async def chat(name: str, request: Request) -> Response:
        """OpenAI's chat completions, streamed or not."""
        return await _served(sessions, name, request, _chat)

    @app.post("/v1/sessions/{name}/v1/responses")
    async def responses(name: str, request: Request) -> Response:
        """OpenAI's responses, streamed or not."""
        return await _served(sessions, name, request, _responses)

    _add_anthropic_routes(app, sessions)

    @app.get("/v1/sessions/{name}/v1/models")
    async def models(name: str, request: Request) -> Response:
        """The one model that there is."""
        try:
            session = sessions.find(name, _key(request))
        except CallRefused as refusal:
            return JSONResponse(openai_error(refusal), status_code=refusal.status)
        model = {"id": session.model, "object": "model", "created": 0, "owned_by": "headway"}
        return JSONResponse({"object": "list", "data": [model]})

    @app.post("/v1/sessions/{name}/commands")
    async def commands(name: str, request: Request) -> Response:
        """Runs a command on the computer of the session's task; 404 for one without a computer."""
        return await _served(sessions, name, request, _commands)

    @app.post("/v1/sessions/{name}/reward")
    async def reward(name: str, request: Request) -> Response:
        """Ends the session with its reward."""
        return await _served(sessions, name, request, _reward)


def _add_anthropic_routes(app: FastAPI, sessions: AgentSessions) -> None:
    @app.post("/v1/sessions/{name}/v1/messages")
    async def messages(name: str, request: Request) -> Response:
        """Anthropic's messages, streamed or not."""
        return await _served(sessions, name, request, _messages, error_of=anthropic_error)

    @app.post("/v1/sessions/{name}/v1/messages/count_tokens")
    async def count_tokens(name: str, request: Request) -> Response:
        """Number of tokens that the policy would be given for such a request."""
        return await _served(sessions, name, request, _count_tokens, error_of=anthropic_error)


Handler = Callable[[AgentSession, Mapping[str, Any], Request, str], Any]


def openai_error(refusal: CallRefused) -> dict[str, Any]:
    """A refusal in OpenAI's form."""
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    return {"error": {"message": str(refusal), "type": kind, "param": refusal.param, "code": refusal.code}}


async def _served(
    sessions: AgentSessions,
    name: str,
    request: Request,
    handle: Handler,
    *,
    error_of: Callable[[CallRefused], dict[str, Any]] = openai_error,
) -> Response:
    try:
        session = sessions.find(name, _key(request))
        raw = await _body(request, most=sessions.limits.body_bytes)
        body = _parsed(raw, most_messages=sessions.limits.messages)
        digest = hashlib.blake2b(request.url.path.encode() + b"\n" + raw, digest_size=16).hexdigest()
        answer: Response = await handle(session, body, request, digest)
    except CallRefused as refusal:
        return JSONResponse(error_of(refusal), status_code=refusal.status)
    except NotUnderstood as error:
        unread = CallRefused(400, "invalid_request", str(error), param=error.param)
        return JSONResponse(error_of(unread), status_code=400)
    except RecursionError:
        # A body can be nested just so deeply that it is read, and not written again as the key of a conversation.
        deep = CallRefused(400, "invalid_request", "the body is nested too deeply; send what is flatter", param="body")
        return JSONResponse(error_of(deep), status_code=400)
    return answer


def _key(request: Request) -> str:
    own = request.headers.get("x-session-key") or request.headers.get("x-api-key")
    return own or request.headers.get("authorization", "").removeprefix("Bearer ")


async def _body(request: Request, *, most: int) -> bytes:
    """The body. Raises CallRefused for one that is too large, as soon as that is known."""
    found = bytearray()
    announced = request.headers.get("content-length", "")
    try:
        async with asyncio.timeout(60):
            if announced.isdecimal() and int(announced) > most:
                raise _too_large(int(announced), most)
            async for piece in request.stream():
                found += piece
                if len(found) > most:
                    raise _too_large(len(found), most)
    except (TimeoutError, ClientDisconnect) as error:
        raise CallRefused(408, "slow_body", "the body did not come") from error
    return bytes(found)


def _too_large(size: int, most: int) -> CallRefused:
    return CallRefused(413, "request_too_large", f"a body of {size} bytes or more; at most {most} are taken")


def _parsed(raw: bytes, *, most_messages: int) -> Mapping[str, Any]:
    try:
        body = json.loads(raw.decode(), parse_constant=_no_number, parse_float=_finite)
        if b"\\ud" in raw.lower():
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        message = "the body holds half a surrogate pair, which is no text; escape whole characters"
        raise NotUnderstood(message, param="body") from error
    except (ValueError, RecursionError) as error:
        raise NotUnderstood(f"the body is not JSON in UTF-8: {error}", param="body") from error
    if not isinstance(body, dict):
        raise NotUnderstood("the body is no JSON object", param="body")
    for name in ("messages", "input"):
        if isinstance(given := body.get(name), list) and len(given) > most_messages:
            raise CallRefused(400, "too_many_messages", f"{len(given)} {name}; at most {most_messages}", param=name)
    return body


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON; leave the field out")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text)


def _again(request: Request) -> bool:
    """True if the client says that it has sent this before."""
    return request.headers.get("x-stainless-retry-count", "0") not in ("", "0")


def _terms(session: AgentSession) -> Terms:
    return Terms(sampling=session.speaker.request.sampling, other=session.other_sampling)


async def _chat(session: AgentSession, body: Mapping[str, Any], request: Request, digest: str) -> Response:
    asked = asked_of_chat(body, _terms(session), digest=digest, again=_again(request))
    options = body.get("stream_options") or {}
    if body.get("stream"):
        usage = bool(options.get("include_usage"))

        def events(answering: PendingTurn) -> AsyncIterator[bytes]:
            return _chat_events(session, answering, usage=usage)

        return streamed(session, asked, events)
    return await whole(
        session, asked, request, lambda each: chat_answer(session, each, logprobs=bool(body.get("logprobs")))
    )


async def whole(
    session: AgentSession, asked: AgentRequest, request: Request, form: Callable[[PendingTurn], Mapping[str, Any]]
) -> Response:
    """The answer when it is finished. Raises CallRefused."""
    with session.serving():
        answering = session.answer(asked)
        with answering.reading():
            await _done(answering, request)
        if answering.refusal is not None:
            raise answering.refusal
        answer = JSONResponse(form(answering))
        if not await request.is_disconnected():
            answering.branch.deliver()
        return answer


async def _done(answering: PendingTurn, request: Request) -> None:
    """Returns when a turn is. Raises CallRefused as soon as its client has left, so that one which asks again is told
    from those that wait.
    """
    done, left = asyncio.ensure_future(answering.done.wait()), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({done, left}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        done.cancel()
        left.cancel()
        await asyncio.gather(done, left, return_exceptions=True)
    if not answering.done.is_set():
        raise CallRefused(499, "client_left", "the client left before it was answered")


async def _left(request: Request) -> None:
    """Returns when the client has left; its body has been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        continue


def streamed(
    session: AgentSession, asked: AgentRequest, events: Callable[[PendingTurn], AsyncIterator[bytes]]
) -> Response:
    """The answer as it grows. Raises CallRefused for what is known before anything is sampled."""
    with ExitStack() as entered:
        entered.enter_context(session.serving())
        answering = session.answer(asked)
        # From now on, and not from its first byte on: another request may look for one that nobody reads before that.
        entered.enter_context(answering.reading())
        until_the_end = entered.pop_all()

    async def sent() -> AsyncGenerator[bytes, None]:
        async for event in events(answering):
            yield event
        answering.branch.deliver()

    return _Events(sent(), until_the_end)


class _Events(StreamingResponse):
    """Ends what it was made from when the client goes away, even one that never read a byte."""

    def __init__(self, events: AsyncGenerator[bytes, None], entered: ExitStack) -> None:
        self._events = events
        self._entered = entered
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            self._entered.close()


async def _chat_events(session: AgentSession, answering: PendingTurn, *, usage: bool) -> AsyncIterator[bytes]:
    try:
        async for chunk in chat_chunks(session, answering, usage=usage):
            yield f"data: {json.dumps(chunk)}\n\n".encode()
        yield b"data: [DONE]\n\n"
    except CallRefused as refusal:
        error = {"message": str(refusal), "type": "invalid_request_error", "code": refusal.code, "param": refusal.param}
        yield f"data: {json.dumps({'error': error})}\n\n".encode()


async def _responses(session: AgentSession, body: Mapping[str, Any], request: Request, digest: str) -> Response:
    asked = asked_of_responses(body, _terms(session), digest=digest, again=_again(request))
    if body.get("stream"):
        return streamed(session, asked, lambda each: _typed_events(response_events(session, each), _response_error))
    return await whole(session, asked, request, lambda each: response_answer(session, each))


def _response_error(refusal: CallRefused) -> dict[str, Any]:
    error = {"type": "error", "code": refusal.code, "message": str(refusal), "param": refusal.param}
    return {**error, "sequence_number": 0}


async def _messages(session: AgentSession, body: Mapping[str, Any], request: Request, digest: str) -> Response:
    asked = asked_of_messages(body, _terms(session), digest=digest, again=_again(request))
    if body.get("stream"):
        return streamed(session, asked, lambda each: _typed_events(message_events(session, each), anthropic_error))
    return await whole(session, asked, request, lambda each: message_answer(session, each))


async def _typed_events(
    events: AsyncIterator[dict[str, Any]], error_of: Callable[[CallRefused], dict[str, Any]]
) -> AsyncIterator[bytes]:
    """Server-sent events under their types; the last one is an error if the turn cannot be finished."""
    try:
        async for event in events:
            yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()
    except CallRefused as refusal:
        yield f"event: error\ndata: {json.dumps(error_of(refusal))}\n\n".encode()


async def _count_tokens(session: AgentSession, body: Mapping[str, Any], request: Request, digest: str) -> Response:
    asked = asked_of_messages(body, _terms(session), digest=digest, again=False)
    return JSONResponse({"input_tokens": session.count(asked)})


async def _commands(session: AgentSession, body: Mapping[str, Any], request: Request, digest: str) -> Response:
    try:
        asked = CommandAsked.model_validate(body)
    except ValidationError as error:
        raise CallRefused(422, "invalid_command", describe(error)) from error
    if session.computer is None:
        raise CallRefused(404, "no_computer", "the task of this session has no computer to run commands on")
    with session.serving():
        return json_answer(await session.computer.command(asked))


async def _reward(session: AgentSession, body: Mapping[str, Any], request: Request, digest: str) -> Response:
    try:
        posted = RewardPosted.model_validate(body)
    except ValidationError as error:
        raise CallRefused(422, "invalid_reward", describe(error)) from error
    session.post(posted.result())
    return JSONResponse({"session_id": session.id, "accepted": True})


@asynccontextmanager
async def sessions_alone(
    *, limits: AgentLimits | None = None, token: str | None = None
) -> AsyncIterator[AgentSessions]:
    """Sessions that are served on loopback. `token` is wanted of agents from outside."""
    with Listener(host="127.0.0.1", port=0) as listener:
        sessions = AgentSessions(url=listener.url, limits=limits)
        app = create_app(
            service="env-service",
            version=version("headway"),
            token=None if token is None else SecretStr(token),
            readiness=lambda: Readiness(ready=True),
            metrics=Metrics("env-service"),
            open_paths=OPEN_PATHS | {OPEN_FOLDER},
        )
        add_session_routes(app, sessions)
        serving = asyncio.create_task(serve_http(app, listener))
        try:
            yield sessions
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
