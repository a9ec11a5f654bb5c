"""Relays of the tree of weights, before real web servers: what each asks for, keeps and hands out."""

import asyncio
import contextlib
import functools
import http.server
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from generator.weights import tree_download
from generator.weights.tree_download import ObjectMissing, TreeSources
from headway.relay import ObjectCache, RelayMetrics, add_relay_routes
from headway.relay_command import run_relay
from protocol.status import Readiness
from protocol.weight_tree import NEWEST_FILE, OBJECTS, name_of
from services.config.sources import ConfigError
from services.http.app import create_app
from services.http.client import HttpClient, ServiceFailed, ServiceRefused
from services.http.metrics import Metrics
from services.http.server import Listener, serve_http

CONTENTS = [bytes([number]) * 3000 for number in range(5)]


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """The standard library's own file server, which notes what it was asked for."""

    asked: list[str]

    def __init__(self, *args: object, asked: list[str], **named: object) -> None:
        self.asked = asked
        super().__init__(*args, **named)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@dataclass
class PlainServer:
    """A folder, at an address; `asked` are the paths."""

    folder: Path
    url: str
    asked: list[str] = field(default_factory=list)

    def put(self, content: bytes) -> str:
        path = self.folder / OBJECTS / name_of(content)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        return path.name


@contextmanager
def plain_server(folder: Path) -> Iterator[PlainServer]:
    folder.mkdir(exist_ok=True)
    asked: list[str] = []
    handler = functools.partial(QuietHandler, asked=asked, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=functools.partial(server.serve_forever, 0.01), daemon=True)
        thread.start()
        try:
            yield PlainServer(folder, f"http://127.0.0.1:{server.server_address[1]}", asked)
        finally:
            server.shutdown()


@asynccontextmanager
async def relay_of(source: str, folder: Path, *, most_bytes: int = 1 << 30, port: int = 0) -> AsyncIterator[str]:
    registry = Metrics("relay")
    async with HttpClient() as client:
        cache = ObjectCache(folder, source=source, client=client, most_bytes=most_bytes, metrics=RelayMetrics(registry))
        app = create_app(
            service="relay", version="1", token=None, readiness=lambda: Readiness(ready=True), metrics=registry
        )
        add_relay_routes(app, cache)
        with Listener(host="127.0.0.1", port=port) as listener:
            server = asyncio.create_task(serve_http(app, listener, finish_s=0))
            try:
                yield listener.url
            finally:
                server.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await server


def sources(client: HttpClient, *relays: str, learner: str, patience_s: float = 0.0) -> TreeSources:
    return TreeSources(relays=relays, relay_client=client, learner=learner, client=client, patience_s=patience_s)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_download, "_PAUSE_S", 0.01)
    monkeypatch.setattr("headway.relay._REST_S", 0.0)


@pytest.fixture
async def client() -> AsyncIterator[HttpClient]:
    async with HttpClient() as client:
        yield client


async def test_the_source_is_asked_once_for_each_object_however_many_ask_behind_two_relays(
    tmp_path: Path, client: HttpClient
) -> None:
    with plain_server(tmp_path / "tree") as source:
        names = [source.put(content) for content in CONTENTS]
        async with relay_of(source.url, tmp_path / "a") as first, relay_of(first, tmp_path / "b") as second:
            many = [sources(client, relay, learner=source.url) for relay in (first, second) for _ in range(3)]
            found = await asyncio.gather(*(each.fetch(name) for name in names for each in many))
        assert found == [content for content in CONTENTS for _ in many]
        assert sorted(source.asked) == sorted(f"/{OBJECTS}/{name}" for name in names)


async def test_a_relay_that_is_started_again_has_what_it_had_and_its_source_may_be_away(
    tmp_path: Path, client: HttpClient
) -> None:
    with plain_server(tmp_path / "tree") as source:
        name = source.put(CONTENTS[1])
        (source.folder / NEWEST_FILE).write_text("newest")
        async with relay_of(source.url, tmp_path / "a") as url:
            await client.download(f"{url}/{OBJECTS}/{name}", deadline_s=5)
    (tmp_path / "a" / ".half").write_bytes(b"half")
    async with relay_of(source.url, tmp_path / "a") as url:
        content, _ = await client.download(f"{url}/{OBJECTS}/{name}", deadline_s=5)
        assert content == CONTENTS[1]
        with pytest.raises(ServiceFailed, match="source does not answer"):
            await client.download(f"{url}/{OBJECTS}/{name_of(b'other')}", deadline_s=5)
        with pytest.raises(ServiceRefused, match="invalid_field"):
            await client.download(f"{url}/{OBJECTS}/not-a-name", deadline_s=5)
    assert [path.name for path in (tmp_path / "a").iterdir()] == [name]


