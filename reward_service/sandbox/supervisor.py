"""Keeps one place in the pool of sandboxes: its settings are its argument, in JSON.

    launch a sandbox -> tell the service, with its descriptors -> it ends, or the service says kill -> kill and reap all
    of it -> tell the service how it ended -> launch the next

It drops to its own user before the first launch, and stands in its own cgroups, so that all its descendants do. As
their subreaper it inherits whatever daemonizes, and it goes on only when no descendant is left. It ends with its
control socket, and it dies with the service.

See `services.isolation.keeping` for its start.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from typing import NamedTuple

from services.isolation.keeping import (
    become,
    children_cpu_s,
    close_all_but,
    family,
    memory_file,
    mount,
    pipe,
    raised,
    read_until,
    reap,
    takes_more,
    used_cpu_s,
)

# What goes to the service, one datagram each.
READY = b"ready"  # with four descriptors: command, stdin, stdout, stderr
ENDED = b"ended "  # and a Report in JSON
FAILED = b"failed "  # and why nothing could be launched; then the keeper exits

# What comes from the service.
KILL = b"kill"
NEXT = b"next"  # launch the next sandbox
DISK = b"disk "  # and MiB: replace the sandbox that waits by one with a disk of that size
WATCH = b"watch "  # and bytes: kill what runs when its processes together have more memory; 0: cgroups see to that

# Placeholders in the command and options of a sandbox.
DISK_BYTES = "{disk_bytes}"
FOLDER = "{folder}"

# A watched sandbox is looked at this often. Files are watched too: of a tmpfs, only their bytes have a limit.
_WATCH_MS = 100
_MAX_FILES = 50_000

_START_S = 60.0
_LAST_WORDS_S = 5.0

# As in `inside`, of which this file can import nothing.
_STANDS, _BEGINS = b"r", b"b"


class KeeperSettings(NamedTuple):
    """Settings from the service for its keeper. `mounts`: folders that its user could not reach, and where it sees
    them.
    """

    parent: int
    control: int
    uid: int | None
    cgroups: list[str]
    isolated: bool
    command: list[str]
    options: list[str]
    filter: str
    environment: dict[str, str]
    mounts: list[tuple[str, str]]
    disk_mib: int


class SandboxReport(NamedTuple):
    """End of a sandbox: the wait status of the launched process, the CPU time of all that ran in it, and whether the
    program had begun. That is told by what is there before the program, and nobody else can tell it.
    """

    status: int
    cpu_s: float
    began: bool


class LaunchedSandbox:
    """A sandbox: the process that was started, and the first one of its own process namespace if it has one."""

    def __init__(self, *, pid: int, ready: int, pipes: list[int], folder: str | None) -> None:
        self._ready = ready
        self._cpu_s = children_cpu_s()
        self.pid = pid
        self.handle = os.pidfd_open(pid)
        self.first: int | None = None
        self.first_pid = pid
        self.pipes = pipes
        self.folder = folder

    def meet(self, told: bytes) -> None:
        """Take up the first process, which bubblewrap tells of, and which waits for bubblewrap at that time."""
        with contextlib.suppress(ValueError, KeyError, ProcessLookupError):
            self.first_pid = int(json.loads(told)["child-pid"])
            self.first = os.pidfd_open(self.first_pid)

    def hand_over(self, control: socket.socket) -> None:
        """Give the service its ends of the pipes."""
        socket.send_fds(control, [READY], self.pipes)
        self.close_pipes()

    def close_pipes(self) -> None:
        """Close what has not been closed."""
        while self.pipes:
            os.close(self.pipes.pop())

    def end(self) -> SandboxReport:
        """Kill it and all that it started."""
        self.close_pipes()
        running_cpu_s = self._running_cpu_s()
        for handle in (self.handle, self.first):
            if handle is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
        status = reap(self.pid, kill=self.first is None)
        for handle in (self.handle, self.first):
            if handle is not None:
                os.close(handle)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        began = read_until(self._ready, deadline=time.monotonic(), until=_BEGINS) == _BEGINS
        os.close(self._ready)
        cpu_s = max(running_cpu_s, children_cpu_s() - self._cpu_s)
        return SandboxReport(status=status, cpu_s=cpu_s, began=began)

    def _running_cpu_s(self) -> float:
        """Of what is about to be killed: what ends with its process namespace is waited for by nobody."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle if self.first is None else self.first, 0)
            return used_cpu_s(family(self.first_pid))
        return 0.0


