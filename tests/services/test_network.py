"""Which addresses count as reachable by other machines."""

from pathlib import Path

import pytest

from services.network import check_key_settings, is_loopback


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
