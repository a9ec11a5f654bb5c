"""HTTP between the processes: models out, models in, a deadline on everything, and errors that name the counterpart.

ServiceError
├── ServiceUnreachable   no connection, or it broke
│   └── ServiceMistrusted   one side does not believe the other's certificate
├── ServiceTimeout       no answer within the deadline
├── ServiceRefused       4xx: the request is at fault, and will be again
└── ServiceFailed        5xx, or an answer that does not fit its model
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Generic, Self, TypeVar
from urllib.parse import urlsplit

import aiohttp
from pydantic import BaseModel, SecretStr, ValidationError

from protocol.status import ErrorBody
from services.http.tls import TlsContext, explained, without_an_answer
from services.tracing import traced

R = TypeVar("R", bound=BaseModel)
P = TypeVar("P", bound=BaseModel)

_ERROR_LINE = b'{"error":'
_MAX_REST_S = 86400.0
_MAX_COUNTERPARTS = 8192


class ServiceError(Exception):
    """A call to another process came to nothing; `url` is the counterpart's."""

    def __init__(self, url: str, text: str) -> None:
        super().__init__(f"{url}: {text}")
        self.url = url


class ServiceUnreachable(ServiceError):
    """There is no connection; `sent` tells whether the request may have arrived before it broke."""

    def __init__(self, url: str, text: str, *, sent: bool) -> None:
        super().__init__(url, text)
        self.sent = sent


class ServiceMistrusted(ServiceUnreachable):
    """No TLS connection came about, or one side does not believe the other; the text says why, and what to do."""


class ServiceTimeout(ServiceError):
    """The deadline passed; the counterpart may still be at work."""


