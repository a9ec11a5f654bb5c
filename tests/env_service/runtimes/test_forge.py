"""The process that forks keepers."""

import errno
import json
import os
import socket

import pytest

from env_service.runtimes.forge import forked


def test_a_keeper_that_cannot_be_forked_is_told_and_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left() -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", none_left)  # a real limit would be that of all tests
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, its:
        assert not forked([its.fileno()])
        assert json.loads(ours.recv(1000)) == {"failed": "no process can be made: Resource temporarily unavailable"}