async def test_a_relays_damaged_file_is_fetched_again(tmp_path: Path, client: HttpClient) -> None:
    with plain_server(tmp_path / "tree") as source:
        name = source.put(CONTENTS[1])
        async with relay_of(source.url, tmp_path / "a") as url:
            await client.download(f"{url}/{OBJECTS}/{name}", deadline_s=5)
            (tmp_path / "a" / name).write_bytes(CONTENTS[2])
            content, _ = await client.download(f"{url}/{OBJECTS}/{name}", deadline_s=5)
            assert content == CONTENTS[1]
        assert len(source.asked) == 2


async def test_what_nobody_has_asked_for_longest_gives_room(tmp_path: Path, client: HttpClient) -> None:
    with plain_server(tmp_path / "tree") as source:
        names = [source.put(content) for content in CONTENTS]
        async with relay_of(source.url, tmp_path / "a", most_bytes=7000) as url:
            for index in (0, 1, 0, 2):
                await client.download(f"{url}/{OBJECTS}/{names[index]}", deadline_s=5)
        assert {path.name for path in (tmp_path / "a").iterdir()} == {names[0], names[2]}


async def test_a_mirror_that_lies_or_lags_is_not_believed_and_the_learner_has_what_it_has_not(
    tmp_path: Path, client: HttpClient
) -> None:
    with plain_server(tmp_path / "mirror") as mirror, plain_server(tmp_path / "learner") as own:
        lied, lagging = own.put(CONTENTS[1]), own.put(CONTENTS[2])
        mirror.put(CONTENTS[1])
        (mirror.folder / OBJECTS / lied).write_bytes(CONTENTS[3])
        ours = sources(client, mirror.url, learner=own.url)
        assert [await ours.fetch(lied), await ours.fetch(lagging)] == CONTENTS[1:3]
        assert len(own.asked) == 2
        with pytest.raises(ObjectMissing, match="nobody has object"):
            await ours.fetch(name_of(b"nowhere"))


async def test_a_relay_that_is_away_for_a_moment_is_waited_for_and_the_learner_is_spared(
    tmp_path: Path, client: HttpClient
) -> None:
    with plain_server(tmp_path / "learner") as own:
        names = [own.put(content) for content in CONTENTS]
        with Listener(host="127.0.0.1", port=0) as listener:
            port = listener.port
        ours = sources(client, f"http://127.0.0.1:{port}", learner=own.url, patience_s=30.0)
        waiting = asyncio.create_task(ours.fetch(names[0]))
        await asyncio.sleep(0.05)
        assert own.asked == []
        async with relay_of(own.url, tmp_path / "a", port=port):
            assert await waiting == CONTENTS[0]
        ours = sources(client, f"http://127.0.0.1:{port}", learner=own.url, patience_s=0.0)
        assert await ours.fetch(names[1]) == CONTENTS[1], "with no patience the learner is asked at once"
        assert own.asked[-1] == f"/{OBJECTS}/{names[1]}"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([], "required"),
        (["--from", "learner:7300", "--folder", "x"], "'learner:7300' is no address: expected http://host:port"),
        (["--from", "http://l:7300", "--from-relay", "http://r:1", "--folder", "x"], "not allowed with"),
        (["--from", "http://l:7300", "--folder", "x", "--gb", "0"], "leaves no room"),
        (["--from", "http://l:7300", "--folder", "x", "--gb", "nan"], "leaves no room"),
        (["--from", "http://l:7300", "--folder", "x", "--gb", "inf"], "leaves no room"),
        (["--from", "http://l:73000", "--folder", "x"], "'http://l:73000' is no address"),
        (["--from", "http://l:7300", "--folder", "x", "--port", "99999"], "--port: got 99999: expected less than"),
        (["--from", "http://l:7300", "--folder", "x", "--host", "0.0.0.0"], "no token is set"),
        (["--from", "http://l:7300", "--folder", "x", "--colour", "blue"], "unrecognized arguments: --colour blue"),
        (["--from", "http://l:7300", "--folder", "x", "--token-file", "/nowhere"], "/nowhere"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_used_are_refused(words: list[str], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        run_relay(words)