def main() -> None:
    """Keep the place until the service goes."""
    settings = KeeperSettings(**json.loads(sys.argv[1]))
    close_all_but(settings.control)
    for file in settings.cgroups:
        with open(file, "w") as processes:
            processes.write("0")
    libc = ctypes.CDLL(None, use_errno=True)
    mount(libc, settings.mounts)
    become(libc, settings.uid)
    if os.getppid() != settings.parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o022)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=raised(settings.control)) as control, contextlib.suppress(ConnectionError):
        _serve(control, settings)


def _serve(control: socket.socket, settings: KeeperSettings) -> None:
    disk_mib = settings.disk_mib
    while True:
        launched = _launch(settings, disk_mib=disk_mib)
        disk_mib = settings.disk_mib
        if isinstance(launched, str):
            control.send(FAILED + launched.encode()[:4096])
            return
        try:
            launched.hand_over(control)
            word = _wait(control, launched)
        finally:
            report = launched.end()
        if word.startswith(DISK):
            disk_mib = int(word[len(DISK) :])
            continue
        if word:
            control.send(ENDED + json.dumps(report).encode())
            word = control.recv(64)
        while word not in (NEXT, b""):  # what came too late
            word = control.recv(64)
        if not word:
            return


def _wait(control: socket.socket, launched: LaunchedSandbox) -> bytes:
    """The service's command, or NEXT when the program has ended or takes too much; b"" when the service is gone."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(launched.handle, select.POLLIN)
    most_memory: int | None = None
    while True:
        ready = {handle for handle, _ in poll.poll(None if most_memory is None else _WATCH_MS)}
        # First what the service says: when it replaces a sandbox, that ends because its pipes do.
        if control.fileno() in ready:
            word = control.recv(64)
            if not word.startswith(WATCH):
                return word
            most_memory = int(word[len(WATCH) :])
        elif launched.handle in ready or (most_memory is not None and _takes_too_much(launched, most_memory)):
            return NEXT


def _takes_too_much(launched: LaunchedSandbox, most_memory: int) -> bool:
    with contextlib.suppress(OSError):
        disk = os.statvfs(f"/proc/{launched.first_pid}/root/tmp")
        if launched.first is not None and disk.f_files - disk.f_ffree > _MAX_FILES:
            return True
    if most_memory == 0:
        return False
    return takes_more(family(launched.first_pid), most_memory)


def _launch(settings: KeeperSettings, *, disk_mib: int) -> LaunchedSandbox | str:
    """A sandbox that waits for its program, or why there is none."""
    stdin, stdout, stderr, command, ready, info = (pipe() for _ in range(6))
    given = [stdin[0], stdout[1], stderr[1], command[0], ready[1], info[1], *_memory_files(settings, disk_mib=disk_mib)]
    folder = None if settings.isolated else tempfile.mkdtemp(prefix="headway-run-")
    argv = [folder or "" if part == FOLDER else part for part in settings.command]
    pid = os.posix_spawn(
        argv[0],
        argv,
        settings.environment,
        file_actions=[(os.POSIX_SPAWN_DUP2, source, place) for place, source in enumerate(given)],
        setsid=True,
        setsigdef=[signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ],
    )
    for handle in given:
        os.close(handle)
    launched = LaunchedSandbox(
        pid=pid, ready=ready[0], pipes=[command[1], stdin[1], stdout[0], stderr[0]], folder=folder
    )
    failure = _await_ready(launched, ready=ready[0], info=info[0], isolated=settings.isolated)
    os.close(info[0])
    return failure or launched


def _await_ready(launched: LaunchedSandbox, *, ready: int, info: int, isolated: bool) -> str | None:
    deadline = time.monotonic() + _START_S
    if isolated:
        launched.meet(read_until(info, deadline=deadline, until=b"}"))
    if read_until(ready, deadline=deadline, until=_STANDS) == _STANDS:
        return None
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(launched.handle, signal.SIGKILL)
    said = read_until(launched.pipes[3], deadline=time.monotonic() + _LAST_WORDS_S, until=None)
    launched.end()
    return said.decode(errors="replace").strip() or "it ended, or took too long, without a word"


def _memory_files(settings: KeeperSettings, *, disk_mib: int) -> list[int]:
    """The options of bubblewrap and its filter: read from memory, so that they are in no command line."""
    if not settings.isolated:
        return []
    options = [str(disk_mib << 20) if option == DISK_BYTES else option for option in settings.options]
    listed = "".join(f"{option}\0" for option in options).encode()
    return [memory_file(listed), memory_file(bytes.fromhex(settings.filter))]
