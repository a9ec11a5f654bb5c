"""A relay of the learner's tree of weights: it fetches each object once, keeps it, and hands it out to whoever asks.

    generator, or another relay ─▶ GET /objects/<sha256> ─▶ its folder ─▶ else its source: the learner, or another relay

So the learner's link carries one copy, for any number of generators behind it. A relay holds nothing that could not be
fetched again, checks every object against its name before it keeps it and before it hands it out, and may be killed and
started again at any time.
"""

import asyncio
import logging
from collections import OrderedDict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Response
from fastapi import Path as PathParameter

from protocol.weight_tree import NEWEST_FILE, OBJECTS, ObjectName, name_of
from services.config.models import HttpConfig
from services.http.app import create_app
from services.http.client import HttpClient, ServiceError, ServiceRefused
from services.http.metrics import Metrics, one_label
from services.http.refusals import RequestRefused
from services.http.server import Listener, serve_http
from services.http.waiting import Waiting
from services.process import Stop

logger = logging.getLogger(__name__)

_DEADLINE_S = 10.0
_SLOWEST_BYTES_PER_S = 100e3
_TRIES = 3
_REST_S = 0.2


class RelayMetrics:
    """Counts objects and bytes, by where they came from."""

    def __init__(self, metrics: Metrics) -> None:
        self._objects = metrics.counter(
            "objects",
            "Objects that were asked for: from the folder, or fetched first.",
            labels=("source",),
            known=one_label("folder", "fetched"),
        )
        self._sent = metrics.counter("sent_bytes", "Bytes of objects that were handed out.")
        self._fetched = metrics.counter("fetched_bytes", "Bytes of objects that were fetched from the source.")
        self._damaged = metrics.counter("damaged_objects", "Objects that were not what their name says.")

    def sent(self, nbytes: int, *, kept: bool) -> None:
        """Notes an object that was handed out, `kept` if it was there already."""
        self._objects.labels(source="folder" if kept else "fetched").inc()
        self._sent.inc(nbytes)

    def fetched(self, nbytes: int) -> None:
        """Notes an object that came from the source."""
        self._fetched.inc(nbytes)

    def damaged(self) -> None:
        """Notes an object that was not what its name says."""
        self._damaged.inc()


