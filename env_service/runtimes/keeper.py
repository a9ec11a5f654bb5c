"""Keeps one runtime, in a process that the forge has forked for it.

    launch: a file system of limited size ─▶ an overlay on the image ─▶ bubblewrap ─▶ a first process that waits
    then, as the service says: run a command in it, kill one, write and read files, take a snapshot, listen in it
    the service goes ─▶ all of it is killed

Nothing of the service runs inside. The keeper stays outside, and what is to run is its child, which enters the
runtime's namespaces, gives up every capability, takes the filter, and only then becomes the command. Until then it
cannot be looked into from inside (it is not dumpable), and its output goes by pipes that only the service reads.

The first process ends by no signal from inside. If it is killed all the same, that is somebody else's doing; if it
ends in any other way, it is that of whoever is inside, also with an exit code that looks like a kill. What can have it
killed from inside is a limit of its CPU time, and it has used that much then.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from env_service.runtimes.tree import TreeEntry, packed, read_inside, read_tree, restore, unpacked, write_inside
from services.isolation.keeping import (
    CLONE_NEWNS,
    become,
    checked,
    close_all,
    close_all_but,
    family,
    memory_file,
    mount,
    pipe,
    raised,
    read_until,
    received,
    takes_more,
)

MOST_MESSAGE = 1 << 17
"""Bytes of a message between service and keeper; files go by descriptors."""

_CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = (
    0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_NAMESPACES = (("net", _CLONE_NEWNET), ("ipc", _CLONE_NEWIPC), ("uts", _CLONE_NEWUTS), ("mnt", CLONE_NEWNS))
_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 4, 22, 24, 38
_SECCOMP_FILTER = 2
_LAST_CAPABILITY = 63
_PF_EXITING = 0x4

# Descriptors behind stdin, stdout and stderr of bubblewrap.
INFO, OPTIONS, FILTER = 3, 4, 5
_START_S = 60.0
# Whoever serves, samples or trains on this machine goes first.
_NICE = 10
_WATCH_MS = 100
_LISTEN_S = 10.0
_BACKLOG = 64
_CANNOT_ENTER = 125
# The least that a limit of CPU time can be is 1 s.
_MOST_CPU_S = 0.5


class RuntimeKeeperSettings(NamedTuple):
    """Settings from the service. `mounts`: folders that its user could not reach, and where it sees them; `place`: an
    empty folder on which it mounts what the runtime writes. `parent` is the process that must be its.
    """

    parent: int
    uid: int | None
    cgroups: list[str]
    mounts: list[tuple[str, str]]
    place: str
    disk_bytes: int
    disk_files: int
    watch_bytes: int
    command: list[str]
    options: list[str]
    filter: str


class _Running(NamedTuple):
    """A command that runs: its number at the service, its process, and that as a descriptor. From `failed` is read why
    it did not come to begin, which only what is there before the command can write.
    """

    number: int
    pid: int
    handle: int
    failed: int


class _Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def keep(settings: RuntimeKeeperSettings, handles: Sequence[int]) -> None:
    """Keep the runtime until the service goes. `handles` are the socket to the service, and a snapshot if there is one;
    this process has no others that matter.
    """
    control, *snapshot = map(raised, handles)
    close_all_but(control, *snapshot)
    groups = [os.open(file, os.O_WRONLY) for file in settings.cgroups]
    libc = ctypes.CDLL(None, use_errno=True)
    with socket.socket(fileno=control) as service, contextlib.suppress(ConnectionError):
        try:
            mount(libc, settings.mounts)
            become(libc, settings.uid)
            if os.getppid() != settings.parent:
                return
            os.umask(0o022)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            _make_disk(libc, settings, unpacked(snapshot[0]) if snapshot else [])
            runtime = KeptRuntime(libc, settings, groups)
        except OSError as error:
            _say(service, {"failed": str(error)})
            return
        with contextlib.closing(runtime):
            _say(service, {"ready": os.getpid()})
            runtime.serve(service)


def _make_disk(libc: ctypes.CDLL, settings: RuntimeKeeperSettings, entries: Sequence[TreeEntry]) -> None:
    """Mount what the runtime writes to, in namespaces of the keeper's own."""
    user, group = os.geteuid(), os.getegid()
    checked(libc.unshare(_CLONE_NEWUSER | CLONE_NEWNS), "a user namespace")
    # After a change of user nobody may look into this process, the user itself neither.
    checked(libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "to name its user")
    for file, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{file}", "w") as told:
            told.write(text)
    checked(libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "not to be looked into")
    options = f"size={settings.disk_bytes},nr_inodes={settings.disk_files},mode=755".encode()
    checked(libc.mount(b"tmpfs", settings.place.encode(), b"tmpfs", 0, options), "a file system in memory")
    for name in ("upper", "work"):
        os.mkdir(f"{settings.place}/{name}")
    restore(f"{settings.place}/upper", entries)


