"""The calls to a container engine that runtimes need, and what may come of them.

EngineError
├── EngineUnreachable   no connection, it broke, or there was no answer in time
└── EngineRefused       an answer with a status of 400 or more

One connection holds a command's streams, or a container's stdin; an answer is never read beyond the bound that its
caller gives.
"""

import asyncio
import base64
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, TypeVar
from urllib.parse import quote

import aiohttp
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from env_service.runtimes.tree import TooLarge

ANSWER_S = 60.0
_MAX_ANSWER = 64 << 20
_NEWEST = (1, 48)
_PODMANS_OWN = "Libpod-Api-Version"
_STAT = "X-Docker-Container-Path-Stat"
_PART = 1 << 16
_IN_MEMORY = 8 << 20
# A quote in a path is escaped.
_EACH_CHANGE = b'"Kind":'

T = TypeVar("T")
Query = Mapping[str, str]
Body = Mapping[str, object]


class EngineError(Exception):
    """A call to the engine came to nothing."""


class EngineUnreachable(EngineError):
    """There is no connection, it broke, or no answer came in time."""


class EngineRefused(EngineError):
    """An answer with an error; `message` is the engine's own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{message} (status {status})")
        self.status = status
        self.message = message


class _EngineAnswer(BaseModel):
    """The base of answers, of which a few fields are of interest."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class EngineInfo(_EngineAnswer):
    """Of `/info`: what the engine has. Its word for a limit is not enough: see engine_limits.py.

    `KernelVersion` is as in `uname -r`. `Rootless` is Podman's; Docker says so among `SecurityOptions`.
    """

    SecurityOptions: tuple[str, ...] | None = None
    KernelVersion: str = ""
    DefaultRuntime: str = ""
    CgroupDriver: str = ""
    CgroupVersion: str = ""
    MemoryLimit: bool = False
    PidsLimit: bool = False
    CpuCfsQuota: bool = False
    Rootless: bool = False


class ImageSettings(_EngineAnswer):
    """Settings of an image for its containers."""

    Env: tuple[str, ...] | None = None
    Volumes: dict[str, object] | None = None


class ImageDescription(_EngineAnswer):
    """Of `/images/NAME/json`."""

    Id: str
    Config: ImageSettings | None = None


class ContainerState(_EngineAnswer):
    """State of a container, or of its end."""

    Running: bool = False
    OOMKilled: bool = False
    ExitCode: int = 0
    Error: str = ""


class ContainerDescription(_EngineAnswer):
    """Of `/containers/ID/json`."""

    State: ContainerState


class ListedContainer(_EngineAnswer):
    """A line of `/containers/json`. `SizeRw` are the bytes that it wrote, `Created` is in seconds since 1970."""

    Id: str
    State: str = ""
    Created: int = 0
    Labels: dict[str, str] | None = None
    SizeRw: int | None = None


class ExecDescription(_EngineAnswer):
    """Of `/exec/ID/json`. `Pid` is 0 if it never ran, and in Podman of all that have ended."""

    Running: bool
    ExitCode: int | None = None
    Pid: int | None = None


class PathDescription(_EngineAnswer):
    """A path of a container: `mode` as Go writes it, `linkTarget` where a link leads to at last, inside."""

    name: str = ""
    mode: int = 0
    linkTarget: str = ""

    @property
    def is_folder(self) -> bool:
        """True of a folder."""
        return bool(self.mode >> 31 & 1)

    @property
    def is_link(self) -> bool:
        """True of a symbolic link."""
        return bool(self.mode >> 27 & 1)

    @property
    def permissions(self) -> int:
        """As chmod takes them."""
        special = (23, 0o4000), (22, 0o2000), (20, 0o1000)
        return self.mode & 0o777 | sum(bit for at, bit in special if self.mode >> at & 1)


class Change(_EngineAnswer):
    """A path that differs from the image: 0 changed, 1 added, 2 removed."""

    Path: str
    Kind: int


class _Actor(_EngineAnswer):
    ID: str


class ContainerEvent(_EngineAnswer):
    """A line of `/events`: what became of a container."""

    Actor: _Actor
    Action: str


class _Id(_EngineAnswer):
    Id: str


class _Top(_EngineAnswer):
    Processes: tuple[tuple[str, ...], ...]


class _StatusCode(_EngineAnswer):
    StatusCode: int


_INFO, _IMAGE = TypeAdapter(EngineInfo), TypeAdapter(ImageDescription)
_CONTAINER, _EXEC = TypeAdapter(ContainerDescription), TypeAdapter(ExecDescription)
_ID, _CODE, _PATH = TypeAdapter(_Id), TypeAdapter(_StatusCode), TypeAdapter(PathDescription)
_TOP = TypeAdapter(_Top)
_EVENT = TypeAdapter(ContainerEvent)
_CONTAINERS = TypeAdapter(tuple[ListedContainer, ...])
_CHANGES = TypeAdapter(tuple[Change, ...] | None)


