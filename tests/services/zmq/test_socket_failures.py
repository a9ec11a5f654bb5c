"""Connections that die without a word, and bytes that change on the way."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.codec import ProtocolError
from protocol.messages import Goodbye, PeerRefusal
from services.secret_files import write_public
from services.zmq import watch
from services.zmq.keys import AuthorizedKeys, ClientKeys, CurveKeys, ServerKeys
from services.zmq.sockets import DealerSocket, PeerGone, RouterSocket, SocketLimits
from tests.services.tcp_proxy import tcp_proxy

QUICK = SocketLimits(heartbeat_every_s=0.2, heartbeat_timeout_s=1.0)
HELLO = Goodbye(reason="hello")
MARK = "a text that is easily found"


async def talk(router: RouterSocket, dealer: DealerSocket, text: str) -> None:
    """Send until it is answered, as an env_service does; what comes late is of former attempts."""
    wanted = Goodbye(reason=text)

    async def answer() -> None:
        while True:
            peer, message = await router.receive()
            with contextlib.suppress(PeerGone):
                await router.send(peer, message)

    async def say() -> None:
        while True:
            await dealer.send(wanted, deadline_s=60)
            await asyncio.sleep(0.3)

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        loops = [tasks.create_task(answer()), tasks.create_task(say())]
        while await dealer.receive() != wanted:
            pass
        for loop in loops:
            loop.cancel()


async def until_gone(router: RouterSocket, peer: str) -> None:
    async def keep_sending() -> None:
        while True:
            await router.send(peer, HELLO, deadline_s=60)
            await asyncio.sleep(0.05)

    async with asyncio.timeout(60):
        with pytest.raises(PeerGone):
            await keep_sending()


def keys_in(folder: Path) -> tuple[ServerKeys, ClientKeys]:
    own, authorized = CurveKeys.new(), folder / "authorized"
    authorized.mkdir()
    write_public(authorized / "env.pub", own.public)
    server = ServerKeys(own=CurveKeys.new(), authorized=AuthorizedKeys(authorized))
    return server, ClientKeys(own=own, server=server.own.public)


@pytest.mark.parametrize("with_keys", [False, True], ids=["plain", "keys"])
async def test_a_connection_that_falls_silent_is_noticed_by_both_sides_and_made_again(
    tmp_path: Path, with_keys: bool
) -> None:
    server, client = keys_in(tmp_path) if with_keys else (None, None)
    async with (
        RouterSocket.bind("tcp://127.0.0.1:*", limits=QUICK, keys=server) as router,
        tcp_proxy(router.address) as proxy,
        DealerSocket.connect(f"tcp://127.0.0.1:{proxy.port}", identity="env", limits=QUICK, keys=client) as dealer,
    ):
        await talk(router, dealer, "before")
        proxy.freeze()
        await until_gone(router, "env")
        async with asyncio.timeout(60):
            await proxy.another.wait()
        proxy.thaw()
        await talk(router, dealer, "after")


def once(change: Callable[[bytes], bytes], *, when: Callable[[bytes], bool]) -> Callable[[bytes], bytes]:
    """`change` for the first piece that `when` picks, and nothing for all others."""
    pending = [change]

    def pass_on(data: bytes) -> bytes:
        return pending.pop()(data) if pending and when(data) else data

    return pass_on


def flip(data: bytes) -> bytes:
    place = data.index(MARK.encode())
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


async def until_marked(router: RouterSocket) -> None:
    while await router.receive() != ("env", Goodbye(reason=MARK)):
        pass


async def test_a_flipped_bit_on_the_way_is_refused_as_such_and_the_message_sent_again_arrives() -> None:
    seen: list[str] = []

    def note(peer: str, error: ProtocolError) -> None:
        seen.append(f"{peer} {error.reason}")

    async with (
        asyncio.timeout(60),
        RouterSocket.bind("tcp://127.0.0.1:*", on_garbage=note) as router,
        tcp_proxy(router.address) as proxy,
        DealerSocket.connect(f"tcp://127.0.0.1:{proxy.port}", identity="env") as dealer,
    ):
        await talk(router, dealer, "before")
        proxy.to_server = once(flip, when=lambda data: MARK.encode() in data)
        arriving = asyncio.create_task(until_marked(router))
        await dealer.send(Goodbye(reason=MARK))
        while not isinstance(answer := await dealer.receive(), PeerRefusal):
            pass  # a late answer from before
        assert answer.reason == "checksum"
        await dealer.send(Goodbye(reason=MARK))
        await arriving
    assert seen == ["env checksum"]


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
@pytest.mark.parametrize("with_keys", [False, True], ids=["plain", "keys"])
async def test_a_stream_that_loses_its_thread_ends_the_connection_and_a_new_one_is_made(
    tmp_path: Path, with_keys: bool, direction: str
) -> None:
    """ZeroMQ's own framing is damaged: to it that is a fault of the protocol, after which it never connects again."""
    server, client = keys_in(tmp_path) if with_keys else (None, None)
    async with (
        RouterSocket.bind("tcp://127.0.0.1:*", limits=QUICK, keys=server) as router,
        tcp_proxy(router.address) as proxy,
        DealerSocket.connect(f"tcp://127.0.0.1:{proxy.port}", identity="env", limits=QUICK, keys=client) as dealer,
    ):
        await talk(router, dealer, "before")
        setattr(proxy, direction, once(lambda data: b"\xff" * len(data), when=lambda data: True))
        await talk(router, dealer, "after")
        assert proxy.connections >= 2


def test_a_connection_that_has_gone_before_zeromq_says_so_has_received_nothing() -> None:
    """Its descriptor is closed, or something else has it by now."""
    reading, writing = os.pipe()
    assert watch._bytes_received(reading) is None
    os.close(reading)
    os.close(writing)
    assert watch._bytes_received(reading) is None
