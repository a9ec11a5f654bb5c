"""Addresses: which of them other machines can reach, and what these then need."""

import ipaddress
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

LOOPBACK = "127.0.0.1"
BACKLOG = 4096
"""Connections that may wait to be accepted: a whole fleet comes back in the moment in which its learner does."""

CONNECT_PAUSE_S = 0.05
"""Pause between two attempts to connect."""


def is_loopback(host: str) -> bool:
    """True if only this machine can reach `host`. A name other than localhost counts as reachable by others."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_http_address(url: str) -> bool:
    """True for http://host:port and https://host:port, perhaps with a path, of a host that can be looked up."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and parts.port != 0 and is_host(parts.hostname or "")
    except ValueError:  # brackets that are left open, a port that is no number
        return False


def is_host(name: str) -> bool:
    """True for a name or an address that can be looked up, whether there is such a machine or not."""
    try:
        return bool(name.encode("idna")) and not any(each.isspace() or each in "/?#@" for each in name)
    except UnicodeError:  # a part between two dots is empty, or too long
        return False


def _http_address(url: str) -> str:
    if not is_http_address(url):
        raise ValueError(f"{url!r} is no address: expected http://host:port or https://host:port")
    return url


HttpAddress = Annotated[str, AfterValidator(_http_address)]
"""The type of a setting that is an address of HTTP."""


def leaves_this_machine(address: str) -> bool:
    """True if other machines can be at the other end of a ZeroMQ address. Raises ValueError if it is none."""
    scheme, _, rest = address.partition("://")
    host = rest.rpartition(":")[0]
    if scheme == "ipc" and rest:
        return False
    if scheme != "tcp" or not host:
        raise ValueError(f"{address!r} is no address; expected tcp://<host>:<port> or ipc://<path>")
    return not is_loopback(host)


def refuse_without_keys(address: str, *, insecure: bool) -> None:
    """For an address without keys: raises ValueError if it leaves this machine and `insecure` does not allow it."""
    if leaves_this_machine(address) and not insecure:
        raise ValueError(
            f"{address} is open to other machines and no keys are set: make keys with `headway keys FOLDER`, which "
            "prints the settings for both sides; or use tcp://127.0.0.1:<port>; or, on a network whose every machine "
            "you trust, set insecure = true"
        )


def check_key_settings(address: str, files: Mapping[str, Path | None], *, insecure: bool) -> None:
    """Checks that the files of keys, by the name of their setting, fit together and suffice. Raises ValueError."""
    given = [name for name, path in files.items() if path is not None]
    missing = [name for name, path in files.items() if path is None]
    if given and missing:
        raise ValueError(
            f"{', '.join(given)} is set and {', '.join(missing)} is not: set both, or neither; "
            "`headway keys FOLDER` makes the files and prints the settings"
        )
    if given and insecure:
        raise ValueError(f"insecure = true contradicts {', '.join(given)}: remove the one or the others")
    if not given:
        refuse_without_keys(address, insecure=insecure)


def is_wildcard(host: str) -> bool:
    """True for 0.0.0.0 and ::, which stand for every address of this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def is_own_address(host: str) -> bool:
    """True if `host` is an address of this machine, written as numbers."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
        return not address.is_unspecified and local_address(host=str(address), port=9) == str(address)
    except (ValueError, OSError):
        return False


def address_to(url: str) -> str | None:
    """The address of this machine's interface that reaches the host of `url`; None if there is no way there yet."""
    parts = urlsplit(url)
    try:
        return local_address(host=parts.hostname or LOOPBACK, port=parts.port or 80)
    except OSError:
        return None


def address_towards(hosts: Iterable[str]) -> str:
    """The address of this machine that all of `hosts` can reach: towards the first that is not on this machine.

    127.0.0.1 if all are on this machine. Looks names up, which may block. Raises OSError without a route.
    """
    own = LOOPBACK
    for host in hosts:
        address = local_address(host=host, port=9)
        if not is_loopback(address):
            if not is_own_address(host):
                return address
            own = address
    return own


def wait_for_listener(*, host: str, port: int, timeout_s: float) -> None:
    """Blocks until something accepts connections at `host`:`port`. Raises TimeoutError with the last attempt's reason.

    For clients that keep no deadline of their own, such as torch's TCPStore, which may take 2.3 times its timeout.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = max(deadline - time.monotonic(), CONNECT_PAUSE_S)
        try:
            socket.create_connection((host, port), timeout=left_s).close()
            return
        except OSError as error:
            if time.monotonic() + CONNECT_PAUSE_S > deadline:
                message = f"nothing accepted a connection at {host}:{port} within {timeout_s:g} s: {error}"
                raise TimeoutError(message) from error
        time.sleep(CONNECT_PAUSE_S)


def local_address(*, host: str, port: int) -> str:
    """The address of this machine's interface that reaches `host`. Sends nothing. Raises OSError without a route."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
