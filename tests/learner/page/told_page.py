"""The page of a run that goes on, as a learner serves it that says of its processes what a test has set."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from learner.page.files import PAGE_PATHS
from learner.page.routes import RunPage, ShownRun
from protocol.status import Readiness
from services.http.app import create_app
from services.http.metrics import Metrics
from services.http.server import Listener, serve_http


class ToldPage:
    """Serves in a thread while the body runs; `told` may be changed meanwhile, and is told within seconds."""

    def __init__(self, folder: Path, told: dict[str, Any], *, machines: Sequence[dict[str, Any]] = ()) -> None:
        self.told = told
        self._listener = Listener(host="127.0.0.1", port=0)
        self._page = RunPage([ShownRun("run", folder, lambda: self.told, lambda: list(machines))], token=None)
        self._loop = asyncio.new_event_loop()
        self._serving: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(lambda: self._serving and self._serving.cancel())
        self._thread.join()

    @property
    def url(self) -> str:
        return f"{self._listener.url}/"

    def _serve(self) -> None:
        app = create_app(
            service="learner", version="1", token=None, readiness=lambda: Readiness(ready=True),
            metrics=Metrics("learner"), open_paths=PAGE_PATHS,
        )  # fmt: skip
        self._page.add_routes(app)

        async def serve() -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(serve_http(app, self._listener))
                tasks.create_task(self._page.run())

        with self._listener:
            self._serving = self._loop.create_task(serve())
            self._loop.run_until_complete(asyncio.wait([self._serving]))
            self._loop.close()
