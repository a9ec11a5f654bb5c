"""Messages over real sockets; garbage, other versions and vanished peers disturb nobody else."""

import asyncio
import resource
import sys
from collections.abc import AsyncIterator, Sequence

import msgpack
import pytest
import zmq
import zmq.asyncio

from protocol.codec import Frame, MessageLimits, ProtocolError, encode
from protocol.messages import Fleet, Goodbye, Message, PeerRefusal, ServingGenerator, Welcome
from services.zmq.sockets import DealerSocket, PeerGone, RouterSocket, SendTimeout, SocketLimits

HELLO = Goodbye(reason="hello")


@pytest.fixture
async def router() -> AsyncIterator[RouterSocket]:
    async with RouterSocket.bind("tcp://127.0.0.1:*") as socket, asyncio.timeout(60):
        yield socket


async def send_raw(address: str, identity: bytes, *messages: list[bytes]) -> list[list[bytes]]:
    """Send frames that no codec made; returns one answer for each."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    answers = []
    for message in messages:
        await socket.send_multipart(message)
        answers.append(await socket.recv_multipart())
    socket.close()
    context.term()
    return answers


async def test_messages_go_both_ways_by_peer_name(router: RouterSocket) -> None:
    async with DealerSocket.connect(router.address, identity="env-1") as dealer:
        await dealer.send(HELLO)
        assert await router.receive() == ("env-1", HELLO)
        await router.send("env-1", Welcome(run="r", incarnation=1, heartbeat_every_s=1.0))
        assert await dealer.receive() == Welcome(run="r", incarnation=1, heartbeat_every_s=1.0)


async def test_only_what_has_arrived_is_received_now_and_garbage_in_between_is_passed_over(
    router: RouterSocket,
) -> None:
    assert await router.receive_now() is None
    async with DealerSocket.connect(router.address, identity="env-1") as dealer:
        await dealer.send(HELLO)
        assert (await router.receive_whole()).message == HELLO
        await dealer._socket.send_multipart([b"garbage"])
        await dealer.send(Goodbye(reason="last"))
        while (received := await router.receive_now()) is None:
            await router._socket.poll(5000)
        assert (received.peer, received.message, router.garbage_count) == ("env-1", Goodbye(reason="last"), 1)
        assert await router.receive_now() is None


async def test_garbage_is_answered_counted_and_disturbs_no_other_peer() -> None:
    seen: list[tuple[str, str]] = []

    def note(peer: str, error: ProtocolError) -> None:
        seen.append((peer, error.reason))

    async with RouterSocket.bind("tcp://127.0.0.1:*", on_garbage=note) as router, asyncio.timeout(60):
        other_version = [msgpack.packb([99, "goodbye", {"reason": "x"}])]
        raw = asyncio.create_task(send_raw(router.address, b"bad", [b"\xc1garbage"], [b""], other_version))
        async with DealerSocket.connect(router.address, identity="good") as dealer:
            receiving = asyncio.create_task(router.receive())
            answers = await raw
            await dealer.send(HELLO)
            assert await receiving == ("good", HELLO)
        assert seen == [("bad", "malformed"), ("bad", "malformed"), ("bad", "protocol_version")]
        assert router.garbage_count == 3
        assert all(msgpack.unpackb(answer[0])[1] == "refused" for answer in answers)


async def test_a_dealer_outlives_garbage_of_the_router() -> None:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    async with DealerSocket.connect(f"tcp://127.0.0.1:{port}", identity="env") as dealer, asyncio.timeout(60):
        await dealer.send(HELLO)
        identity, *frames = await socket.recv_multipart()
        await socket.send_multipart([identity, b"garbage"])
        await socket.send_multipart([identity, *frames])
        assert await dealer.receive() == HELLO
        assert dealer.garbage_count == 1
    socket.close()
    context.term()


async def test_a_message_over_the_limit_is_refused_and_the_socket_goes_on() -> None:
    limits = SocketLimits(message=MessageLimits(header_bytes=500, total_bytes=500))
    async with (
        RouterSocket.bind("tcp://127.0.0.1:*", limits=limits) as router,
        DealerSocket.connect(router.address, identity="loud") as loud,
        DealerSocket.connect(router.address, identity="good") as good,
        asyncio.timeout(60),
    ):
        await loud.send(HELLO)
        await router.receive()
        await loud.send(PeerRefusal(reason="r", message="x" * 4000))
        await good.send(HELLO)
        assert await router.receive() == ("good", HELLO)


async def test_a_send_to_a_peer_that_is_not_there_raises(router: RouterSocket) -> None:
    with pytest.raises(PeerGone, match="nobody"):
        await router.send("nobody", HELLO)


async def test_a_peer_that_left_is_gone_and_one_of_the_same_name_takes_its_place(router: RouterSocket) -> None:
    for number in range(2):
        async with DealerSocket.connect(router.address, identity="env") as dealer:
            await dealer.send(Goodbye(reason=str(number)))
            assert await router.receive() == ("env", Goodbye(reason=str(number)))
            await router.send("env", HELLO)
            assert await dealer.receive() == HELLO


async def test_a_full_queue_times_out_and_does_not_hold_up_other_peers() -> None:
    limits = SocketLimits(queued_messages=1)
    generator = ServingGenerator(generator_id="g", url="u" * 2000, policy_version="1.0")
    big = Fleet(generators=(generator,) * 1000)

    async def flood(router: RouterSocket) -> None:
        while True:
            await router.send("slow", big, deadline_s=0.05)

    async with (
        RouterSocket.bind("tcp://127.0.0.1:*", limits=limits) as router,
        DealerSocket.connect(router.address, identity="slow", limits=limits) as slow,
        DealerSocket.connect(router.address, identity="quick", limits=limits) as quick,
        asyncio.timeout(60),
    ):
        for dealer in (slow, quick):
            await dealer.send(HELLO)
            await router.receive()
        with pytest.raises(SendTimeout, match="slow"):
            await flood(router)
        await router.send("quick", HELLO)
        assert await quick.receive() == HELLO


async def test_a_dealer_without_a_router_queues_and_then_times_out() -> None:
    async with DealerSocket.connect(
        "tcp://127.0.0.1:9", identity="env", limits=SocketLimits(queued_messages=2)
    ) as dealer:
        with pytest.raises(SendTimeout, match=r"tcp://127.0.0.1:9"):
            await asyncio.gather(*(dealer.send(HELLO, deadline_s=0.05) for _ in range(4)))


async def test_a_dealer_that_comes_first_is_heard_when_the_router_comes() -> None:
    async with RouterSocket.bind("tcp://127.0.0.1:*") as first:
        address = first.address
    async with DealerSocket.connect(address, identity="env") as dealer, asyncio.timeout(60):
        await dealer.send(HELLO)
        async with RouterSocket.bind(address) as router:
            assert await router.receive() == ("env", HELLO)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://10.0.0.1:5555"])
async def test_an_address_that_other_machines_reach_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="make keys with `headway keys FOLDER`"):
        RouterSocket.bind(address)
    with pytest.raises(ValueError, match="make keys with `headway keys FOLDER`"):
        DealerSocket.connect(address, identity="env")


async def test_a_taken_address_says_so(router: RouterSocket) -> None:
    with pytest.raises(OSError, match="cannot listen on tcp"):
        RouterSocket.bind(router.address)


@pytest.mark.parametrize("busy", [False, True])
async def test_a_message_of_endless_parts_is_cut_off_before_it_fills_the_memory(busy: bool) -> None:
    limits = SocketLimits(message=MessageLimits(header_bytes=1 << 20, total_bytes=8 << 20))
    seen: list[str] = []
    flood = asyncio.create_subprocess_exec(
        sys.executable, "-c", FLOOD, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    async with (
        RouterSocket.bind(
            "tcp://127.0.0.1:*", limits=limits, on_garbage=lambda _, error: seen.append(str(error))
        ) as router,
        DealerSocket.connect(router.address, identity="good") as dealer,
        asyncio.timeout(60),
    ):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        process = await flood
        assert process.stdin is not None
        process.stdin.write(f"{router.address}\n".encode())
        try:
            while not seen:
                if busy:
                    await dealer.send(HELLO)
                    assert await router.receive() == ("good", HELLO)
                else:
                    await asyncio.sleep(0.01)
        finally:
            process.kill()
            await process.wait()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert "of a message that has not ended, and is cut off" in seen[0]
        assert grown < 400 << 10, f"{grown >> 10} MiB of a limit of 9 MiB"
        await dealer.send(HELLO)
        assert await router.receive() == ("good", HELLO)


FLOOD = """
import sys, zmq
context = zmq.Context()
socket = context.socket(zmq.DEALER)
socket.setsockopt(zmq.SNDHWM, 2)
socket.connect(sys.stdin.readline().strip())
part = bytes(1 << 20)
for _ in range(3000):
    socket.send(part, zmq.SNDMORE, copy=False)
