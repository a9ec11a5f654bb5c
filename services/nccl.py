"""The environment that NCCL, and torch around it, read: timeouts and aborts of broadcasts are ours."""

import fcntl
import os
import socket
import struct
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Protocol

_INTERFACE = "NCCL_SOCKET_IFNAME"
_NONBLOCKING = "TORCH_NCCL_USE_COMM_NONBLOCKING"
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_one_at_a_time = threading.Lock()


@contextmanager
def environment_of_nccl(*, timeout_s: float, environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """For the making of a communicator of weight broadcasts; another one of this process keeps its own settings.

    Without it torch's watchdog ends the process when a member dies in a broadcast: the learner, and every generator
    that is left. And a connection would wait half an hour for a member that does not come. torch reads that limit once
    in a process: the first meeting's holds for all later ones. A user's own TORCH_NCCL_USE_COMM_NONBLOCKING is left as
    it is: torch's developers saw random hangs of that mode with NCCL 2.26.
    """
    ours = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        _NONBLOCKING: environ.get(_NONBLOCKING, "1"),
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(max(1, round(timeout_s))),
    }
    with _one_at_a_time:
        before = {name: environ.get(name) for name in ours}
        environ.update(ours)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    environ.pop(name, None)
                else:
                    environ[name] = value


class Collective(Protocol):
    """The used part of torch's handle of a collective."""

    def exception(self) -> object: ...


def failure_of(work: Collective) -> str:
    """Cause of the failure of a collective that calls itself completed, on one line; empty if it has not failed.

    A member's death completes a collective, too: without this its error would pass for an arrival.
    """
    try:
        failure = work.exception()
    except TypeError:  # torch before 2.12 cannot hand it out: then the bytes' hashes alone tell
        return ""
    return "" if failure is None else " ".join(str(failure).split())


def keep_to_interface_of(address: str, *, environ: MutableMapping[str, str] = os.environ) -> None:
    """Has NCCL connect over the interface that has this address, unless the user has named one.

    NCCL reads it once, for the first communicator of a process.
    """
    name = interface_of(address)
    if name is not None:
        environ.setdefault(_INTERFACE, f"={name}")


def interface_of(address: str) -> str | None:
    """The interface with this IPv4 address or host name; None if it is no address of this machine."""
    try:
        wanted = socket.gethostbyname(address)
    except OSError:
        return None
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if _address_of(name) == wanted), None)


def _address_of(interface: str) -> str | None:
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        try:
            answer = fcntl.ioctl(asker.fileno(), _SIOCGIFADDR, request)
        except OSError:  # it has no IPv4 address
            return None
    return socket.inet_ntoa(answer[20:24])
