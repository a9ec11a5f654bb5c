"""A small API server that answers like Kubernetes' as it is documented: pods in one namespace, exec and attach by
websocket. Pods are folders with a few programs of this machine, in which commands run by bubblewrap; nothing limits
them.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

from services.isolation.bubblewrap import packaged_bubblewrap
from tests.env_service.runtimes.programs import libraries_of

PROTOCOL = "v5.channel.k8s.io"
_PODS = "/api/v1/namespaces/lab/pods"
_PROGRAMS = (
    "dash",
    "sleep",
    "rm",
    "cat",
    "find",
    "tar",
    "readlink",
    "dirname",
    "basename",
    "mkdir",
    "chmod",
    "env",
    "head",
    "ln",
    "ls",
)


@dataclass
class StandInPod:
    """A pod, with what the API server says of it."""

    manifest: dict[str, Any]
    root: Path
    status: dict[str, Any] = field(default_factory=lambda: {"phase": "Running"})
    orders: list[str] = field(default_factory=list)
    attached: set[web.WebSocketResponse] = field(default_factory=set)
    running: set[asyncio.subprocess.Process] = field(default_factory=set)

    async def end(self, code: int, *, reason: str = "Error", pod_reason: str = "", message: str = "") -> None:
        """End it as if its first process had, or as if the node's kubelet had ended it."""
        terminated = {"exitCode": code, "reason": reason}
        self.status = {"phase": "Failed", "containerStatuses": [{"state": {"terminated": terminated}}]}
        if pod_reason:
            self.status |= {"reason": pod_reason, "message": message}
        for process in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for socket in list(self.attached):
            with contextlib.suppress(ConnectionError):
                await socket.send_bytes(_status(code=0))
            await socket.close()

    def break_stdin(self) -> None:
        """Break the connections of its first process's stdin, which ends then."""
        for socket in list(self.attached):
            assert socket._req is not None
            assert socket._req.transport is not None
            socket._req.transport.abort()