class ServiceRefused(ServiceError):
    """Status 4xx. `kind`, `message` and `retry_after_s`, from the Retry-After header, are the counterpart's."""

    def __init__(self, url: str, *, status: int, kind: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(url, f"refused with {status} {kind}: {message}")
        self.status = status
        self.kind = kind
        self.message = message
        self.retry_after_s = retry_after_s


class ServiceFailed(ServiceError):
    """Status 5xx, or an answer that is not what was agreed (`kind` is then `bad_answer`)."""

    def __init__(self, url: str, *, status: int, kind: str, message: str) -> None:
        super().__init__(url, f"failed with {status} {kind}: {message}")
        self.status = status
        self.kind = kind
        self.message = message


@dataclass(frozen=True)
class Contact:
    """Record of calls to one counterpart; `origin` is scheme://host:port.

    `last_answer_s` is how many seconds ago it last said anything, a refusal included; None if it never did.
    """

    origin: str
    last_answer_s: float | None
    failures_in_row: int
    last_failure: str | None

    @property
    def state(self) -> str:
        """In a few words."""
        if not self.failures_in_row:
            return "answers"
        times = "1 call" if self.failures_in_row == 1 else f"{self.failures_in_row} calls"
        return f"{times} in a row failed: {self.last_failure}"


@dataclass
class _Calls:
    last_answer: float | None = None
    failures_in_row: int = 0
    last_failure: str | None = None


class Contacts:
    """Counterparts by origin; of too many, the one not called for longest is forgotten. `clock` is in seconds."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._calls: dict[str, _Calls] = {}

    def answered(self, url: str) -> None:
        """A call was answered, be it with a refusal."""
        calls = self._of(url)
        calls.last_answer, calls.failures_in_row = self._clock(), 0

    def failed(self, url: str, *, why: str, heard: bool) -> None:
        """A call failed; `heard` tells whether the counterpart said so itself."""
        calls = self._of(url)
        calls.failures_in_row += 1
        calls.last_failure = why[:300]
        if heard:
            calls.last_answer = self._clock()

    def all(self) -> tuple[Contact, ...]:
        """The names that were called, the most recent last."""
        now = self._clock()
        return tuple(
            Contact(
                origin=origin,
                last_answer_s=None if calls.last_answer is None else now - calls.last_answer,
                failures_in_row=calls.failures_in_row,
                last_failure=calls.last_failure,
            )
            for origin, calls in self._calls.items()
        )

    def _of(self, url: str) -> _Calls:
        parts = urlsplit(url)
        origin = f"{parts.scheme}://{parts.netloc}"
        calls = self._calls[origin] = self._calls.pop(origin, _Calls())
        if len(self._calls) > _MAX_COUNTERPARTS:
            del self._calls[next(iter(self._calls))]
        return calls


class HttpClient:
    """A pool of connections, kept alive between calls; an async context manager.

    Without `max_connections` there are as many as there are calls at once, which the caller bounds: calls that wait for
    each other, as all members of a meeting do, must never wait for a connection. `token` is shown to every counterpart.
    `tls` says whose certificates are believed, and which is shown; without it those of the system are, and none is.
    A retry waits about `backoff_s` seconds, twice as long each time.
    """

    def __init__(
        self,
        *,
        token: SecretStr | None = None,
        max_connections: int | None = None,
        connect_timeout_s: float = 5.0,
        max_answer_bytes: int = 64 << 20,
        backoff_s: float = 0.1,
        tls: TlsContext | None = None,
    ) -> None:
        self._tls = tls
        self._headers = {"Content-Type": "application/json"}
        self._token = token
        self._max_connections = max_connections
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s)
        self._max_answer_bytes = max_answer_bytes
        self._backoff_s = backoff_s
        self._session: aiohttp.ClientSession | None = None
        self._contacts = Contacts()

    def contacts(self) -> tuple[Contact, ...]:
        """Records of calls to each counterpart, the most recent last."""
        return self._contacts.all()

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=self._max_connections or 0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout, headers=self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._open_session.close()

    async def post(
        self,
        url: str,
        body: BaseModel,
        response: type[R],
        *,
        deadline_s: float,
        retries: int = 0,
        idempotent: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> R:
        """Send `body`, with `headers` beside those of the client, and return the answer.

        Up to `retries` more attempts within the one deadline, with backoff: always if no connection was made; after a
        broken connection or a 5xx only if the call is `idempotent`. Raises a ServiceError.
        """
        payload = _written(url, body)
        return await self._with_retries(
            url, lambda: self._call("POST", url, payload, response, headers), deadline_s, retries, idempotent
        )

    async def get(self, url: str, response: type[R], *, deadline_s: float, retries: int = 0) -> R:
        """Fetch a model; retried as an idempotent call. Raises a ServiceError."""
        return await self._with_retries(url, lambda: self._call("GET", url, None, response), deadline_s, retries, True)

    async def delete(self, url: str, response: type[R], *, deadline_s: float, retries: int = 0) -> R:
        """Remove what is there; retried as an idempotent call. Raises a ServiceError."""
        attempt = partial(self._call, "DELETE", url, None, response)
        return await self._with_retries(url, attempt, deadline_s, retries, True)

    async def notify(self, url: str, body: BaseModel, *, deadline_s: float) -> None:
        """Send `body` to somebody whose answer says nothing but whether it was taken. Raises a ServiceError."""
        payload = _written(url, body)
        with self._noting(url), self._naming(url):
            async with asyncio.timeout(deadline_s), self._request("POST", url, data=payload) as answer:
                raw = await self._read(url, answer)
        if answer.status >= 300:
            raise _error_of(url, answer.status, raw, answer.headers)

    async def download(
        self,
        url: str,
        *,
        deadline_s: float,
        bytes_per_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[bytes, Mapping[str, str]]:
        """Fetch bytes and the answer's headers, without a retry; `headers` as of `post`. Raises a ServiceError.

        With `bytes_per_s` the deadline is that of an empty answer: one whose headers tell its length has more time.
        """
        with self._naming(url):
            async with asyncio.timeout(deadline_s) as limit, self._request("GET", url, headers=headers) as answer:
                if bytes_per_s is not None and answer.content_length is not None:
                    length = min(answer.content_length, self._max_answer_bytes)
                    limit.reschedule((limit.when() or 0.0) + length / bytes_per_s)
                raw = await self._read(url, answer)
        if answer.status >= 400:
            raise _error_of(url, answer.status, raw, answer.headers)
        return raw, answer.headers

    @asynccontextmanager
    async def stream(
        self,
        url: str,
        body: BaseModel,
        part: type[P],
        *,
        deadline_s: float,
        idle_timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator["StreamedLines[P]"]:
        """Send `body` and read the answer line by line, each a `part`; leaving the block early closes the connection.

        `async with client.stream(...) as parts: async for part in parts: ...`. The whole must end within `deadline_s`,
        each line arrive within `idle_timeout_s`. Nothing is retried. Raises a ServiceError.
        """
        ends_at, payload = asyncio.get_running_loop().time() + deadline_s, _written(url, body)
        with self._noting(url), self._naming(url):
            async with asyncio.timeout(min(deadline_s, idle_timeout_s)):
                answer = await self._request("POST", url, data=payload, headers=traced(headers))
        async with answer:
            if answer.status >= 400:
                with self._noting(url), self._naming(url):
                    async with asyncio.timeout_at(ends_at):
                        raise _error_of(url, answer.status, await self._read(url, answer), answer.headers)
            yield StreamedLines(
                url, answer, part, ends_at=ends_at, idle_timeout_s=idle_timeout_s, limit=self._max_answer_bytes
            )

    @property
    def _open_session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "HttpClient is used outside of its `async with`"
        return self._session

    def _request(
        self, method: str, url: str, *, data: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> "aiohttp.client._RequestContextManager":
        """Nobody is followed to another address: what is sent is meant for this one."""
        trust = True if self._tls is None else self._tls.current()
        if self._token is not None:
            headers = {"Authorization": f"Bearer {self._token.get_secret_value()}", **(headers or {})}
        return self._open_session.request(method, url, data=data, headers=headers, ssl=trust, allow_redirects=False)

    async def _with_retries(
        self, url: str, attempt: Callable[[], Awaitable[R]], deadline_s: float, retries: int, idempotent: bool
    ) -> R:
        with self._noting(url), self._naming(url):
            async with asyncio.timeout(deadline_s):
                for number in range(retries):
                    try:
                        return await attempt()
                    except (ServiceUnreachable, ServiceFailed) as error:
                        if not idempotent and (isinstance(error, ServiceFailed) or error.sent):
                            raise
                    await asyncio.sleep(min(2.0, self._backoff_s * 2**number) * random.uniform(0.5, 1.0))
                return await attempt()

    def _naming(self, url: str) -> AbstractContextManager[None]:
        return _naming(url, tls=self._tls)

    @contextmanager
    def _noting(self, url: str) -> Iterator[None]:
        """Notes how a call went. One that was cancelled says nothing about its counterpart."""
        try:
            yield
        except ServiceRefused:
            self._contacts.answered(url)
            raise
        except ServiceError as error:
            self._contacts.failed(url, why=str(error), heard=isinstance(error, ServiceFailed))
            raise
        self._contacts.answered(url)

    async def _call(
        self, method: str, url: str, payload: bytes | None, response: type[R], headers: Mapping[str, str] | None = None
    ) -> R:
        with self._naming(url):
            async with self._request(method, url, data=payload, headers=traced(headers)) as answer:
                raw = await self._read(url, answer)
        if answer.status >= 400:
            raise _error_of(url, answer.status, raw, answer.headers)
        return _parsed(url, answer.status, raw, response)

    async def _read(self, url: str, answer: aiohttp.ClientResponse) -> bytes:
        raw = bytearray()
        async for chunk in answer.content.iter_any():
            raw += chunk
            if len(raw) > self._max_answer_bytes:
                text = f"the answer is larger than {self._max_answer_bytes} bytes"
                raise ServiceFailed(url, status=answer.status, kind="bad_answer", message=text)
        return bytes(raw)


@contextmanager
def _naming(url: str, *, tls: TlsContext | None) -> Iterator[None]:
    """Turn the library's errors into ours, which name the counterpart."""
    try:
        yield
    except aiohttp.ClientError as error:
        raise _unreachable(url, error, tls=tls) from error
    except UnicodeError as error:  # a host that cannot be looked up
        raise ServiceUnreachable(url, f"no connection: {error}", sent=False) from error
    except TimeoutError as error:
        raise ServiceTimeout(url, "no answer within the deadline") from error


def _unreachable(url: str, error: aiohttp.ClientError, *, tls: TlsContext | None) -> ServiceUnreachable:
    if (mistrust := explained(error, tls=tls)) is not None:
        return ServiceMistrusted(url, mistrust, sent=False)
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return ServiceUnreachable(url, f"cannot connect: {error}", sent=False)
    hint = without_an_answer(tls) if url.startswith("https://") else ""
    return ServiceUnreachable(url, f"the connection broke: {str(error) or type(error).__name__}{hint}", sent=True)


class StreamedLines(Generic[P]):
    """The lines of a streamed answer, parsed."""

    def __init__(
        self,
        url: str,
        answer: aiohttp.ClientResponse,
        part: type[P],
        *,
        ends_at: float,
        idle_timeout_s: float,
        limit: int,
    ) -> None:
        self._url = url
        self._answer = answer
        self._part = part
        self._ends_at = ends_at
        self._idle_timeout_s = idle_timeout_s
        self._limit = limit
        self._buffer = bytearray()

    def __aiter__(self) -> Self:
        return self

    @property
    def content_type(self) -> str:
        """The type that the answer's header states, without parameters."""
        return self._answer.content_type

    async def whole(self, model: type[R]) -> R:
        """The answer in one piece, in place of the lines. Raises a ServiceError."""
        raw = bytearray()
        while chunk := await self._chunk():
            raw += chunk
            if len(raw) > self._limit:
                text = f"the answer is larger than {self._limit} bytes"
                raise ServiceFailed(self._url, status=self._answer.status, kind="bad_answer", message=text)
        return _parsed(self._url, self._answer.status, bytes(raw), model)

    async def __anext__(self) -> P:
        line = await self._line()
        if line.startswith(_ERROR_LINE):
            raise _error_of(self._url, 500, line)
        return _parsed(self._url, self._answer.status, line, self._part)

    async def _line(self) -> bytes:
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if searched > self._limit:
                text = f"a line of the answer is longer than {self._limit} bytes"
                raise ServiceFailed(self._url, status=self._answer.status, kind="bad_answer", message=text)
            chunk = await self._chunk()
            if not chunk:
                return self._rest()
            self._buffer += chunk
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    async def _chunk(self) -> bytes:
        now = asyncio.get_running_loop().time()
        with _naming(self._url, tls=None):
            async with asyncio.timeout_at(min(self._ends_at, now + self._idle_timeout_s)):
                return await self._answer.content.readany()

    def _rest(self) -> bytes:
        """The text behind the last newline; it counts as a line."""
        if not self._buffer:
            raise StopAsyncIteration
        line = bytes(self._buffer)
        self._buffer.clear()
        return line


def _written(url: str, body: BaseModel) -> bytes:
    """The body as JSON. Raises ServiceRefused for one that is none, which would be refused wherever it is sent."""
    try:
        return body.model_dump_json().encode()
    except ValueError as error:  # half a surrogate pair, among values of any kind
        message = f"a {type(body).__name__} cannot be sent as JSON: {error}; expected text of whole characters"
        raise ServiceRefused(url, status=400, kind="not_json", message=message) from error


def _parsed(url: str, status: int, raw: bytes, model: type[R]) -> R:
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        text = f"expected a {model.__name__}, got {raw[:200]!r}: {where}: {first['msg']}"
        raise ServiceFailed(url, status=status, kind="bad_answer", message=text) from error


def _error_of(
    url: str, status: int, raw: bytes, headers: Mapping[str, str] | None = None
) -> ServiceRefused | ServiceFailed:
    """The error for an answer of status 4xx or 5xx, in the counterpart's words if it has the agreed form."""
    try:
        problem = ErrorBody.model_validate_json(raw).error
        kind, message = problem.kind, problem.message
    except ValidationError:
        kind, message = "unknown", raw[:200].decode(errors="replace")
    if status >= 500:
        return ServiceFailed(url, status=status, kind=kind, message=message)
    retry_after_s = _seconds((headers or {}).get("Retry-After"))
    return ServiceRefused(url, status=status, kind=kind, message=message, retry_after_s=retry_after_s)


def _seconds(retry_after: str | None) -> float | None:
    """The header's number of seconds; None if it is missing, or says it in another way, such as a date."""
    try:
        seconds = float(retry_after or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < _MAX_REST_S else None
