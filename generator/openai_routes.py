"""vLLM's OpenAI-compatible routes on our engine: models, completions and chat completions.

They are an app of their own under a prefix, so that vLLM's exception handlers and state touch none of our routes. Every
request passes the door of `GatedLLM`, which salts the prefix cache and holds requests back during a commit. Sampling
defaults are vLLM's, not the model's.
"""

import asyncio
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from http import HTTPStatus

from fastapi import Depends, FastAPI, Request
from pydantic import JsonValue
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.entrypoints.openai.chat_completion.api_router import router as chat_router
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.api_router import router as completion_router
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.api_router import router as models_router
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from generator.engine.engine import Engine
from generator.engine.gated_llm import GatedLLM, TurnedAway

PREFIX = "/openai"
_OCCUPIED = "headway.occupied"


async def mount_openai_routes(
    app: FastAPI,
    *,
    engine: Engine,
    served_model_name: str,
    check_ready: Callable[[], None],
    occupied: Callable[[], AbstractContextManager[None]] = nullcontext,
    prefix: str = PREFIX,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, JsonValue] | None = None,
    around: Callable[[ASGIApp], ASGIApp] = lambda app: app,
) -> None:
    """Serve `prefix`/v1/models, /v1/completions and /v1/chat/completions in `app`.

    The engine must have been started with its tokenizer. `check_ready` raises RequestRefused when no request is taken;
    `occupied` is entered while one that is taken is answered.
    `chat_template` is Jinja text; the model's own if none. `chat_template_kwargs` are what it is told in requests that
    say nothing else. `around` makes what stands between the routes and their callers.
    """

    openai = counted_app(check_ready=check_ready, occupied=occupied)
    chat = _Chat(tool_parser, reasoning_parser, chat_template, chat_template_kwargs or {})
    renderer = _fill_state(openai, llm=engine.llm, served_model_name=served_model_name, chat=chat)
    for router in (models_router, completion_router, chat_router):
        openai.include_router(router)
    init_exception_handler(openai)
    answer_engine_errors(openai)
    await asyncio.to_thread(renderer.warmup)
    app.mount(prefix, around(openai))


def counted_app(*, check_ready: Callable[[], None], occupied: Callable[[], AbstractContextManager[None]]) -> FastAPI:
    """An application that takes requests after `check_ready` and answers them within `occupied`, streams to their end.

    What is refused is not counted; a dependency by itself would end before a stream does.
    """

    async def ready(request: Request) -> None:
        check_ready()
        request.scope[_OCCUPIED].enter_context(occupied())

    app = FastAPI(openapi_url=None, dependencies=[Depends(ready)])
    app.add_middleware(_Occupying)
    return app


def answer_engine_errors(app: FastAPI) -> None:
    """Says what was wrong with a request that the engine did not take: vLLM's own handler of that looks for a server of
    vLLM's, which is not there.
    """

    async def answer(request: Request, error: Exception) -> JSONResponse:
        cause = error.__cause__
        if isinstance(error, EngineDeadError) or isinstance(cause, TurnedAway):
            what = cause if isinstance(cause, TurnedAway) else "the engine of this generator has died"
            status = HTTPStatus.SERVICE_UNAVAILABLE
            response = create_error_response(f"{what}: try another generator", "ServiceUnavailableError", status)
        else:
            response = create_error_response(cause if isinstance(cause, Exception) else error)
        return JSONResponse(response.model_dump(), status_code=response.error.code)

    app.exception_handler(EngineGenerateError)(answer)
    app.exception_handler(EngineDeadError)(answer)


class _Occupying:
    """Leaves at the end of each request what it has entered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as entered:
            scope[_OCCUPIED] = entered
            await self._app(scope, receive, send)


@dataclass(frozen=True)
class _Chat:
    """Names of parsers, as vLLM's --tool-call-parser and --reasoning-parser have them; the template, if it is not the
    model's, and what it is told.
    """

    tool_parser: str | None
    reasoning_parser: str | None
    template: str | None
    told: Mapping[str, JsonValue]


def _fill_state(app: FastAPI, *, llm: GatedLLM, served_model_name: str, chat: _Chat) -> OnlineRenderer:
    """The names are those that vLLM's routers look for. Returns what renders the chat template."""
    paths = [BaseModelPath(name=served_model_name, model_path=llm.model_config.model)]
    models = OpenAIServingModels(engine_client=llm, base_model_paths=paths)
    renderer = OnlineRenderer(
        model_config=llm.model_config,
        renderer=llm.renderer,
        request_logger=None,
        chat_template=chat.template,
        chat_template_content_format="auto",
        default_chat_template_kwargs=dict(chat.told),
        enable_auto_tools=chat.tool_parser is not None,
        tool_parser=chat.tool_parser,
        reasoning_parser=chat.reasoning_parser,
    )
    app.state.openai_serving_models = models
    app.state.openai_serving_completion = OpenAIServingCompletion(
        llm, models, online_renderer=renderer, request_logger=None
    )
    app.state.openai_serving_chat = OpenAIServingChat(
        llm,
        models,
        "assistant",
        online_renderer=renderer,
        request_logger=None,
        chat_template=chat.template,
        chat_template_content_format="auto",
        default_chat_template_kwargs=dict(chat.told),
        enable_auto_tools=chat.tool_parser is not None,
        tool_parser=chat.tool_parser,
        reasoning_parser=chat.reasoning_parser or "",
    )
    app.state.openai_serving_chat_batch = None
    app.state.args = Namespace(log_error_stack=False, sse_keep_alive_interval=0)
    return renderer
