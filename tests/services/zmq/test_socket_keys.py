"""Keys on real sockets: who gets through, who does not, and what each side says about it."""

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from protocol.codec import ProtocolError
from protocol.messages import Goodbye
from services.secret_files import write_public
from services.zmq.keys import AuthorizedKeys, ClientKeys, CurveKeys, ServerKeys
from services.zmq.sockets import DealerSocket, RouterSocket

HELLO = Goodbye(reason="hello")


@dataclass
class Garbage:
    """Reports that a router makes of strangers."""

    reports: list[tuple[str, ProtocolError]]

    def __call__(self, peer: str, error: ProtocolError) -> None:
        self.reports.append((peer, error))


@pytest.fixture
def authorized(tmp_path: Path) -> Path:
    folder = tmp_path / "authorized"
    folder.mkdir()
    return folder


def server_keys(authorized: Path) -> ServerKeys:
    return ServerKeys(own=CurveKeys.new(), authorized=AuthorizedKeys(authorized))


def client_keys(server: ServerKeys, authorized: Path | None, *, name: str = "env") -> ClientKeys:
    own = CurveKeys.new()
    if authorized is not None:
        write_public(authorized / f"{name}.pub", own.public)
    return ClientKeys(own=own, server=server.own.public)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what it waits for happens inside of ZeroMQ
            await asyncio.sleep(0.01)


async def talk(router: RouterSocket, dealer: DealerSocket) -> None:
    """Send until something arrives, as an env_service does: what is sent on a connection that breaks is lost."""
    receiving = asyncio.create_task(router.receive())
    async with asyncio.timeout(60):
        while not receiving.done():
            await dealer.send(HELLO, deadline_s=30)
            await asyncio.wait([receiving], timeout=0.5)
        peer, message = receiving.result()
        assert message == HELLO
        await router.send(peer, HELLO)
        assert await dealer.receive() == HELLO


async def hears_nothing(router: RouterSocket) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(router.receive(), 0.2)


async def test_an_authorized_client_gets_through(authorized: Path) -> None:
    keys = server_keys(authorized)
    async with RouterSocket.bind("tcp://127.0.0.1:*", keys=keys) as router:
        for name in ("env-0", "env-1"):
            client = client_keys(keys, authorized, name=name)
            async with DealerSocket.connect(router.address, identity=name, keys=client) as dealer:
                await talk(router, dealer)
                assert dealer.trouble is None
        assert router.garbage_count == 0


