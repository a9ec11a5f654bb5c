"""The filter of system calls: a program in the classic BPF that seccomp takes, for x86_64 and aarch64.

What is on no list is allowed: the walls are the namespaces, and the filter takes away what has been used to break
namespaces, and what they do not cover (the kernel's keyrings, sockets to the hypervisor, memory that no limit counts).
A refused call fails with EPERM, as it does in containers; programs are used to that. A call of another architecture's
table ends the process.
"""

import errno
import platform
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.isolation.faults import CannotIsolate

_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_ERROR = 0x00050000

_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_JUMP_ABOVE = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_JUMP_ANY_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K

# Offsets in `struct seccomp_data`; arguments are 64 bits wide, and their lower half comes first.
_NUMBER, _ARCHITECTURE, _ARGUMENT_0 = 0, 4, 16

# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_NEW_NAMESPACES = 0x7E020000
_X32 = 0x40000000
_UNIX, _INET, _INET6 = 1, 2, 10

# Calls from 424 on have the same number on all architectures.
_RECENT = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "clone3": 435, "pidfd_getfd": 438,
    "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447, "open_tree_attr": 467,
}  # fmt: skip

_X86_64 = {
    "shmget": 29, "socket": 41, "clone": 56, "semget": 64, "msgget": 68, "ptrace": 101, "syslog": 103, "vhangup": 153,
    "modify_ldt": 154, "pivot_root": 155, "adjtimex": 159, "chroot": 161, "acct": 163, "settimeofday": 164,
    "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169, "sethostname": 170,
    "setdomainname": 171, "iopl": 172,
    "ioperm": 173, "create_module": 174, "init_module": 175, "delete_module": 176, "quotactl": 179,
    "lookup_dcookie": 212, "clock_settime": 227, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250,
    "migrate_pages": 256, "unshare": 272, "move_pages": 279, "perf_event_open": 298, "fanotify_init": 300,
    "name_to_handle_at": 303, "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308, "process_vm_readv": 310,
    "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "memfd_create": 319, "kexec_file_load": 320, "bpf": 321,
    "userfaultfd": 323,
}  # fmt: skip

_AARCH64 = {
    "lookup_dcookie": 18, "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "vhangup": 58, "quotactl": 60,
    "acct": 89, "unshare": 97, "kexec_load": 104, "init_module": 105, "delete_module": 106, "clock_settime": 112,
    "syslog": 116, "ptrace": 117, "reboot": 142, "sethostname": 161, "setdomainname": 162, "settimeofday": 170,
    "adjtimex": 171, "msgget": 186, "semget": 190, "shmget": 194, "socket": 198, "add_key": 217, "request_key": 218,
    "keyctl": 219, "clone": 220, "swapon": 224, "swapoff": 225, "migrate_pages": 238, "move_pages": 239,
    "perf_event_open": 241, "fanotify_init": 262, "name_to_handle_at": 264, "open_by_handle_at": 265,
    "clock_adjtime": 266, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
    "finit_module": 273, "memfd_create": 279, "bpf": 280, "userfaultfd": 282, "kexec_file_load": 294,
}  # fmt: skip

# These depend on their arguments.
_SPECIAL = frozenset({"clone", "clone3", "socket"})


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Its number in the audit interface, the numbers of its calls, and whether it has the x32 table beside its own."""

    audit: int
    calls: Mapping[str, int]
    has_x32: bool


ARCHITECTURES: Mapping[str, Architecture] = {
    "x86_64": Architecture(audit=0xC000003E, calls={**_X86_64, **_RECENT}, has_x32=True),
    "aarch64": Architecture(audit=0xC00000B7, calls={**_AARCH64, **_RECENT}, has_x32=False),
}


def assemble(machine: str | None = None) -> bytes:
    """The filter for a machine, this one if none is named. Raises CannotIsolate for one that there is no table for."""
    name = machine or platform.machine()
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        known = ", ".join(ARCHITECTURES)
        raise CannotIsolate(f"the sandbox knows the system calls of {known}, and not of {name}: run it on one of those")
    return b"".join(_program(architecture))


def _program(architecture: Architecture) -> Sequence[bytes]:
    calls = architecture.calls
    refused = sorted(number for name, number in calls.items() if name not in _SPECIAL)
    program = [_step(_LOAD, _ARCHITECTURE), *_unless(architecture.audit, _KILL), _step(_LOAD, _NUMBER)]
    if architecture.has_x32:
        program += [_step(_JUMP_ABOVE, _X32, yes=0, no=1), _step(_RETURN, _KILL)]
    for number in refused:
        program += _when(number, _ERROR | errno.EPERM)
    # Its flags are in memory, where a filter cannot look: without it, the C library uses clone.
    program += _when(calls["clone3"], _ERROR | errno.ENOSYS)
    namespaces = [
        _step(_LOAD, _ARGUMENT_0),
        _step(_JUMP_ANY_BIT, _NEW_NAMESPACES, yes=0, no=1),
        _step(_RETURN, _ERROR | errno.EPERM),
        _step(_RETURN, _ALLOW),
    ]
    families = [
        _step(_LOAD, _ARGUMENT_0),
        *(step for family in (_UNIX, _INET, _INET6) for step in _when(family, _ALLOW)),
        _step(_RETURN, _ERROR | errno.EAFNOSUPPORT),
    ]
    for number, steps in ((calls["clone"], namespaces), (calls["socket"], families)):
        program += [_step(_JUMP_EQUAL, number, yes=0, no=len(steps)), *steps]
    return [*program, _step(_RETURN, _ALLOW)]


def _when(value: int, answer: int) -> list[bytes]:
    return [_step(_JUMP_EQUAL, value, yes=0, no=1), _step(_RETURN, answer)]


def _unless(value: int, answer: int) -> list[bytes]:
    return [_step(_JUMP_EQUAL, value, yes=1, no=0), _step(_RETURN, answer)]


def _step(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """A `struct sock_filter`."""
    return struct.pack("=HBBI", code, yes, no, value)
