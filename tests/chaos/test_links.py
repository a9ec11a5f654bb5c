"""Links, watches and the tap do to bytes and messages what they are told, and nothing else."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import zmq

from protocol.codec import encode
from protocol.messages import Heartbeat, OutcomeReceipt
from tests.chaos.control_watch import ControlWatch
from tests.chaos.journal_reader import Place
from tests.chaos.lease_tap import Acknowledgement, Disturbance, LeaseTap
from tests.chaos.network import ChaosLink, LinkNetwork
from tests.e2e.processes import until


@pytest.fixture
def network() -> Iterator[LinkNetwork]:
    with LinkNetwork() as network:
        yield network


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that sends back what it gets."""
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_serve_echo, args=[server], daemon=True).start()
    yield int(server.getsockname()[1])
    server.shutdown(socket.SHUT_RDWR)
    server.close()


def _serve_echo(server: socket.socket) -> None:
    def answer(connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)
            except OSError:
                return

    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        threading.Thread(target=answer, args=[connection], daemon=True).start()


def client(link: ChaosLink) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", link.port), timeout=5)
    connection.settimeout(5)
    return connection


def asked(connection: socket.socket, data: bytes = b"hello") -> bytes:
    connection.sendall(data)
    return connection.recv(100)


def is_broken(connection: socket.socket) -> bool:
    try:
        return asked(connection) == b""
    except OSError:
        return True


def test_a_link_without_trouble_passes_bytes_both_ways(network: LinkNetwork, echo: int) -> None:
    with closing(client(network.link(echo))) as connection:
        assert asked(connection) == b"hello"


def test_a_stalled_link_stays_open_and_passes_nothing_until_it_is_healed(network: LinkNetwork, echo: int) -> None:
    link = network.link(echo)
    with closing(client(link)) as connection:
        link.trouble().stalled = True
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            asked(connection)
        link.heal()
        connection.settimeout(5)
        assert connection.recv(100) == b"hello"


def test_a_cut_link_breaks_what_is_open_and_refuses_until_it_is_healed(network: LinkNetwork, echo: int) -> None:
    link = network.link(echo)
    with closing(client(link)) as connection:
        assert asked(connection) == b"hello"
        link.cut(refuse=True)
        assert is_broken(connection)
    with closing(client(link)) as connection:
        assert is_broken(connection)
    link.heal()
    with closing(client(link)) as connection:
        assert asked(connection) == b"hello"


def test_a_chunk_is_lost_or_changed_as_often_as_told(network: LinkNetwork, echo: int) -> None:
    link = network.link(echo)
    with closing(client(link)) as connection:
        link.trouble().flip_bytes = 1
        changed = asked(connection)
        assert len(changed) == 5
        assert sum(one != other for one, other in zip(changed, b"hello", strict=True)) == 1
        link.trouble().drop_chunks = 1
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            asked(connection)
        connection.settimeout(5)
        assert asked(connection) == b"hello"


def test_a_delay_is_kept_both_ways(network: LinkNetwork, echo: int) -> None:
    link = network.link(echo)
    link.trouble().delay_s = 0.1
    with closing(client(link)) as connection:
        began = time.monotonic()
        assert asked(connection) == b"hello"
        assert time.monotonic() - began >= 0.2


def request(path: str) -> bytes:
    return f"POST {path} HTTP/1.1\r\nContent-Length: 0\r\n\r\n".encode()


def test_a_trap_springs_at_the_chosen_request_before_it_is_passed_on(network: LinkNetwork, echo: int) -> None:
    watch = ControlWatch()
    link = network.link(echo, watcher=watch)
    sprung: list[str] = []
    trap = watch.trap("prepare", "on", lambda: sprung.append(watch.seen[-1]), skip=1)
    with closing(client(link)) as connection:
        for path in ("group", "prepare", "commit"):
            asked(connection, request(f"/v1/weights/{path}"))
        assert not trap.sprung.is_set()
        asked(connection, request("/v1/weights/prepare"))
    assert trap.sprung.wait(5)
    assert sprung == ["/v1/weights/prepare"]
    assert watch.seen == [f"/v1/weights/{path}" for path in ("group", "prepare", "commit", "prepare")]