async def test_a_key_that_is_not_authorized_is_refused_counted_and_named_on_both_sides(
    authorized: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys, garbage = server_keys(authorized), Garbage([])
    client = client_keys(keys, None)
    with caplog.at_level(logging.WARNING):
        async with (
            RouterSocket.bind("tcp://127.0.0.1:*", keys=keys, on_garbage=garbage) as router,
            DealerSocket.connect(router.address, identity="env", keys=client) as dealer,
        ):
            await dealer.send(HELLO)
            await until(lambda: dealer.trouble is not None and router.garbage_count > 0)
            await hears_nothing(router)
    start = client.own.public[:8]
    assert garbage.reports[0][0] == "127.0.0.1"
    assert garbage.reports[0][1].reason == "connection"
    assert f"its key {start}... is not among the authorized keys" in caplog.text
    assert f"the learner at {router.address} refuses this process's key {start}..." in caplog.text
    assert "add that public key to the learner's leases.authorized_keys" in caplog.text
    assert client.own.public not in caplog.text


async def test_a_client_gets_through_once_its_key_is_added_and_not_after_it_is_removed(authorized: Path) -> None:
    keys = server_keys(authorized)
    client = client_keys(keys, None)
    async with RouterSocket.bind("tcp://127.0.0.1:*", keys=keys) as router:
        async with DealerSocket.connect(router.address, identity="env", keys=client) as dealer:
            await until(lambda: dealer.trouble is not None)
            write_public(authorized / "late.pub", client.own.public)
            await talk(router, dealer)
            assert dealer.trouble is None
        (authorized / "late.pub").unlink()
        async with DealerSocket.connect(router.address, identity="env", keys=client) as dealer:
            await until(lambda: dealer.trouble is not None)
            await hears_nothing(router)


async def test_a_damaged_list_of_keys_leaves_the_last_one_in_force(
    authorized: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = server_keys(authorized)
    client = client_keys(keys, authorized)
    async with RouterSocket.bind("tcp://127.0.0.1:*", keys=keys) as router:
        async with DealerSocket.connect(router.address, identity="env", keys=client) as dealer:
            await talk(router, dealer)
        (authorized / "torn.pub").write_text("half a key")
        async with DealerSocket.connect(router.address, identity="env", keys=client) as dealer:
            await talk(router, dealer)
    assert "those read before stay in force" in caplog.text


async def test_a_client_with_another_learners_key_does_not_get_through_and_says_so(
    authorized: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = server_keys(authorized)
    mistaken = ClientKeys(own=client_keys(keys, authorized).own, server=CurveKeys.new().public)
    async with (
        RouterSocket.bind("tcp://127.0.0.1:*", keys=keys) as router,
        DealerSocket.connect(router.address, identity="env", keys=mistaken) as dealer,
    ):
        await dealer.send(HELLO)
        await until(lambda: dealer.trouble is not None and router.garbage_count > 0)
        await hears_nothing(router)
    assert f"{mistaken.server[:8]}..., which learner_key_file holds, is not its public key" in caplog.text
    assert "it has another public key for this process" in caplog.text


async def test_a_client_without_keys_does_not_get_through_and_says_so(
    authorized: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        RouterSocket.bind("tcp://127.0.0.1:*", keys=server_keys(authorized)) as router,
        DealerSocket.connect(router.address, identity="env") as dealer,
    ):
        await dealer.send(HELLO)
        await until(lambda: dealer.trouble is not None and router.garbage_count > 0)
        await hears_nothing(router)
    assert "it speaks CURVE, it seems, and this process has no keys; make them with `headway keys`" in caplog.text
    assert "one side speaks CURVE and the other has no keys" in caplog.text


async def test_a_client_with_keys_does_not_trust_a_learner_without(
    authorized: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = client_keys(server_keys(authorized), authorized)
    async with (
        RouterSocket.bind("tcp://127.0.0.1:*") as router,
        DealerSocket.connect(router.address, identity="env", keys=client) as dealer,
    ):
        await dealer.send(HELLO)
        await until(lambda: dealer.trouble is not None)
        await hears_nothing(router)
    assert "speaks without keys" in caplog.text or "it has no keys" in caplog.text


async def test_a_stranger_does_not_disturb_those_who_talk(authorized: Path) -> None:
    keys = server_keys(authorized)
    async with (
        RouterSocket.bind("tcp://127.0.0.1:*", keys=keys) as router,
        DealerSocket.connect(router.address, identity="env", keys=client_keys(keys, authorized)) as dealer,
    ):
        await talk(router, dealer)
        async with DealerSocket.connect(router.address, identity="env", keys=client_keys(keys, None)) as stranger:
            await until(lambda: stranger.trouble is not None)
            await talk(router, dealer)


async def test_a_client_comes_back_when_the_learner_returns_with_the_right_keys(authorized: Path) -> None:
    """A client without keys meets a learner with keys, then one without: ZeroMQ alone would never have come back."""
    async with RouterSocket.bind("tcp://127.0.0.1:*", keys=server_keys(authorized)) as guarded:
        dealer = DealerSocket.connect(guarded.address, identity="env")
        await until(lambda: dealer.trouble is not None)
    async with dealer, RouterSocket.bind(guarded.address) as router:
        await talk(router, dealer)


async def test_rotated_keys_of_the_learner_shut_out_who_has_the_old_one(authorized: Path) -> None:
    old, new = server_keys(authorized), server_keys(authorized)
    client = client_keys(old, authorized)
    async with RouterSocket.bind("tcp://127.0.0.1:*", keys=old) as router:
        dealer = DealerSocket.connect(router.address, identity="env", keys=client)
        await talk(router, dealer)
    async with dealer, RouterSocket.bind(router.address, keys=new) as router:
        await until(lambda: dealer.trouble is not None)
        updated = ClientKeys(own=client.own, server=new.own.public)
        async with DealerSocket.connect(router.address, identity="env", keys=updated) as renewed:
            await talk(router, renewed)


def outside_address() -> str:
    """This machine's own address on a network, 127.0.0.1 if it has none. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


async def test_with_keys_other_machines_can_connect(authorized: Path) -> None:
    keys = server_keys(authorized)
    async with RouterSocket.bind("tcp://0.0.0.0:*", keys=keys) as router:
        address = f"tcp://{outside_address()}:{router.address.rpartition(':')[2]}"
        async with DealerSocket.connect(address, identity="env", keys=client_keys(keys, authorized)) as dealer:
            await talk(router, dealer)


async def test_insecure_lets_other_machines_in_without_keys_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    async with RouterSocket.bind("tcp://0.0.0.0:*", insecure=True) as router:
        address = f"tcp://{outside_address()}:{router.address.rpartition(':')[2]}"
        async with DealerSocket.connect(address, identity="env", insecure=True) as dealer:
            await talk(router, dealer)
    assert caplog.text.count("anybody who reaches it can take part") in (1, 2)
