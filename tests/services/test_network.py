"""Which addresses count as reachable by other machines."""

import pytest

from services.network import is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1", "[::1]"])
def test_only_this_machine_reaches_a_loopback_address(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "learner", "*", ""])
def test_anything_else_counts_as_reachable(host: str) -> None:
    assert not is_loopback(host)
