"""Processes of this machine, and which of them listens at a port."""

import os
import socket
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from services.network import is_loopback

_PROC = Path("/proc")
_LISTENS = "0A"
_STOPPED = ("T", "t")
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class LocalProcess:
    """A process by its number and command line; `is_stopped` if a signal, SIGSTOP say, has stopped it."""

    pid: int
    command: str
    is_stopped: bool

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command})"


def listener_of(port: int) -> LocalProcess | None:
    """Process that listens on a TCP port of this machine; None if none does, or it belongs to somebody else."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for folder in Path("/proc").glob("[0-9]*") if sockets else ():
        with suppress(OSError):  # it has ended meanwhile, or is another user's
            if _holds(folder, sockets):
                return _described(folder)
    return None


def _holds(folder: Path, sockets: Container[str]) -> bool:
    for link in (folder / "fd").iterdir():
        with suppress(OSError):  # it was closed meanwhile, as the one by which they are listed is
            if str(link.readlink()) in sockets:
                return True
    return False


def command_of(pid: int) -> str | None:
    """The command line of a process of this machine, shortened; None if there is none that we may look at."""
    try:
        return _described(Path("/proc") / str(pid)).command
    except OSError:
        return None


def process_behind(url: str) -> LocalProcess | None:
    """Process that listens at an address, if that is on this machine."""
    parts = urlsplit(url)
    if parts.hostname is None or parts.port is None or not is_here(parts.hostname):
        return None
    return listener_of(parts.port)


def usage_of(pid: int, *, proc: Path = _PROC) -> tuple[float, int]:
    """CPU seconds so far, and bytes of resident memory, of a process of this machine and its descendants; `proc` is
    proc(5). Pages that several of them share, as forks do, count for each.
    """
    cpu_s, memory = 0.0, 0
    for one in family_of(pid, proc=proc):
        with suppress(OSError):  # it has ended meanwhile
            fields = _statistics(proc / str(one))
            cpu_s += (int(fields[11]) + int(fields[12])) / _TICKS
            memory += int(fields[21]) * _PAGE_BYTES
    return cpu_s, memory


def proportional_memory_of(pid: int, *, proc: Path = _PROC) -> int:
    """Bytes of memory of a process and its descendants, in which shared pages count once: of each page that n processes
    have, one of them has an n-th. Of those that do not say so, all of their resident memory.

    The kernel walks all pages for that: some 25 ms of a core for each GiB of small ones.
    """
    memory = 0
    for one in family_of(pid, proc=proc):
        with suppress(OSError):  # it has ended meanwhile
            memory += _proportional_bytes(proc / str(one)) or int(_statistics(proc / str(one))[21]) * _PAGE_BYTES
    return memory


def machine_cpu_s(*, proc: Path = _PROC) -> float | None:
    """CPU seconds so far of all processes of this machine, and those that its host took; None if nobody tells."""
    try:
        line = (proc / "stat").read_text(encoding="ascii").partition("\n")[0]
        user, nice, system, _, _, *taken = map(int, line.split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + sum(taken)) / _TICKS


def family_of(pid: int, *, proc: Path = _PROC) -> list[int]:
    """A process of this machine and its descendants, by their numbers; `proc`: as in proc(5).

    Others are looked at only where the kernel has no lists of children (CONFIG_PROC_CHILDREN).
    """
    children_of = _listed_children if (proc / "self/task" / str(os.getpid()) / "children").exists() else _parents(proc)
    found = [pid]
    for one in found:  # it grows while it is walked
        with suppress(OSError):  # it has ended meanwhile
            found.extend(children_of(proc / str(one)))
    return found


def each_process(file: str, *, proc: Path = _PROC) -> Iterator[tuple[int, bytes]]:
    """Each process of this machine, by its number, with a file of its folder in proc(5); without those that end
    meanwhile, and those whose file may not be read.
    """
    for folder in proc.glob("[0-9]*"):  # with the file's name it would look whether that is there, and raise
        try:
            told = (folder / file).read_bytes()
        except OSError:
            continue
        yield int(folder.name), told


def fields_of(stat: bytes) -> list[bytes]:
    """The fields of a process's stat after its name, which may have spaces and brackets: state, parent, group, ..."""
    return stat.rpartition(b")")[2].split()


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


def _listed_children(folder: Path) -> list[int]:
    """The children of a process, which the kernel lists by the thread that began them."""
    children = list[int]()
    for thread in (folder / "task").iterdir():
        with suppress(OSError):  # the thread has ended meanwhile
            children += map(int, (thread / "children").read_bytes().split())
    return children


def _parents(proc: Path) -> Callable[[Path], list[int]]:
    """The children of a process, as all processes of the machine name their parents."""
    children = dict[int, list[int]]()
    for pid, stat in each_process("stat", proc=proc):
        children.setdefault(int(fields_of(stat)[1]), []).append(pid)
    return lambda folder: children.get(int(folder.name), [])


def _proportional_bytes(folder: Path) -> int | None:
    """The Pss of a process; None if the kernel does not tell, or not us."""
    with suppress(OSError):
        for line in (folder / "smaps_rollup").read_bytes().splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) << 10
    return None


def _statistics(folder: Path) -> list[bytes]:
    return fields_of((folder / "stat").read_bytes())


def _described(folder: Path) -> LocalProcess:
    words = (folder / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    command = " ".join(Path(word).name if word.startswith("/") else word for word in words)
    state = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return LocalProcess(pid=int(folder.name), command=command[:100], is_stopped=state in _STOPPED)
