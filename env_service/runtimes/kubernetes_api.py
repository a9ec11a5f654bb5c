"""The calls to a Kubernetes API server that runtimes need: pods, and the streams of commands in them.

ClusterError
├── ClusterUnreachable   no connection, it broke, or there was no answer in time
└── ClusterRefused       an answer with a status of 400 or more

Streams are websockets in `v5.channel.k8s.io`: each message begins with its channel, 0 for stdin, 1 stdout, 2 stderr and
3 the end as a Status; 255 and a channel ends that one. Earlier ones cannot end a stdin.
"""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import aiohttp
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

ANSWER_S = 60.0
PROTOCOL = "v5.channel.k8s.io"
_STDIN, _STATUS, _CLOSE = 0, 3, 255
_MAX_ANSWER = 64 << 20
_MAX_MESSAGE = 4 << 20
_PART = 1 << 16

T = TypeVar("T")


class ClusterError(Exception):
    """A call to the API server came to nothing."""


class ClusterUnreachable(ClusterError):
    """There is no connection, it broke, or no answer came in time."""


class ClusterRefused(ClusterError):
    """An answer with an error; `message` is the API server's own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{message} (status {status})")
        self.status = status
        self.message = message


class _ClusterAnswer(BaseModel):
    """The base of answers, of which a few fields are of interest."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class TerminatedState(_ClusterAnswer):
    """End of a container."""

    exitCode: int
    reason: str = ""


class ContainerStates(_ClusterAnswer):
    """State of a container, as far as it has ended or waits."""

    terminated: TerminatedState | None = None
    waiting: Mapping[str, object] | None = None


class ContainerStatus(_ClusterAnswer):
    """Status of the one container of a runtime's pod."""

    state: ContainerStates = ContainerStates()


class PodStatus(_ClusterAnswer):
    """Status of a pod."""

    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    containerStatuses: tuple[ContainerStatus, ...] = ()

    @property
    def terminated(self) -> TerminatedState | None:
        """End of its container, if that has ended."""
        return self.containerStatuses[0].state.terminated if self.containerStatuses else None

    @property
    def has_ended(self) -> bool:
        """True if it, or its container, has ended."""
        return self.phase in ("Failed", "Succeeded") or self.terminated is not None

    @property
    def waits_for(self) -> str:
        """Reason that its container has not begun, such as ErrImagePull; empty if there is none."""
        waiting = self.containerStatuses[0].state.waiting if self.containerStatuses else None
        return "" if not waiting else f"{waiting.get('reason', '')}: {waiting.get('message', '')}".strip(": ")


class PodMetadata(_ClusterAnswer):
    """Name of a pod; and when it is to be gone, if somebody has deleted it."""

    name: str
    deletionTimestamp: str | None = None


class RuntimePod(_ClusterAnswer):
    """A pod."""

    metadata: PodMetadata
    status: PodStatus = PodStatus()


class _PodList(_ClusterAnswer):
    items: tuple[RuntimePod, ...]


_POD, _PODS = TypeAdapter(RuntimePod), TypeAdapter(_PodList)