class ObjectCache:
    """Objects in a folder, of at most `most_bytes` together; those that nobody has asked for longest go first."""

    def __init__(
        self, folder: Path, *, source: str, client: HttpClient, most_bytes: int, metrics: RelayMetrics
    ) -> None:
        self._folder = folder
        self._source = source.rstrip("/")
        self._client = client
        self._most_bytes = most_bytes
        self._metrics = metrics
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._coming: dict[str, asyncio.Task[bytes]] = {}
        self._newest: bytes | None = None
        folder.mkdir(parents=True, exist_ok=True)
        there = [(path, path.stat()) for path in folder.iterdir() if path.is_file()]
        for path, stat in sorted(there, key=lambda each: each[1].st_mtime):
            if path.name.startswith("."):  # half of one, by a former life
                path.unlink()
            else:
                self._sizes[path.name] = stat.st_size

    async def get(self, name: str) -> bytes:
        """An object. Raises RequestRefused if the source does not have it, or does not answer."""
        if name in self._sizes:
            self._sizes.move_to_end(name)
            content = self._read(name)
            if content is not None:
                self._metrics.sent(len(content), kept=True)
                return content
        task = self._coming.get(name)
        if task is None:  # who asks meanwhile waits for the same one
            task = self._coming[name] = asyncio.create_task(self._fetch(name))
            task.add_done_callback(lambda done: self._came(name, done))
        content = await asyncio.shield(task)
        self._metrics.sent(len(content), kept=False)
        return content

    def _came(self, name: str, done: "asyncio.Task[bytes]") -> None:
        del self._coming[name]
        if not done.cancelled():
            done.exception()  # whoever asked has it; perhaps nobody waits any more

    def _read(self, name: str) -> bytes | None:
        """None for one that is damaged, or gone: it is fetched again."""
        try:
            content = (self._folder / name).read_bytes()
        except OSError as error:
            logger.warning("object %s cannot be read, fetching it again: %s", name, error)
            content = b""
        if name_of(content) == name:
            return content
        self._metrics.damaged()
        self._sizes.pop(name, None)
        return None

    async def newest(self) -> bytes:
        """The newest version by the source's word, or its last word while it does not answer."""
        try:
            self._newest, _ = await self._client.download(f"{self._source}/{NEWEST_FILE}", deadline_s=_DEADLINE_S)
        except ServiceError as error:
            if self._newest is None:
                raise _unavailable(error) from error
        assert self._newest is not None, "it has just been fetched, or was before"
        return self._newest

    async def _fetch(self, name: str) -> bytes:
        url = f"{self._source}/{OBJECTS}/{name}"
        for tries in range(_TRIES):
            try:
                content, _ = await self._client.download(url, deadline_s=_DEADLINE_S, bytes_per_s=_SLOWEST_BYTES_PER_S)
            except ServiceRefused as error:
                raise RequestRefused(404, "not_kept", f"{self._source} does not have it: {error.message}") from error
            except ServiceError as error:
                if tries == _TRIES - 1:
                    raise _unavailable(error) from error
            else:
                if name_of(content) == name:
                    self._metrics.fetched(len(content))
                    self._keep(name, content)
                    return content
                self._metrics.damaged()
                logger.warning("%s arrived damaged, %d bytes", url, len(content))
            await asyncio.sleep(_REST_S)
        raise RequestRefused(502, "damaged", f"object {name} arrived damaged {_TRIES} times from {self._source}")

    def _keep(self, name: str, content: bytes) -> None:
        """Keeps an object, if there is room; without room it is handed out all the same."""
        beside = self._folder / f".{name}"
        try:
            beside.write_bytes(content)
            beside.replace(self._folder / name)
        except OSError as error:
            logger.error("object %s is not kept: %s", name, error)
            return
        self._sizes[name] = len(content)
        while sum(self._sizes.values()) > self._most_bytes and len(self._sizes) > 1:
            oldest, _ = self._sizes.popitem(last=False)
            (self._folder / oldest).unlink(missing_ok=True)


def _unavailable(error: ServiceError) -> RequestRefused:
    return RequestRefused(503, "source_unavailable", f"the relay's source does not answer: {error}", retry_after_s=1.0)


def add_relay_routes(app: FastAPI, cache: ObjectCache) -> None:
    """`GET /objects/<sha256>` and `/newest.json`, as a web server with a copy of the tree would have them."""

    @app.get(f"/{OBJECTS}/{{name}}")
    async def tree_object(name: Annotated[ObjectName, PathParameter()]) -> Response:
        """An object of the tree of weights, by the SHA-256 of its bytes."""
        return Response(await cache.get(name), media_type="application/octet-stream")

    @app.get(f"/{NEWEST_FILE}")
    async def newest() -> Response:
        """The newest version of the tree of weights, and the name of its manifest."""
        return Response(await cache.newest(), media_type="application/json")


async def relay(
    *, source: str, folder: Path, http: HttpConfig, client: HttpClient, most_bytes: int, stop: Stop
) -> None:
    """Serves until `stop`. Raises OSError."""
    registry, waits = Metrics("relay"), Waiting()
    async with client:
        cache = ObjectCache(
            folder / OBJECTS, source=source, client=client, most_bytes=most_bytes, metrics=RelayMetrics(registry)
        )
        app = create_app(
            service="relay", version=version("headway"), token=http.token, readiness=waits.readiness, metrics=registry
        )
        add_relay_routes(app, cache)
        with Listener(host=http.host, port=http.port, tls=http.tls) as listener:
            serving = asyncio.ensure_future(serve_http(app, listener))
            waits.started()
            stopping = asyncio.ensure_future(stop.wait())
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            serving.cancel()
            await asyncio.gather(serving, stopping, return_exceptions=True)