def test_a_trap_in_the_middle_springs_only_while_the_request_is_unanswered(network: LinkNetwork, echo: int) -> None:
    watch = ControlWatch()
    link = network.link(echo, watcher=watch)
    trap = watch.trap("prepare", "middle", lambda: None, after_s=0.1)
    with closing(client(link)) as connection:
        asked(connection, request("/v1/weights/prepare"))  # the echo answers at once
    until(lambda: watch.traps, what="the trap to be set again", timeout_s=5)
    assert not trap.sprung.is_set()
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        quiet = network.link(int(silent.getsockname()[1]), watcher=watch)
        with closing(client(quiet)) as connection:
            connection.sendall(request("/v1/weights/prepare"))
            assert trap.sprung.wait(5)


def test_control_and_traffic_of_a_generator_are_troubled_apart(network: LinkNetwork, echo: int) -> None:
    link = network.link(echo, watcher=ControlWatch())
    link.trouble("control").stalled = True
    with closing(client(link)) as connection:
        assert asked(connection, request("/v1/generate")) == request("/v1/generate")
    with closing(client(link)) as connection:
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            asked(connection, request("/v1/weights/commit"))


@pytest.fixture
def tapped() -> "Iterator[tuple[LeaseTap, zmq.Socket[bytes], zmq.Socket[bytes]]]":
    """A tap between a router, as the learner has it, and a dealer called e1."""
    context = zmq.Context()
    learner, env = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    for one in (learner, env):
        one.setsockopt(zmq.RCVTIMEO, 5000)
        one.setsockopt(zmq.LINGER, 0)
    port = learner.bind_to_random_port("tcp://127.0.0.1")
    with LeaseTap(learner_port=lambda: port, journal_end=lambda: Place("journal.log", 7)) as tap:
        env.setsockopt(zmq.IDENTITY, b"e1")
        env.connect(f"tcp://127.0.0.1:{tap.port}")
        yield tap, learner, env
    learner.close()
    env.close()
    context.term()


Tapped = tuple[LeaseTap, "zmq.Socket[bytes]", "zmq.Socket[bytes]"]
HEARTBEAT = [bytes(frame) for frame in encode(Heartbeat(running=()))]
ACKNOWLEDGED = [bytes(frame) for frame in encode(OutcomeReceipt(incarnation=1, lease_id=3, attempt=1, purpose="train"))]


def test_the_tap_passes_messages_under_the_name_of_their_sender_and_writes_acknowledgements_down(
    tapped: Tapped,
) -> None:
    tap, learner, env = tapped
    env.send_multipart(HEARTBEAT)
    assert learner.recv_multipart() == [b"e1", *HEARTBEAT]
    learner.send_multipart([b"e1", *ACKNOWLEDGED])
    assert env.recv_multipart() == ACKNOWLEDGED
    (record,) = tap.records
    assert isinstance(record, Acknowledgement)
    assert (record.key.lease_id, record.key.attempt) == (3, 1)
    assert record.journal_end == Place("journal.log", 7)


def test_the_tap_loses_doubles_and_damages_as_told(tapped: Tapped) -> None:
    tap, learner, env = tapped
    tap.disturb(Disturbance(direction="up", action="drop", kinds={"heartbeat"}, times=1))
    env.send_multipart(HEARTBEAT)
    until(lambda: tap.tally.disturbed == 1, what="the message to be lost", timeout_s=5)
    tap.disturb(Disturbance(direction="up", action="duplicate", kinds={"heartbeat"}, times=1))
    env.send_multipart(HEARTBEAT)
    assert [learner.recv_multipart() for _ in range(2)] == [[b"e1", *HEARTBEAT]] * 2
    tap.disturb(Disturbance(direction="up", action="corrupt", kinds={"heartbeat"}, times=1))
    env.send_multipart(HEARTBEAT)
    damaged = learner.recv_multipart()[1:]
    assert damaged != HEARTBEAT
    assert sum(map(len, damaged)) == sum(map(len, HEARTBEAT))