class EngineApi:
    """An engine at a unix socket; entered before use. All calls raise EngineError."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.is_podman = False
        """True of Podman, once `agree` has found out; False of Docker."""
        self._version = ""
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "EngineApi":
        connector = aiohttp.UnixConnector(str(self.socket), limit=0)
        no_limit = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(connector=connector, timeout=no_limit, auto_decompress=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def agree(self) -> None:
        """Find the newest version of the API that both know, and whose engine it is."""
        async with self._call("GET", "/_ping", within_s=ANSWER_S) as answer:
            told = answer.headers.get("Api-Version", "1.41")
            self.is_podman = _PODMANS_OWN in answer.headers
        major, _, minor = told.partition(".")
        theirs = (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else _NEWEST
        self._version = "/v{}.{}".format(*min(theirs, _NEWEST))

    async def info(self) -> EngineInfo:
        """Describe the engine."""
        return _parsed(_INFO, await self._read("GET", "/info"))

    async def image(self, name: str) -> ImageDescription:
        """An image by its name. Raises EngineRefused with 404 if there is none."""
        return _parsed(_IMAGE, await self._read("GET", f"/images/{quote(name, safe='/:@')}/json"))

    async def containers(self, *, label: str, sizes: bool = False) -> tuple[ListedContainer, ...]:
        """All containers with a label, those that have ended too."""
        query = {"all": "1", "filters": json.dumps({"label": [label]}), **({"size": "1"} if sizes else {})}
        return _parsed(_CONTAINERS, await self._read("GET", "/containers/json", query))

    async def create(self, name: str, settings: Body) -> str:
        """Make a container, which does not run yet; its id."""
        return _parsed(_ID, await self._read("POST", "/containers/create", {"name": name}, settings)).Id

    async def start(self, container: str) -> None:
        """Run it."""
        await self._read("POST", f"/containers/{container}/start")

    async def state(self, container: str) -> ContainerState:
        """Describe a container's state."""
        return _parsed(_CONTAINER, await self._read("GET", f"/containers/{container}/json")).State

    async def processes(self, container: str) -> frozenset[int]:
        """Process ids of all that runs in it, as the engine's machine has them."""
        told = await self._read("GET", f"/containers/{container}/top", {"ps_args": "-eo pid"})
        return frozenset(int(line[0]) for line in _parsed(_TOP, told).Processes)

    async def wait(self, container: str) -> int:
        """Return when it has ended; its exit code."""
        told = await self._read("POST", f"/containers/{container}/wait", {"condition": "not-running"}, within_s=None)
        return _parsed(_CODE, told).StatusCode

    async def kill(self, container: str) -> None:
        """Kill all of it."""
        await self._read("POST", f"/containers/{container}/kill")

    async def remove(self, container: str) -> None:
        """Kill it and remove it with what it wrote; one that is gone already is no error."""
        try:
            await self._read("DELETE", f"/containers/{container}", {"force": "1", "v": "1"})
        except EngineRefused as error:
            if error.status not in (404, 409):  # 409: it is being removed
                raise

    async def changes(self, container: str) -> tuple[Change, ...]:
        """Paths that differ from the image."""
        return _parsed(_CHANGES, await self._read("GET", f"/containers/{container}/changes")) or ()

    async def count_changes(self, container: str, *, most: int) -> int:
        """Number of paths that differ from the image, counted until there are more than `most`; none is kept."""
        count, before = 0, b""
        async with (
            self._call("GET", f"/containers/{container}/changes", within_s=ANSWER_S) as answer,
            asyncio.timeout(ANSWER_S),
        ):
            async for part in answer.content.iter_any():
                told = before + part
                count += told.count(_EACH_CHANGE)
                if count > most:
                    break
                before = told[-len(_EACH_CHANGE) + 1 :]
        return count

    async def path(self, container: str, path: str) -> PathDescription | None:
        """Describe what is at a path, the last link not followed; None if there is nothing."""
        try:
            async with self._call("HEAD", _archive(container), {"path": path}, within_s=ANSWER_S) as answer:
                return _parsed(_PATH, base64.b64decode(answer.headers.get(_STAT, "")))
        except EngineRefused as error:
            if error.status == 404:
                return None
            raise

    async def read(self, container: str, path: str, *, most: int, overhead: int) -> IO[bytes]:
        """An archive of a path, to be closed. Raises TooLarge if it has more than the sum of both."""
        # What is spooled to a disk is written on the event loop: some MiB at a time, to the kernel's memory.
        kept = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY)  # noqa: SIM115  it is the caller's
        try:
            size = 0
            async with (
                asyncio.timeout(ANSWER_S),
                self._call("GET", _archive(container), {"path": path}, within_s=ANSWER_S) as answer,
            ):
                async for part in answer.content.iter_chunked(_PART):
                    size += len(part)
                    if size > most + overhead:
                        raise TooLarge(most)
                    kept.write(part)
            kept.seek(0)
        except TimeoutError as error:
            kept.close()
            raise EngineUnreachable(self._of(f"an archive of {path} takes longer than {ANSWER_S:g} s")) from error
        except BaseException:
            kept.close()
            raise
        return kept

    async def write(self, container: str, archive: IO[bytes], *, replaces_folders: bool) -> None:
        """Unpack an archive at the root; files may take the places of folders, or are refused there."""
        query = {"path": "/", **({} if replaces_folders else {"noOverwriteDirNonDir": "1"})}
        async with self._call("PUT", _archive(container), query, data=archive, within_s=ANSWER_S):
            pass

    async def make_exec(self, container: str, settings: Body) -> str:
        """Prepare a command; its id."""
        return _parsed(_ID, await self._read("POST", f"/containers/{container}/exec", {}, settings)).Id

    async def exec_state(self, command: str) -> ExecDescription:
        """Describe a command's state."""
        return _parsed(_EXEC, await self._read("GET", f"/exec/{command}/json"))

    @asynccontextmanager
    async def start_exec(self, command: str) -> AsyncIterator["EngineStream"]:
        """Run a command; its streams."""
        start = {"Detach": False, "Tty": False}
        async with self._call("POST", f"/exec/{command}/start", json_body=start, within_s=ANSWER_S) as answer:
            yield EngineStream(answer)

    @asynccontextmanager
    async def attach_stdin(self, container: str) -> AsyncIterator["EngineStream"]:
        """The stdin of a container's first process, which is at its end when this connection is."""
        query = {"stream": "1", "stdin": "1", "stdout": "0", "stderr": "0"}
        async with self._call("POST", f"/containers/{container}/attach", query, within_s=ANSWER_S) as answer:
            yield EngineStream(answer)

    async def kills(self, label: str) -> AsyncIterator[ContainerEvent]:
        """Events of containers with a label, from now on: `oom`, of something in one that was killed since there was no
        memory, and `kill`, of one to which this engine was asked to send a signal.
        """
        query = {"filters": json.dumps({"event": ["oom", "kill"], "label": [label], "type": ["container"]})}
        async with self._call("GET", "/events", query, within_s=ANSWER_S) as answer:
            async for line in answer.content:
                with contextlib.suppress(ValidationError):
                    yield _EVENT.validate_json(line)

    async def _read(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        body: Body | None = None,
        *,
        within_s: float | None = ANSWER_S,
    ) -> bytes:
        async with self._call(method, path, query, json_body=body, within_s=within_s) as answer:
            try:
                async with asyncio.timeout(within_s):
                    told = bytearray()  # of paths that differ it may be much
                    async for part in answer.content.iter_any():
                        told += part
                        if len(told) > _MAX_ANSWER:
                            raise TooLarge(_MAX_ANSWER)
                    return bytes(told)
            except TimeoutError as error:
                raise EngineUnreachable(self._of(f"no answer to {method} {path} in {within_s:g} s")) from error

    @asynccontextmanager
    async def _call(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        *,
        json_body: Body | None = None,
        data: IO[bytes] | None = None,
        within_s: float | None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer whose headers have come in time, and which is no error. What is read of it then has no deadline."""
        assert self._session is not None
        url = f"http://engine{self._version}{path}"
        # Archives would come compressed.
        headers = {"Accept-Encoding": "identity", **({"Content-Type": "application/x-tar"} if data is not None else {})}
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(within_s):
                    answer = await stack.enter_async_context(
                        self._session.request(
                            method, url, params=dict(query or {}), json=json_body, data=data, headers=headers
                        )
                    )
                    if answer.status >= 400:
                        raise EngineRefused(answer.status, _message(await answer.read(), answer.status))
                yield answer
        except TimeoutError as error:
            raise EngineUnreachable(self._of(f"no answer to {method} {path} in {within_s} s")) from error
        except (aiohttp.ClientError, ConnectionError, FileNotFoundError, PermissionError) as error:
            raise EngineUnreachable(self._of(str(error) or type(error).__name__)) from error

    def _of(self, why: str) -> str:
        return f"the container engine at {self.socket}: {why}"


class EngineStream:
    """The connection of a command or a container: raw bytes in, frames out."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer
        connection = answer.connection
        self._transport = None if connection is None else connection.transport

    def send(self, data: bytes) -> None:
        """Write; what is at its end takes nothing more."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def finish(self) -> None:
        """Say that no more is written."""
        if self._transport is not None and not self._transport.is_closing() and self._transport.can_write_eof():
            self._transport.write_eof()

    async def frames(self) -> AsyncIterator[tuple[int, bytes]]:
        """Parts of what is printed, with 1 for stdout and 2 for stderr, until the end."""
        content = self._answer.content
        try:
            while True:
                head = await content.readexactly(8)
                kind, left = head[0], int.from_bytes(head[4:], "big")
                while left:
                    part = await content.read(min(left, _PART))
                    if not part:
                        return
                    left -= len(part)
                    yield kind, part
        except asyncio.IncompleteReadError:
            return
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineUnreachable(f"the connection to the container engine broke: {error}") from error


def _archive(container: str) -> str:
    return f"/containers/{container}/archive"


def _parsed(model: TypeAdapter[T], told: bytes) -> T:
    try:
        return model.validate_json(told)
    except ValidationError as error:
        said = error.errors(include_url=False)[0]
        where = ".".join(map(str, said["loc"]))
        raise EngineRefused(0, f"its answer is not what was expected: {where}: {said['msg']}") from error


def _message(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace").strip()[:500] or f"status {status}"
