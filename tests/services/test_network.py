"""Addresses that count as reachable by other machines."""

import socket
import threading
import time
from pathlib import Path

import pytest

from services.network import (
    LOOPBACK,
    address_to,
    address_towards,
    check_key_settings,
    is_loopback,
    is_own_address,
    is_wildcard,
    wait_for_listener,
)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1", "[::1]"])
def test_only_this_machine_reaches_a_loopback_address(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "learner", "*", ""])
def test_anything_else_counts_as_reachable(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "tcp://localhost:*", "tcp://[::1]:1", "ipc:///tmp/x"])
def test_an_address_of_this_machine_needs_no_keys(address: str) -> None:
    check_key_settings(address, {"a": None, "b": None}, insecure=False)


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:1", "tcp://*:1", "tcp://learner:1", "tcp://[::]:1", "tcp://10.0.0.1:1"]
)
def test_an_address_of_other_machines_needs_keys_or_a_word(address: str) -> None:
    with pytest.raises(ValueError, match=r"make keys with `headway keys FOLDER`.*; or, .* set insecure = true"):
        check_key_settings(address, {"a": None, "b": None}, insecure=False)
    check_key_settings(address, {"a": None, "b": None}, insecure=True)
    check_key_settings(address, {"a": Path("a"), "b": Path("b")}, insecure=False)


def test_half_of_the_keys_and_keys_that_are_contradicted_are_refused() -> None:
    with pytest.raises(ValueError, match="a is set and b is not: set both, or neither"):
        check_key_settings("tcp://127.0.0.1:1", {"a": Path("a"), "b": None}, insecure=False)
    with pytest.raises(ValueError, match="insecure = true contradicts a, b"):
        check_key_settings("tcp://127.0.0.1:1", {"a": Path("a"), "b": Path("b")}, insecure=True)


@pytest.mark.parametrize("address", ["", "learner:7301", "http://learner:7301", "tcp://7301", "ipc://"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="is no address"):
        check_key_settings(address, {}, insecure=True)


def test_a_wildcard_stands_for_every_address_and_is_none_to_come_to() -> None:
    assert all(map(is_wildcard, ("0.0.0.0", "::", "[::]")))
    assert not any(map(is_wildcard, ("127.0.0.1", "learner")))
    assert not any(map(is_own_address, ("0.0.0.0", "learner")))


def test_all_of_loopback_is_this_machine_and_is_reached_there() -> None:
    assert is_own_address("127.0.0.1")
    assert address_to("http://127.0.0.1:7300") == LOOPBACK
    assert address_towards([]) == address_towards(["127.0.0.1", "localhost"]) == LOOPBACK


def test_whoever_is_elsewhere_decides_by_which_address_all_come(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = {"127.0.0.1": "127.0.0.1", "10.0.0.1": "10.0.0.1", "10.0.0.7": "10.0.0.1", "192.168.0.2": "192.168.0.2"}
    monkeypatch.setattr("services.network.local_address", lambda *, host, port: routes[host])

    assert address_towards(["127.0.0.1", "10.0.0.7"]) == "10.0.0.1"
    assert address_towards(["192.168.0.2", "10.0.0.7"]) == "10.0.0.1"
    assert address_towards(["127.0.0.1", "192.168.0.2"]) == "192.168.0.2"


def test_no_way_to_a_learner_gives_no_address() -> None:
    assert address_to("http://no-such-host.invalid:7300") is None


def test_a_listener_that_comes_late_is_waited_for() -> None:
    with socket.socket() as late:
        late.bind((LOOPBACK, 0))
        port = late.getsockname()[1]
        with pytest.raises(TimeoutError, match=rf"nothing accepted a connection at {LOOPBACK}:{port} within 0.2 s: "):
            wait_for_listener(host=LOOPBACK, port=port, timeout_s=0.2)
        listening = threading.Timer(0.3, late.listen)
        listening.start()
        started = time.monotonic()
        wait_for_listener(host=LOOPBACK, port=port, timeout_s=60)
        assert time.monotonic() - started < 30
        listening.join()