class KubernetesApi:
    """An API server, of which one namespace is used; entered before use. All calls raise ClusterError."""

    def __init__(self, url: str, *, namespace: str, account: Path | None) -> None:
        self.url = url.rstrip("/")
        self._pods = f"{self.url}/api/v1/namespaces/{namespace}/pods"
        self._account = account
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "KubernetesApi":
        ca_file = None if self._account is None else self._account / "ca.crt"
        known = ca_file if ca_file is not None and ca_file.exists() else None
        trusted = ssl.create_default_context(cafile=known) if self.url.startswith("https:") else True
        connector = aiohttp.TCPConnector(ssl=trusted, limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def create(self, pod: Mapping[str, object]) -> None:
        """Make a pod."""
        await self._ask("POST", self._pods, body=pod)

    async def pod(self, name: str) -> RuntimePod:
        """Describe a pod. Raises ClusterRefused with 404 if there is none."""
        return _parsed(_POD, await self._ask("GET", f"{self._pods}/{name}"))

    async def pods(self, selector: str) -> tuple[RuntimePod, ...]:
        """Describe all pods with labels."""
        return _parsed(_PODS, await self._ask("GET", self._pods, query={"labelSelector": selector})).items

    async def delete(self, name: str) -> None:
        """Kill a pod and remove it; one that is gone already is no error."""
        try:
            await self._ask("DELETE", f"{self._pods}/{name}", query={"gracePeriodSeconds": "0"})
        except ClusterRefused as error:
            if error.status != 404:
                raise

    @asynccontextmanager
    async def exec(self, pod: str, words: Sequence[str], *, stdin: bool) -> AsyncIterator["ChannelStream"]:
        """Run a command; its streams."""
        query = [("command", word) for word in words] + [("stdout", "true"), ("stderr", "true")]
        async with self._stream(f"{self._pods}/{pod}/exec", [*query, *([("stdin", "true")] if stdin else [])]) as found:
            yield found

    @asynccontextmanager
    async def attach_stdin(self, pod: str) -> AsyncIterator["ChannelStream"]:
        """The stdin of a pod's first process, which is at its end when this connection is."""
        async with self._stream(f"{self._pods}/{pod}/attach", [("stdin", "true")]) as found:
            yield found

    @asynccontextmanager
    async def _stream(self, url: str, query: Sequence[tuple[str, str]]) -> AsyncIterator["ChannelStream"]:
        assert self._session is not None
        try:
            async with asyncio.timeout(ANSWER_S):
                socket = await self._session.ws_connect(
                    url, params=query, headers=self._headers(), protocols=(PROTOCOL,), max_msg_size=_MAX_MESSAGE,
                    autoping=True,
                )  # fmt: skip
        except aiohttp.WSServerHandshakeError as error:
            raise ClusterRefused(error.status, error.message) from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ClusterUnreachable(f"{self.url}: {error or 'no answer'}") from error
        try:
            if socket.protocol != PROTOCOL:
                raise ClusterRefused(0, f"the API server does not speak {PROTOCOL}: Kubernetes 1.30 or later is needed")
            yield ChannelStream(socket)
        finally:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with asyncio.timeout(5.0):
                    await socket.close()

    async def _ask(
        self, method: str, url: str, *, query: Mapping[str, str] | None = None, body: Mapping[str, object] | None = None
    ) -> bytes:
        assert self._session is not None
        try:
            async with (
                asyncio.timeout(ANSWER_S),
                self._session.request(method, url, params=query, json=body, headers=self._headers()) as answer,
            ):
                told = bytearray()
                async for part in answer.content.iter_chunked(_PART):
                    told += part
                    if len(told) > _MAX_ANSWER:
                        raise ClusterRefused(0, f"an answer of more than {_MAX_ANSWER} bytes")
                if answer.status >= 400:
                    raise ClusterRefused(answer.status, _message(bytes(told)))
                return bytes(told)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ClusterUnreachable(f"{self.url}: {str(error) or 'no answer'}") from error

    def _headers(self) -> dict[str, str]:
        # Read each time: a cluster renews it every hour or so.
        if self._account is None:
            return {}
        try:
            return {"Authorization": f"Bearer {(self._account / 'token').read_text(encoding='utf-8').strip()}"}
        except OSError as error:
            raise ClusterUnreachable(f"the token cannot be read: {error}") from error


class ChannelStream:
    """The connection of a command or a pod."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self.exit_code: int | None = None
        """Of a command that has ended; of an attached pod 0, which no connection that broke says."""
        self.failure = ""
        """Of one that could not be run."""

    async def send(self, data: bytes) -> None:
        """Write to stdin. What is at its end takes nothing more."""
        with contextlib.suppress(aiohttp.ClientError, ConnectionError):
            for at in range(0, len(data), _PART):
                await self._socket.send_bytes(bytes((_STDIN,)) + data[at : at + _PART])

    async def finish(self) -> None:
        """Say that no more is written."""
        with contextlib.suppress(aiohttp.ClientError, ConnectionError):
            await self._socket.send_bytes(bytes((_CLOSE, _STDIN)))

    async def frames(self) -> AsyncIterator[tuple[int, bytes]]:
        """Parts of what is printed, with 1 for stdout and 2 for stderr, until the end."""
        async for message in self._socket:
            if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                continue
            channel, content = message.data[0], message.data[1:]
            if channel == _STATUS:
                self._end(content)
            elif channel in (1, 2):
                yield channel, content

    def _end(self, content: bytes) -> None:
        try:
            told = json.loads(content)
            if told.get("status") == "Success":
                self.exit_code = 0
                return
            causes = (told.get("details") or {}).get("causes") or []
            code = next((cause["message"] for cause in causes if cause.get("reason") == "ExitCode"), None)
            self.exit_code = None if code is None else int(code)
            self.failure = str(told.get("message", "")) if code is None else ""
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.failure = f"its end cannot be read: {error}"


def _parsed(model: TypeAdapter[T], told: bytes) -> T:
    try:
        return model.validate_json(told)
    except ValidationError as error:
        said = error.errors(include_url=False)[0]
        raise ClusterRefused(0, f"its answer is not what was expected: {said['loc']}: {said['msg']}") from error


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace").strip()[:500] or "no message"
