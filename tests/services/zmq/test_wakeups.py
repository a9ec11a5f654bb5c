"""A message wakes the one who waits for it, whatever else looks at the socket at that moment."""

import asyncio
import time

import zmq

from protocol.codec import encode
from protocol.messages import Goodbye, Message
from services.zmq.sockets import RouterSocket

FIRST, SECOND = Goodbye(reason="first"), Goodbye(reason="second")
ARRIVES_S = 0.3
TIMEOUT_S = 5.0


def send_while_nothing_else_runs(dealer: "zmq.Socket[bytes]", message: Message) -> None:
    """The message is in the router's queue when this returns, and its event loop has not seen it."""
    dealer.send_multipart(encode(message))
    time.sleep(ARRIVES_S)


async def test_a_message_that_comes_just_before_the_watch_looks_is_received() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.IDENTITY, b"env-1")
    async with RouterSocket.bind("tcp://127.0.0.1:*") as router, asyncio.timeout(4 * TIMEOUT_S):
        try:
            dealer.connect(router.address)
            dealer.send_multipart(encode(FIRST))
            assert await router.receive() == ("env-1", FIRST)
            receiving = asyncio.create_task(router.receive())
            await asyncio.sleep(ARRIVES_S)  # it has found nothing, and waits

            send_while_nothing_else_runs(dealer, SECOND)
            router._inflow._look()

            async with asyncio.timeout(TIMEOUT_S):
                assert await receiving == ("env-1", SECOND)
        finally:
            dealer.close()
    context.term()