class StandInCluster:
    """The API server. A test sees and says everything by its attributes; `cannot_start` are messages."""

    def __init__(self, folder: Path) -> None:
        self.pods: dict[str, StandInPod] = {}
        self.deleted: list[str] = []
        self.kept: dict[str, int] = {}
        """Pods whose deletion is refused, and with which status."""
        self.cannot_start: list[str] = []
        self.token = "secret"
        self.url = ""
        self._folder = folder
        self._sockets: set[web.WebSocketResponse] = set()
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def start(self) -> None:
        """Listen; the second time at the same address."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post(_PODS, self._create)
        app.router.add_get(_PODS, self._list)
        app.router.add_get(_PODS + "/{name}", self._get)
        app.router.add_delete(_PODS + "/{name}", self._delete)
        app.router.add_get(_PODS + "/{name}/exec", self._exec)
        app.router.add_get(_PODS + "/{name}/attach", self._attach)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def die(self) -> None:
        """Drop every connection, and listen no more."""
        for socket in list(self._sockets):
            if socket._req is not None and socket._req.transport is not None:
                socket._req.transport.abort()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def make(self, manifest: dict[str, Any]) -> StandInPod:
        """A pod that is there."""
        root = self._folder / manifest["metadata"]["name"]
        shutil.copytree(_small_root(self._folder), root, symlinks=True, copy_function=os.link)
        made = self.pods[manifest["metadata"]["name"]] = StandInPod(manifest=manifest, root=root)
        return made

    def _of(self, request: web.Request) -> StandInPod:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            raise web.HTTPForbidden(text=json.dumps({"message": "pods is forbidden: User cannot do that"}))
        name = request.match_info.get("name", "")
        if name and name not in self.pods:
            raise web.HTTPNotFound(text=json.dumps({"message": f'pods "{name}" not found'}))
        return self.pods[name] if name else StandInPod({}, Path())

    async def _create(self, request: web.Request) -> web.Response:
        self._of(request)
        manifest = await request.json()
        self.make(manifest)
        return web.json_response(manifest, status=201)

    async def _list(self, request: web.Request) -> web.Response:
        self._of(request)
        name, _, value = request.query["labelSelector"].partition("=")
        found = [pod for pod in self.pods.values() if pod.manifest["metadata"]["labels"].get(name) == value]
        return web.json_response({"items": [{**pod.manifest, "status": pod.status} for pod in found]})

    async def _get(self, request: web.Request) -> web.Response:
        pod = self._of(request)
        return web.json_response({**pod.manifest, "status": pod.status})

    async def _delete(self, request: web.Request) -> web.Response:
        pod = self._of(request)
        name = request.match_info["name"]
        if name in self.kept:
            return web.json_response({"kind": "Status", "message": "a webhook says no"}, status=self.kept[name])
        await pod.end(137)
        del self.pods[name]
        self.deleted.append(name)
        return web.json_response({})

    @asynccontextmanager
    async def _socket(self, request: web.Request) -> AsyncIterator[web.WebSocketResponse]:
        socket = web.WebSocketResponse(protocols=(PROTOCOL,))
        await socket.prepare(request)
        self._sockets.add(socket)
        try:
            yield socket
        finally:
            self._sockets.discard(socket)
            await socket.close()

    async def _attach(self, request: web.Request) -> web.WebSocketResponse:
        pod = self._of(request)
        async with self._socket(request) as socket:
            pod.attached.add(socket)
            async for message in socket:
                if message.type is WSMsgType.BINARY and message.data[0] == 0:
                    self._ordered(pod, message.data[1:].decode().split("\n")[0])
            pod.attached.discard(socket)
            if pod.status["phase"] == "Running":
                await pod.end(99)
        return socket

    def _ordered(self, pod: StandInPod, order: str) -> None:
        pod.orders.append(order)
        if order.isdigit():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(os.getpgid(int(order)), signal.SIGKILL)  # bubblewrap leads it

    async def _exec(self, request: web.Request) -> web.WebSocketResponse:
        pod = self._of(request)
        if pod.status["phase"] != "Running":
            raise web.HTTPBadRequest(text=json.dumps({"message": "container not found"}))
        async with self._socket(request) as socket:
            if self.cannot_start:
                await socket.send_bytes(_status(message=self.cannot_start.pop(0)))
            else:
                code = await self._ran(pod, request.query.getall("command"), socket, "stdin" in request.query)
                with contextlib.suppress(ConnectionError):
                    await socket.send_bytes(_status(code=code))
        return socket

    async def _ran(self, pod: StandInPod, words: list[str], socket: web.WebSocketResponse, stdin: bool) -> int:
        process = await asyncio.create_subprocess_exec(
            _bubblewrap(), "--bind", str(pod.root), "/", "--proc", "/proc", "--dev", "/dev", "--chdir", "/", *words,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            start_new_session=True, env={"PATH": "/bin"},
        )  # fmt: skip
        pod.running.add(process)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        feeding = asyncio.ensure_future(_fed(socket, process.stdin, stdin))
        await asyncio.gather(_pumped(process.stdout, socket, 1), _pumped(process.stderr, socket, 2))
        code = await process.wait()
        feeding.cancel()
        pod.running.discard(process)
        return code if code >= 0 else 128 - code


def _status(*, code: int = 1, message: str = "") -> bytes:
    """The last message of a command, on channel 3."""
    if not message and code == 0:
        return b"\3" + json.dumps({"metadata": {}, "status": "Success"}).encode()
    causes = [] if message else [{"reason": "ExitCode", "message": str(code)}]
    told = {"status": "Failure", "message": message or "it failed", "details": {"causes": causes}}
    return b"\3" + json.dumps(told).encode()


async def _fed(socket: web.WebSocketResponse, stdin: asyncio.StreamWriter, attached: bool) -> None:
    with contextlib.suppress(ConnectionError):
        async for message in socket:
            if message.type is WSMsgType.BINARY and attached and message.data[0] == 0:
                stdin.write(message.data[1:])
                await stdin.drain()
            elif message.type is WSMsgType.BINARY and message.data == b"\xff\0":
                stdin.close()


async def _pumped(stream: asyncio.StreamReader, socket: web.WebSocketResponse, channel: int) -> None:
    with contextlib.suppress(ConnectionError):
        while part := await stream.read(1 << 14):
            await socket.send_bytes(bytes((channel,)) + part)


@cache
def _bubblewrap() -> str:
    found = packaged_bubblewrap() or shutil.which("bwrap")
    assert found is not None, "bubblewrap is missing"
    return str(found)


@cache
def _small_root(folder: Path) -> Path:
    """A root with a few of this machine's programs, and some files of an image."""
    root = folder / "image"
    programs = [Path(found) for name in _PROGRAMS if (found := shutil.which(name, path="/usr/bin:/bin"))]
    for path in libraries_of(programs):
        place = root / str(path).lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path.resolve(), place)
    for name in ("bin", "proc", "dev", "tmp", "work", "etc/kept"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for path in programs:
        shutil.copy(path.resolve(), root / "bin" / path.name)
    (root / "bin/sh").symlink_to("dash")
    (root / "etc/issue").write_text("an image")
    (root / "etc/kept/file").write_text("kept")
    return root


@asynccontextmanager
async def stand_in_cluster(folder: Path) -> AsyncIterator[StandInCluster]:
    """A cluster that listens."""
    cluster = StandInCluster(folder)
    await cluster.start()
    try:
        yield cluster
    finally:
        await cluster.die()
        _small_root.cache_clear()
