"""Messages between a service and its keepers."""

import socket

from services.isolation.keeping import received


def test_the_last_words_of_one_that_left_something_unread_are_heard() -> None:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with its:
            ours.send(b"unread")
            its.send(b"why it ended")
        assert received(ours, most_bytes=100, most_handles=1) == (b"why it ended", [])
        assert received(ours, most_bytes=100, most_handles=1) == (b"", [])
