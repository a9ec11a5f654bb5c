"""Sessions on a port of their own, for one rollout without a process around it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from pydantic import SecretStr

from env_service.agents.registry import AgentLimits, Sessions
from env_service.agents.routes import OPEN_FOLDER, add_session_routes
from protocol.status import Readiness
from services.http.app import OPEN_PATHS, create_app
from services.http.metrics import Metrics
from services.http.server import Listener, serve_http


@asynccontextmanager
async def sessions_alone(*, limits: AgentLimits | None = None, token: str | None = None) -> AsyncIterator[Sessions]:
    """Sessions that are served on loopback. `token` is wanted of agents from outside."""
    with Listener(host="127.0.0.1", port=0) as listener:
        sessions = Sessions(url=listener.url, limits=limits)
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
