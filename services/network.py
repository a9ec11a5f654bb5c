"""Addresses: which of them other machines can reach, what these then need, and who listens on those of this one; and
the environment that NCCL, and torch around it, read, so that time-outs and aborts of broadcasts are ours.
"""

import fcntl
import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

LOOPBACK = "127.0.0.1"
BACKLOG = 4096
"""Connections that may wait to be accepted: a whole fleet comes back in the moment in which its learner does."""


def is_loopback(host: str) -> bool:
    """True if only this machine can reach `host`. A name other than localhost counts as reachable by others."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


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


def local_address(*, host: str, port: int) -> str:
    """The address of this machine's interface that reaches `host`. Sends nothing. Raises OSError without a route."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


_LISTENS = "0A"
_STOPPED = ("T", "t")


@dataclass(frozen=True)
class LocalProcess:
    """A process by its number and command line; `is_stopped` if a signal, SIGSTOP say, has stopped it."""

    pid: int
    command: str
    is_stopped: bool

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command})"


def listener_of(port: int) -> LocalProcess | None:
    """Who listens on a TCP port of this machine; None if nobody does, or it belongs to somebody else."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for folder in Path("/proc").glob("[0-9]*") if sockets else ():
        try:
            if any(str(link.readlink()) in sockets for link in (folder / "fd").iterdir()):
                return _described(folder)
        except OSError:  # it has ended meanwhile, or is another user's
            continue
    return None


def command_of(pid: int) -> str | None:
    """The command line of a process of this machine, shortened; None if there is none that we may look at."""
    try:
        return _described(Path("/proc") / str(pid)).command
    except OSError:
        return None


def process_behind(url: str) -> LocalProcess | None:
    """Who listens at an address, if that is on this machine."""
    parts = urlsplit(url)
    if parts.hostname is None or parts.port is None or not is_here(parts.hostname):
        return None
    return listener_of(parts.port)


def is_here(host: str) -> bool:
    """True if an address is this machine's for sure."""
    return is_loopback(host) or host in ("0.0.0.0", "::", socket.gethostname())


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        try:
            lines = (Path("/proc/net") / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def _described(folder: Path) -> LocalProcess:
    words = (folder / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    command = " ".join(Path(word).name if word.startswith("/") else word for word in words)
    state = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return LocalProcess(pid=int(folder.name), command=command[:100], is_stopped=state in _STOPPED)


_INTERFACE = "NCCL_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_one_at_a_time = threading.Lock()


@contextmanager
def environment_of_nccl(*, timeout_s: float, environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """For the making of a communicator of weight broadcasts; another one of this process keeps its own settings.

    Without it torch's watchdog ends the process when a member dies in a broadcast: the learner, and every generator
    that is left. And a connection would wait half an hour for a member that does not come.
    """
    ours = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
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