def _say(service: socket.socket, message: Mapping[str, object], *handles: int) -> None:
    socket.send_fds(service, [json.dumps(message).encode()], handles)
    close_all(list(handles))


class KeptRuntime:
    """A runtime that stands. Raises OSError that says why it does not."""

    def __init__(self, libc: ctypes.CDLL, settings: RuntimeKeeperSettings, groups: Sequence[int]) -> None:
        self._libc = libc
        self._settings = settings
        self._groups = groups
        self._filter = bytes.fromhex(settings.filter)
        self._running: dict[int, _Running] = {}
        self._starved = False
        self._alive, self._hold = pipe()
        self._monitor, first = self._launch()
        self._watched = os.pidfd_open(self._monitor)
        self._first_pid, self._first = first, os.pidfd_open(first)
        os.kill(self._monitor, signal.SIGSTOP)  # so that how the first process ended can be read of what is left of it
        self._root = os.open(f"/proc/{first}/root", os.O_PATH | os.O_DIRECTORY)
        self._upper = os.open(f"{settings.place}/upper", os.O_RDONLY | os.O_DIRECTORY)
        self._spaces = [(os.open(f"/proc/{first}/ns/{name}", os.O_RDONLY), kind) for name, kind in _NAMESPACES]
        self._user = os.open(f"/proc/{first}/ns/user", os.O_RDONLY)
        # From here on, children of the keeper are processes of the runtime.
        processes = os.open(f"/proc/{first}/ns/pid", os.O_RDONLY)
        checked(libc.setns(processes, _CLONE_NEWPID), "its children in the runtime")

    def close(self) -> None:
        """Kill all of it."""
        for handle in (self._first, self._watched):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._monitor, 0)

    def serve(self, service: socket.socket) -> None:
        """Do as the service says, until it or the runtime goes."""
        poll = select.poll()
        for handle in (service.fileno(), self._watched, self._first):
            poll.register(handle, select.POLLIN)
        while True:
            watching = self._settings.watch_bytes > 0 and len(family(os.getpid())) > 3
            ready = {handle for handle, _ in poll.poll(_WATCH_MS if watching else 1000)}
            if watching:
                self._end_if_too_large()
            for running in [each for each in self._running.values() if each.handle in ready]:
                poll.unregister(running.handle)
                self._tell_end(service, running)
            if ready & {self._watched, self._first}:
                _say(service, {"lost": "its first process was killed", "inside": self._ended_inside()})
                return
            if service.fileno() in ready:
                message, handles = received(service, most_bytes=MOST_MESSAGE, most_handles=4)
                if not message:
                    return
                self._obey(service, json.loads(message), handles, poll)

    def _obey(self, service: socket.socket, told: dict[str, object], handles: list[int], poll: select.poll) -> None:
        number = told["id"]
        assert isinstance(number, int)
        try:
            match told["do"]:
                case "exec":
                    running = self._exec(number, told, handles)
                    self._running[number] = running
                    poll.register(running.handle, select.POLLIN)
                case "kill":
                    if number in self._running:
                        _kill(self._running[number].pid)
                case "write":
                    (handle,), handles = handles, []
                    write_inside(self._libc, self._root, unpacked(handle))
                    _say(service, {"id": number})
                case "read":
                    found = read_inside(self._libc, self._root, str(told["path"]), most=int(str(told["most"])))
                    _say(service, {"id": number}, packed(found))
                case "snapshot":
                    found = list(read_tree(self._upper, most=self._settings.disk_bytes, layered=True))
                    _say(service, {"id": number}, packed(found))
                case "listen":
                    _say(service, {"id": number}, self._listening())
        # Whoever is inside has a say in what is found, and must not end the keeper by it.
        except (OSError, ValueError, RecursionError) as error:
            if self._is_dying():  # which is told next, with its reason
                return
            _say(service, {"id": number, "error": _refusal(error)})
        finally:
            close_all(handles)

    def _tell_end(self, service: socket.socket, running: _Running) -> None:
        del self._running[running.number]
        os.close(running.handle)
        _, status, used = os.wait4(running.pid, 0)
        failed = read_until(running.failed, deadline=time.monotonic(), until=None).decode(errors="replace").strip()
        os.close(running.failed)
        cpu_s = used.ru_utime + used.ru_stime
        starved, self._starved = self._starved, False
        if self._is_dying():  # it died of that
            return
        told = {"id": running.number, "status": status, "cpu_s": cpu_s, "starved": starved, "failed": failed}
        _say(service, told)

    def _is_dying(self) -> bool:
        """True of a runtime whose first process ends: the kernel kills all others before that has ended."""
        try:
            return bool(int(self._first_status()[6]) & _PF_EXITING)
        except OSError:
            return True

    def _ended_inside(self) -> bool:
        """True if the first process, which has ended, was not killed from outside; nor was bubblewrap, its parent."""
        with contextlib.suppress(ChildProcessError):
            ended, status = os.waitpid(self._monitor, os.WNOHANG)
            if ended:
                return not os.WIFSIGNALED(status)
        try:
            told = self._first_status()
        except OSError:
            return True
        code, cpu_s = int(told[-1]), (int(told[11]) + int(told[12])) / os.sysconf("SC_CLK_TCK")
        return not (os.WIFSIGNALED(code) and os.WTERMSIG(code) == signal.SIGKILL and cpu_s < _MOST_CPU_S)

    def _first_status(self) -> list[bytes]:
        """Fields of the first process's `stat` from its state on. Raises OSError."""
        with open(f"/proc/{self._first_pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()

    def _end_if_too_large(self) -> None:
        """Kill all but the first process if they have too much memory together, as a cgroup would kill some."""
        monitor = family(self._monitor)[:2]
        inside = [pid for pid in family(os.getpid())[1:] if pid not in monitor]
        if takes_more(inside, self._settings.watch_bytes):
            self._starved = True
            for pid in inside:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def _launch(self) -> tuple[int, int]:
        """The processes of bubblewrap, outside, and of the runtime's first, which has come to wait."""
        ready, stands = pipe()
        info, told = pipe()
        options = "".join(f"{option}\0" for option in self._settings.options).encode()
        given = [self._alive, stands, stands, told, memory_file(options), memory_file(self._filter)]
        pid = self._forked(lambda: _replace(given, self._settings.command, {}), stands)
        for handle in {self._alive, stands, told, *given}:
            os.close(handle)
        deadline = time.monotonic() + _START_S
        told_of = read_until(info, deadline=deadline, until=b"}")
        said = read_until(ready, deadline=deadline, until=b"stands")
        if b"stands" not in said:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            raise OSError(0, said.decode(errors="replace").strip() or "it ended, or took too long, without a word")
        close_all([ready, info])
        return pid, int(json.loads(told_of)["child-pid"])

    def _forked(self, work: Callable[[], None], told: int) -> int:
        """A child in the runtime's cgroups that does the work, and never comes back; why it failed goes to `told`."""
        pid = os.fork()
        if pid:
            return pid
        try:
            for group in self._groups:
                os.write(group, b"0")
            work()
        except BaseException as error:  # noqa: BLE001  it must not go on as a second keeper
            os.write(told, f"{error}\n".encode())
        os._exit(_CANNOT_ENTER)

    def _exec(self, number: int, told: dict[str, object], handles: list[int]) -> _Running:
        argv, environment, cwd, limits = told["argv"], told["environment"], told["cwd"], told["limits"]
        assert isinstance(argv, list)
        assert isinstance(environment, dict)
        assert isinstance(limits, dict)
        failed, told_by = pipe()

        def enter() -> None:
            for place, handle in enumerate(handles):
                os.dup2(handle, place)
            os.setsid()
            _limit(limits)
            self._enter()
            try:
                os.chdir(str(cwd))
                _become_command(argv, environment)
            except OSError as error:
                os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
                os._exit(126 if isinstance(error, PermissionError) else 127)

        pid = self._forked(enter, told_by)
        os.close(told_by)
        return _Running(number=number, pid=pid, handle=os.pidfd_open(pid), failed=failed)

    def _listening(self) -> int:
        """A socket that listens on the runtime's loopback, at a port that was free. Raises OSError.

        A child makes it: who has entered a network namespace cannot go back to the one that it came from.
        """
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def make() -> None:
            space, kind = self._spaces[0]
            checked(self._libc.setns(space, kind), "the runtime's network")
            with socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG) as made:
                socket.send_fds(its, [b"made"], [made.fileno()])
            os._exit(0)

        with ours, its:
            pid = self._forked(make, its.fileno())
            its.close()
            ours.settimeout(_LISTEN_S)  # whoever is inside can stop a process of its user
            try:
                said, handles = received(ours, most_bytes=4096, most_handles=1)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        if not handles:
            raise OSError(0, said.decode(errors="replace").strip() or "who was to make it has ended")
        return handles[0]

    def _enter(self) -> None:
        """Become a process like those inside: in all namespaces, without a capability, behind the filter."""
        for space, kind in self._spaces:
            checked(self._libc.setns(space, kind), "the runtime's namespaces")
        checked(self._libc.setns(self._user, _CLONE_NEWUSER), "the runtime's user")
        for capability in range(_LAST_CAPABILITY):
            if self._libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
                break  # the kernel knows no more
        checked(self._libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
        buffer = ctypes.create_string_buffer(self._filter, len(self._filter))
        size = struct.calcsize("=HBBI")
        program = _Program(len(self._filter) // size, ctypes.cast(buffer, ctypes.c_void_p))
        checked(self._libc.prctl(_PR_SET_SECCOMP, _SECCOMP_FILTER, ctypes.byref(program), 0, 0), "the filter")


def _refusal(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "folders lie in folders too deep"
    return f"{error.strerror}" if isinstance(error, OSError) else str(error)


def _kill(leader: int) -> None:
    """Kill a command with the processes of its group, if it has come to have one."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(leader, signal.SIGKILL)


def _replace(handles: Sequence[int], argv: list[str], environment: Mapping[str, str]) -> None:
    """Become a program that has these descriptors, from 0 on, and no others."""
    os.setsid()
    for place, handle in enumerate(handles):
        os.dup2(handle, place)
    os.execve(argv[0], argv, environment)


def _become_command(argv: list[str], environment: Mapping[str, str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execvpe(argv[0], argv, environment)


def _limit(limits: Mapping[str, int]) -> None:
    """`processes` is for all of the runtime's together, the others are for each process."""
    os.nice(_NICE)
    for what, name in (
        (resource.RLIMIT_AS, "memory_bytes"),
        (resource.RLIMIT_FSIZE, "file_bytes"),
        (resource.RLIMIT_NOFILE, "open_files"),
        (resource.RLIMIT_NPROC, "processes"),
    ):
        resource.setrlimit(what, (limits[name], limits[name]))
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
