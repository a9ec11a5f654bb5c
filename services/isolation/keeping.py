"""Work of a keeper: a process beside a service that launches what stands behind walls, and ends all of it.

Keepers are started by `python -I -S -c` with START, and import only what comes with Python and this: they start fast,
and the user that they drop to needs to read nothing.
"""

import array
import contextlib
import ctypes
import fcntl
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Sequence

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWNS = 0x20000
_MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18

# Descriptors are placed at low numbers in what is launched, so their sources must be high.
_HIGH = 64


def start_of(module: str) -> list[str]:
    """Options of Python that run `main` of a module of ours, whose own arguments follow."""
    start = f"import sys; sys.path.append(sys.argv.pop(1)); from {module} import main; main()"
    return ["-I", "-S", "-c", start, _ROOT]


def close_all_but(*kept: int) -> None:
    """Close whatever the service has left open for its children: it is none of a sandbox's business."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(int(name))


def mount(libc: ctypes.CDLL, mounts: list[tuple[str, str]]) -> None:
    """Bind folders in a mount namespace of its own, which ends with it."""
    if not mounts:
        return
    checked(libc.unshare(CLONE_NEWNS), "a mount namespace")
    checked(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "a private mount namespace")
    for source, place in mounts:
        checked(libc.mount(source.encode(), place.encode(), None, _MS_BIND | _MS_REC, None), f"to bind {source}")


def become(libc: ctypes.CDLL, uid: int | None) -> None:
    """Drop to that user, die with the service, and inherit what daemonizes."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    # After the change of user, which clears it.
    checked(libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0), "to die with the service")
    checked(libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "to take over orphans")


def checked(result: int, wanted: str) -> None:
    """Raises OSError for a call of the C library that failed."""
    if result != 0:
        raise OSError(ctypes.get_errno(), f"the keeper wanted {wanted}: {os.strerror(ctypes.get_errno())}")


def family(pid: int) -> list[int]:
    """A process and its descendants; orphans are children of the first process of their namespace."""
    found = [pid]
    for member in found:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{member}/task"):
                with open(f"/proc/{member}/task/{task}/children") as children:
                    found += map(int, children.read().split())
    return found


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/statm") as sizes:
        return int(sizes.read().split()[1]) * resource.getpagesize()
    return 0


def _proportional(pid: int) -> int:
    """Its memory, of which it has a part where it shares."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as sizes:
        for line in sizes:
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


def takes_more(processes: Sequence[int], most_memory: int) -> bool:
    """True if processes together have more memory than that."""
    # What they share is counted for each of them, so only then is it worth a closer look.
    return sum(map(_resident, processes)) > most_memory and sum(map(_proportional, processes)) > most_memory


def used_cpu_s(processes: Sequence[int]) -> float:
    """Of processes that run, and of those among their children that they have waited for."""
    ticks = 0
    for pid in processes:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as stat:
            # Behind the name, in brackets, which may hold anything, the twelfth: its own and theirs, user and system.
            ticks += sum(map(int, stat.read().rpartition(b")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def read_until(handle: int, *, deadline: float, until: bytes | None) -> bytes:
    """Text of a pipe up to its end, the deadline (of the monotonic clock), or that `until` is in it."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    got = b""
    while (until is None or until not in got) and poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        part = os.read(handle, 4096)
        if not part:
            break
        got += part
    return got


def memory_file(content: bytes) -> int:
    """A descriptor from which that is read, at a high number."""
    handle = raised(os.memfd_create("sandbox"))
    os.write(handle, content)
    os.lseek(handle, 0, os.SEEK_SET)
    return handle


def pipe() -> tuple[int, int]:
    """The reading and the writing end of a pipe, at high numbers."""
    reading, writing = os.pipe()
    return raised(reading), raised(writing)


def raised(handle: int) -> int:
    """The same at a high number, and not inherited."""
    high = fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    os.close(handle)
    return high


def reap(pid: int, *, kill: bool) -> int:
    """Wait until no descendant is left; the wait status of `pid`. `kill`: they do not die by themselves."""
    status = 0
    while True:
        if kill:
            kill_children()
        try:
            ended, how = os.waitpid(-1, 0)
        except ChildProcessError:
            return status
        if ended == pid:
            status = how


def children_cpu_s() -> float:
    """Of all descendants that have ended so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def kill_children() -> None:
    """Kill all children of this process."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
            # The name of the program, in brackets, may hold anything; behind it are state and parent.
            if int(stat.read().rpartition(b")")[2].split()[1]) == os.getpid():
                os.kill(int(name), signal.SIGKILL)


def received(control: socket.socket, *, most_bytes: int, most_handles: int) -> tuple[bytes, list[int]]:
    """Receives a datagram with its descriptors, which no child process inherits: `socket.recv_fds` drops the flag for
    that.

    Descriptors that this process has no room for are missing. Raises OSError.
    """
    handles = array.array("i")
    size = socket.CMSG_LEN(most_handles * handles.itemsize)
    try:
        message, parts, _, _ = control.recvmsg(most_bytes, size, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:  # the other end left something unread: that is told once, ahead of its last words
        message, parts, _, _ = control.recvmsg(most_bytes, size, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in parts:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            handles.frombytes(content[: len(content) - len(content) % handles.itemsize])
    return message, list(handles)


def close_all(handles: list[int]) -> None:
    """Close descriptors that nobody has taken."""
    for handle in handles:
        with contextlib.suppress(OSError):
            os.close(handle)
