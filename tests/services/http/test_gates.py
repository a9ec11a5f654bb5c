"""A door holds the place of a request from its arrival until its body has been read."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pydantic import SecretStr
from starlette.types import Message, Receive, Scope, Send

from services.http.gates import BearerToken, Doors
from services.http.metrics import Metrics
from services.http.refusals import RequestRefused


class RoomForOne:
    """Has room for one request on its way."""

    def __init__(self) -> None:
        self.arriving: list[int] = []

    @contextmanager
    def door(self, body_bytes: int) -> Iterator[None]:
        if self.arriving:
            raise RequestRefused(429, "busy", "full", retry_after_s=2.0)
        self.arriving.append(body_bytes)
        try:
            yield
        finally:
            self.arriving.remove(body_bytes)


class GateClient:
    """Sends its body in two parts and keeps what it is answered."""

    def __init__(self) -> None:
        self._parts: list[Message] = [
            {"type": "http.request", "body": b"1234", "more_body": True},
            {"type": "http.request", "body": b"56", "more_body": False},
        ]
        self.scope: Scope = {"type": "http", "method": "POST", "path": "/score", "headers": [(b"content-length", b"6")]}
        self.answer: list[Message] = []

    async def receive(self) -> Message:
        return self._parts.pop(0)

    async def send(self, message: Message) -> None:
        self.answer.append(message)


@pytest.fixture
def room() -> RoomForOne:
    return RoomForOne()


def behind(room: RoomForOne, app: object) -> Doors:
    refused = Metrics("reward-service").counter("refused_requests", "Refused.", labels=("reason",))
    return Doors(app, doors={"/score": room.door}, refused=refused)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "path", "shown", "opens"),
    [
        ("GET", "/tree/newest", "of the tree", True),
        ("GET", "/tree/newest", "of all", True),
        ("GET", "/tree/newest", "of the tre", False),
        ("POST", "/tree/newest", "of the tree", False),
        ("GET", "/tree", "of the tree", False),
        ("GET", "/tree/../status", "of the tree", False),
        ("GET", "/status", "of the tree", False),
        ("GET", "/status", "of all", True),
    ],
)
async def test_a_readers_token_opens_its_folder_to_get_alone(method: str, path: str, shown: str, opens: bool) -> None:
    reached: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(scope["path"])

    refused = Metrics("learner").counter("refused_requests", "Refused.", labels=("reason",))
    gate = BearerToken(
        app, token=SecretStr("of all"), readers={"/tree/": SecretStr("of the tree")}, open_paths=(), refused=refused
    )
    client = GateClient()
    client.scope.update(method=method, path=path, headers=[(b"authorization", f"Bearer {shown}".encode())])
    await gate(client.scope, client.receive, client.send)
    assert (reached == [path]) is opens
    assert bool(client.answer) is not opens


async def test_the_place_is_held_until_the_body_has_been_read(room: RoomForOne) -> None:
    held: list[list[int]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        held.append(list(room.arriving))
        for _ in range(2):
            await receive()
            held.append(list(room.arriving))

    client = GateClient()
    await behind(room, app)(client.scope, client.receive, client.send)
    assert held == [[6], [6], []]


async def test_the_place_of_one_that_breaks_is_given_back(room: RoomForOne) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise KeyError("inside")

    client = GateClient()
    with pytest.raises(KeyError):
        await behind(room, app)(client.scope, client.receive, client.send)
    assert room.arriving == []


async def test_without_room_it_is_refused_unread_and_the_connection_kept(room: RoomForOne) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("it was let in")

    client = GateClient()
    with room.door(100):
        await behind(room, app)(client.scope, client.receive, client.send)
    start = client.answer[0]
    assert start["status"] == 429
    headers = dict(start["headers"])
    assert headers[b"retry-after"] == b"2"
    assert b"connection" not in headers