socket.send(b"the end")
sys.stdin.read()
"""


async def test_what_all_are_told_is_encoded_once_and_reaches_those_after_a_peer_that_is_gone(
    router: RouterSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = []

    def counted(message: Message) -> list[Frame]:
        encoded.append(message)
        return encode(message)

    async with (
        DealerSocket.connect(router.address, identity="first") as first,
        DealerSocket.connect(router.address, identity="last") as last,
    ):
        for dealer in (first, last):
            await dealer.send(HELLO)
            await router.receive()
        monkeypatch.setattr("services.zmq.sockets.encode", counted)
        await router.send_to_all(["first", "gone", "last"], HELLO)
        assert (await first.receive(), await last.receive()) == (HELLO, HELLO)
        assert encoded == [HELLO]


async def test_peers_that_take_nothing_keep_what_all_are_told_from_nobody_and_are_waited_for_together(
    router: RouterSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    async def try_send(peer: str, frames: Sequence[Frame]) -> bool:
        tried.append(peer)
        return peer == "well" or tried.count(peer) == 3

    monkeypatch.setattr(router, "_try_send", try_send)
    assert await router.send_to_all(["a", "b", "well"], HELLO, deadline_s=10.0) == []
    assert tried == ["a", "b", "well", "a", "b", "a", "b"]
    tried.clear()
    assert await router.send_to_all(["a", "b", "well"], HELLO, deadline_s=0.0) == ["a", "b"]
    assert tried == ["a", "b", "well"]
