"""A small engine at a unix socket that answers like Docker's API. It walls nothing in: a container is a folder, its
commands are processes of this machine, and what it has to say of itself is set by the test.
"""

import asyncio
import base64
import contextlib
import io
import json
import os
import signal
import stat
import tarfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

_DIRECTORY, _LINK = 1 << 31, 1 << 27


@dataclass
class StandInContainer:
    """A container, with what the engine says of it."""

    name: str
    settings: dict[str, object]
    root: Path
    labels: dict[str, str] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))
    state: str = "created"
    exit_code: int = 0
    killed_for_memory: bool = False
    written: int = 0
    orders: list[str] = field(default_factory=list)
    changes: list[dict[str, object]] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    running: set[asyncio.subprocess.Process] = field(default_factory=set)

    def end(self, code: int, *, killed_for_memory: bool = False) -> None:
        """End it as if its first process had."""
        self.state, self.exit_code, self.killed_for_memory = "exited", code, killed_for_memory
        for process in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        self.over.set()


@dataclass
class _Request:
    method: str
    path: str
    query: dict[str, str]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def answer(self, status: int, told: object = None, *, headers: str = "", raw: bytes | None = None) -> None:
        body = (json.dumps(told).encode() if raw is None else raw) if status != 204 else b""
        head = f"HTTP/1.1 {status} Said\r\nContent-Length: {len(body)}\r\nApi-Version: 1.41\r\n{headers}\r\n"
        self.writer.write(head.encode() + (b"" if self.method == "HEAD" else body))
        await self.writer.drain()

    async def hijack(self) -> None:
        self.writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/vnd.docker.raw-stream\r\n\r\n")
        await self.writer.drain()


