"""A server of training loops with its page, on a bigram model: tenants `a` and `b`, and a token that sees all."""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import SecretStr

from learner.page.files import PAGE_PATHS
from learner.page.tenants_page import ServedProcesses, TenantsPage
from learner.tenants.listings import TenantListings
from learner.tenants.routes import PREFIX_PATH, add_tenant_routes
from protocol.status import PeerStatus, Readiness
from services.http.app import create_app
from services.http.metrics import Metrics
from services.http.server import Listener, serve_http
from tests.learner.tenants.service_client import Client, Served, served

TOKEN = "the token of the learner"
GENERATOR = PeerStatus(name="http://g:1", kind="generator", url="http://g:1", last_heard_s=2.0, state="answers")
T = TypeVar("T")


class PageOfTenants:
    """The parts of such a server; `app` has the API and the page."""

    def __init__(self, parts: Served) -> None:
        self.parts = parts
        self.app = create_app(
            service="learner", version="1", token=SecretStr(TOKEN), readiness=lambda: Readiness(ready=True),
            metrics=Metrics("learner"), open_paths=PAGE_PATHS | {f"{PREFIX_PATH}/"},
        )  # fmt: skip
        add_tenant_routes(self.app, parts.service, TenantListings(parts.service, secret=b"x"))
        self.page = TenantsPage(
            parts.service, name="serve", token=SecretStr(TOKEN), processes=lambda: ServedProcesses((GENERATOR,))
        )
        self.page.add_routes(self.app)

    def client(self, name: str) -> Client:
        """A tenant's."""
        return Client(self.app, name)

    async def trained(self, name: str, *, number: int = 0, steps: int = 3) -> str:
        """The id of a new model that has taken so many steps, with a loss that falls."""
        client = self.client(name)
        model_id = await client.model(number)
        for step in range(steps):
            await client.loss(model_id, 2 * step + 1)
            await client.result(await client.step(model_id, 2 * step + 2))
        return model_id


@asynccontextmanager
async def page_of_tenants(folder: Path, **settings: Any) -> AsyncIterator[PageOfTenants]:
    """A server that works while the body runs."""
    async with served(folder, **settings) as parts:
        yield PageOfTenants(parts)


class TenantsInAThread:
    """Serves over HTTP from a thread while the body runs; `do` has something done in its event loop."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self._folder, self._settings = folder, settings
        self._listener = Listener(host="127.0.0.1", port=0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self._ready, self._over = threading.Event(), asyncio.Event()
        self.made: PageOfTenants

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    @property
    def url(self) -> str:
        return f"{self._listener.url}/"

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns when it is done."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    def _run(self) -> None:
        with self._listener:
            self._loop.run_until_complete(self._serve())
            self._loop.close()

    async def _serve(self) -> None:
        async with page_of_tenants(self._folder, **self._settings) as self.made:
            http = asyncio.create_task(serve_http(self.made.app, self._listener))
            self._ready.set()
            await self._over.wait()
            http.cancel()
            await asyncio.gather(http, return_exceptions=True)
