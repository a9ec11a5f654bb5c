"""A generator, wired: the engine, our routes and vLLM's, and the announcements to the learner.

Loops, and what each waits for: `http` for requests; `announce` for the clock, or for the learner; `engine` watches
that the engine's process lives.
"""

import asyncio
import json
import socket
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path

from generator.announcer import announce
from generator.config import GeneratorConfig
from generator.engine import Engine
from generator.measures import Measures
from generator.openai_routes import mount_openai_routes
from generator.options import EngineOptions
from generator.routes import add_token_routes, add_weight_routes
from generator.serving import Serving, watch_engine
from generator.weight_sync import WeightSync
from protocol.fingerprints import fingerprint_directory
from protocol.fleet import Announcement
from protocol.http import Readiness
from protocol.versions import PROTOCOL_VERSION
from services.http_app import create_app
from services.http_client import HttpClient
from services.http_server import Listener, serve_http
from services.metrics import Metrics
from services.process import Stop
from services.waiting import Waiting

FIRST_VERSION = "0.0"
"""What a generator without a learner serves: the weights of its model directory."""


async def serve(config: GeneratorConfig, options: EngineOptions, stop: Stop) -> None:
    """Serves until cancelled; then drains."""
    fingerprints = fingerprint_directory(config.model)
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(Listener(host=config.http.host, port=config.http.port))
        client = await stack.enter_async_context(HttpClient(token=config.join.token))
        waits = Waiting()
        engine = await Engine.start(options=options)
        stack.push_async_callback(engine.shutdown)
        name = config.id or f"{socket.gethostname()}:{listener.port}"
        metrics = Metrics("generator")
        measures = Measures(metrics, engine=engine)
        serving = Serving(
            engine=engine,
            generator_id=name,
            vocabulary_size=_vocabulary_size(config.model),
            max_model_len=options.max_model_len,
            max_waiting_requests=config.max_waiting_requests,
            measures=measures,
        )
        app = create_app(
            service="generator",
            version="1",
            token=config.http.token,
            readiness=lambda: _readiness(serving, waits),
            metrics=metrics,
            max_body_bytes=config.http.max_body_bytes,
        )
        add_token_routes(app, serving=serving)
        add_weight_routes(app, sync=WeightSync(engine=engine, serving=serving, measures=measures))
        if config.openai:
            await mount_openai_routes(app, engine=engine, served_model_name=config.served_model_name)
        loops: dict[str, Coroutine[object, object, None]] = {
            "http": serve_http(app, listener),
            "engine": watch_engine(engine),
        }
        waits.started()
        if config.join.learner is None:
            serving.version = FIRST_VERSION
        else:
            announcement = Announcement(
                generator_id=name,
                url=config.join.url or listener.url,
                protocol_version=PROTOCOL_VERSION,
                fingerprints=fingerprints,
                world_size=options.tensor_parallel_size,
                backend=config.join.backend,
                max_model_len=options.max_model_len,
                serving_version=None,
            )
            loops["announce"] = announce(
                learner=config.join.learner, client=client, announcement=announcement, serving=serving, waits=waits
            )
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(loop, name=name) for name, loop in loops.items()]
            await stop.wait()
            await serving.drain(timeout_s=config.drain_s)
            for task in tasks:
                task.cancel()


def _readiness(serving: Serving, waits: Waiting) -> Readiness:
    state = waits.readiness()
    if not state.ready or serving.ready:
        return state
    return Readiness(ready=False, waiting_for=("weights of the learner",))


def _vocabulary_size(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"])