class StandInEngine:
    """The engine. A test sees and says everything by its attributes; `cannot_start` are messages, `making` is waited
    for before a container is made, `stuck` are containers that it refuses to remove. It never answers for changes of
    the `uncounted` container: with `counts_all` set to False, the first one that is asked for. Podman says by stderr
    why a command cannot start.
    """

    def __init__(self, socket: Path, folder: Path) -> None:
        self.socket = socket
        self.containers: dict[str, StandInContainer] = {}
        self.images: dict[str, dict[str, object]] = {"image": {"Id": "sha256:image", "Config": {"Env": ["LANG=xx"]}}}
        self.info: dict[str, object] = {
            "SecurityOptions": ["name=seccomp,profile=default"], "OSType": "linux", "KernelVersion": os.uname().release,
            "CgroupDriver": "cgroupfs", "CgroupVersion": "1", "MemoryLimit": True, "PidsLimit": True,
            "CpuCfsQuota": True, "DefaultRuntime": "runc",
        }  # fmt: skip
        self.refuses_quota = True
        self.is_podman = False
        self.started_pid = 0
        """Process id of all commands, as it is told."""
        self.hears_no_ends = False
        """True of an engine that takes all commands for running."""
        self.processes: list[list[str]] = []
        self.makes_groups = True
        """False of one whose commands are in its own group of processes, as with crun."""
        self.cannot_start: list[str] = []
        self.making = asyncio.Event()
        self.making.set()
        self.loses_answers = False
        self.ends_events = False
        self.stuck: set[str] = set()
        self.counts_all = True
        self.uncounted = ""
        self.removed: list[str] = []
        self.asked: list[str] = []
        self._folder = folder
        self._commands: dict[str, tuple[StandInContainer, dict[str, object], list[int | None]]] = {}
        self._events: set[asyncio.StreamWriter] = set()
        self._listening = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_unix_server(self._serve, self.socket)

    async def die(self) -> None:
        """Drop every connection, and listen no more."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        self.socket.unlink(missing_ok=True)

    async def tell(self, action: str, container: str) -> None:
        """Tell of an event: `oom`, a kill for want of memory in a container; `kill`, one of it by way of the API."""
        for writer in self._events:
            writer.write(json.dumps({"Actor": {"ID": container}, "Action": action}).encode() + b"\n")
            await writer.drain()

    async def heard(self) -> None:
        """Return when somebody listens to events."""
        await self._listening.wait()

    def make(self, name: str, settings: dict[str, object]) -> str:
        """A container that is there; its id."""
        number = f"{len(self.containers) + len(self.removed):064x}"
        root = self._folder / number
        root.mkdir()
        labels = settings.get("Labels", {})
        assert isinstance(labels, dict)
        self.containers[number] = StandInContainer(name=name, settings=settings, root=root, labels=labels)
        return number

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while (request := await _read(reader, writer)) is not None and await self._answered(request):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            self._events.discard(writer)
            writer.close()

    async def _answered(self, request: _Request) -> bool:
        """Answer; True if the connection goes on to be used."""
        self.asked.append(f"{request.method} {request.path}")
        parts = request.path.removeprefix("/v1.41").strip("/").split("/")
        match request.method, parts:
            case "GET", ["_ping"]:
                await request.answer(200, "OK", headers="Libpod-Api-Version: 4.3.1\r\n" if self.is_podman else "")
            case "GET", ["info"]:
                await request.answer(200, self.info)
            case "GET", ["images", name, "json"]:
                told = self.images.get(name)
                await request.answer(200 if told else 404, told or {"message": f"No such image: {name}"})
            case "GET", ["events"]:
                await request.hijack()
                self._events.add(request.writer)
                self._listening.set()
                if not self.ends_events:
                    await request.reader.read()
                return False
            case "GET", ["containers", "json"]:
                await request.answer(200, self._listed(json.loads(request.query["filters"])["label"]))
            case "POST", ["containers", "create"]:
                await self._create(request)
            case _, ["exec", number, *rest]:
                return await self._exec(request, number, rest)
            case _, ["containers", named, *rest] if (found := self._number_of(named)) is not None:
                return await self._container(request, found, self.containers[found], rest)
            case _:
                await request.answer(404, {"message": f"No such container: {request.path}"})
        return True

    def _listed(self, labels: list[str]) -> list[dict[str, object]]:
        return [
            {"Id": number, "State": each.state, "Created": each.created, "Labels": each.labels, "SizeRw": each.written}
            for number, each in self.containers.items()
            if all(_has(each, label) for label in labels)
        ]

    def _number_of(self, told: str) -> str | None:
        """The id of a container by that, or by its name."""
        return next((number for number, each in self.containers.items() if told in (number, each.name)), None)

    async def _create(self, request: _Request) -> None:
        settings = json.loads(request.body)
        await self.making.wait()
        if self.refuses_quota and "StorageOpt" in settings["HostConfig"]:
            await request.answer(500, {"message": "--storage-opt is supported only for overlay over xfs"})
        else:
            made = self.make(request.query["name"], settings)
            if self.loses_answers:
                raise ConnectionError
            await request.answer(201, {"Id": made})

    async def _container(self, request: _Request, number: str, container: StandInContainer, rest: list[str]) -> bool:
        match request.method, rest:
            case "POST", ["attach"]:
                await request.hijack()
                await self._attached(request, container)
                return False
            case "POST", ["start"]:
                container.state = "running"
                await request.answer(204)
            case "POST", ["wait"]:
                await container.over.wait()
                await request.answer(200, {"StatusCode": container.exit_code})
            case "GET", ["json" | "top"]:
                state = {
                    "Running": container.state == "running",
                    "ExitCode": container.exit_code,
                    "OOMKilled": container.killed_for_memory,
                }
                await request.answer(200, {"State": state, "Processes": self.processes})
            case "DELETE", []:
                await self._remove(request, number, container)
            case "GET", ["changes"]:
                await self._counted(request, number, container)
            case _, ["archive"]:
                await _archive(request, container.root)
            case "POST", ["exec"] if container.state != "running":
                await request.answer(409, {"message": f"Container {number} is not running"})
            case "POST", ["exec"]:
                name = f"e{len(self._commands)}"
                self._commands[name] = (container, json.loads(request.body), [None])
                await request.answer(201, {"Id": name})
        return True

    async def _counted(self, request: _Request, number: str, container: StandInContainer) -> None:
        if not self.counts_all and self.uncounted in ("", number):
            self.uncounted = number
            await container.over.wait()
        await request.answer(200, container.changes)

    async def _remove(self, request: _Request, number: str, container: StandInContainer) -> None:
        if number in self.stuck:
            await request.answer(500, {"message": "device or resource busy"})
            return
        container.end(137)
        del self.containers[number]
        self.removed.append(number)
        await request.answer(204)

    async def _attached(self, request: _Request, container: StandInContainer) -> None:
        while line := await request.reader.readline():
            order = line.decode().strip()
            container.orders.append(order)
            if order.isdigit():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(int(order), signal.SIGKILL)
        if container.state == "running":
            container.end(0)

    async def _exec(self, request: _Request, number: str, rest: list[str]) -> bool:
        container, settings, code = self._commands[number]
        if rest == ["json"]:
            running = code[0] is None or self.hears_no_ends
            await request.answer(200, {"Running": running, "ExitCode": code[0], "Pid": self.started_pid})
            return True
        await request.hijack()
        if self.cannot_start:
            _frame(request.writer, 2 if self.is_podman else 1, f"{self.cannot_start.pop(0)}\r\n".encode())
            code[0] = 126
            return False
        words = settings["Cmd"]
        assert isinstance(words, list)
        environment = settings["Env"]
        assert isinstance(environment, list)
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            start_new_session=self.makes_groups, cwd=container.root,
            env={"PATH": os.environ["PATH"], **dict(each.split("=", 1) for each in environment)},
        )  # fmt: skip
        container.running.add(process)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        feeding = asyncio.ensure_future(_fed(request.reader, process.stdin, attached=bool(settings["AttachStdin"])))
        pumps = (_pumped(process.stdout, request.writer, 1), _pumped(process.stderr, request.writer, 2))
        await asyncio.gather(*pumps)
        ended = await process.wait()
        container.running.discard(process)
        code[0] = ended if ended >= 0 else 128 - ended
        feeding.cancel()
        return False


async def _fed(reader: asyncio.StreamReader, stdin: asyncio.StreamWriter, *, attached: bool) -> None:
    with contextlib.suppress(ConnectionError):
        while attached and (part := await reader.read(1 << 16)):
            stdin.write(part)
            await stdin.drain()
        stdin.close()


async def _pumped(stream: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: int) -> None:
    with contextlib.suppress(ConnectionError):
        while part := await stream.read(1 << 12):
            _frame(writer, kind, part)
            await writer.drain()


def _frame(writer: asyncio.StreamWriter, kind: int, content: bytes) -> None:
    head = bytes((kind, 0, 0, 0)) + len(content).to_bytes(4, "big")
    # In pieces, as a network may have it.
    writer.write(head[:3])
    writer.write(head[3:] + content)


async def _archive(request: _Request, root: Path) -> None:
    place = root / request.query["path"].strip("/")
    told = _looked_up(place, root)
    if request.method == "PUT":
        with tarfile.open(fileobj=io.BytesIO(request.body)) as archive:
            archive.extractall(root, filter="data")
        await request.answer(200)
    elif told is None:
        await request.answer(404, {"message": "Could not find the file"})
    elif request.method == "HEAD":
        encoded = base64.b64encode(json.dumps(told).encode()).decode()
        await request.answer(200, headers=f"X-Docker-Container-Path-Stat: {encoded}\r\n")
    else:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(place, arcname=place.name)
        await request.answer(200, raw=packed.getvalue())


def _looked_up(place: Path, root: Path) -> dict[str, object] | None:
    """A path as the engine tells of it; None if there is nothing."""
    if not os.path.lexists(place):
        return None
    mode = stat.S_IMODE(place.lstat().st_mode)
    if place.is_symlink():
        return {
            "name": place.name,
            "mode": mode | _LINK,
            "linkTarget": f"/{place.resolve().relative_to(root.resolve())}",
        }
    return {"name": place.name, "mode": mode | (_DIRECTORY if place.is_dir() else 0), "linkTarget": ""}


def _has(container: StandInContainer, label: str) -> bool:
    name, found, value = label.partition("=")
    return name in container.labels and (not found or container.labels[name] == value)


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Request | None:
    head = await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b""
    if not head:
        return None
    first, *lines = head.decode().strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    method, target, _ = first.split()
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    while headers.get("transfer-encoding") == "chunked":
        size = int(await reader.readline(), 16)
        body += (await reader.readexactly(size + 2))[:-2]
        if not size:
            break
    parts = urlsplit(target)
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    return _Request(method, parts.path, query, body, reader, writer)


@asynccontextmanager
async def stand_in(folder: Path) -> AsyncIterator[StandInEngine]:
    """An engine that listens."""
    root = folder / "containers"
    root.mkdir()
    engine = StandInEngine(folder / "engine.sock", root)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.die()
