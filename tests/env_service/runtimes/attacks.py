"""Attacks from inside, for the tests of every kind of runtime."""

FORKS = "python3 -c 'import os\nwhile True:\n  try: os.fork()\n  except OSError: pass'"
FORKING_SHELLS = "f() { f | f & }; f"
KILL_ALL = "python3 -c 'import os; os.kill(-1, 9)'"
SIGNALS_TO_THE_FIRST = "for each in 9 15 1 2 11 6 17 19 18; do kill -$each 1; done; echo > /proc/1/fd/0"

# Prints a line for all that it can do and should not; a kind adds lines of its own.
PROBE = """
import ctypes, glob, os, socket, subprocess, sys
def reached(family, address):
    with socket.socket(family) as s:
        s.settimeout(2)
        return s.connect_ex(address) == 0
def tries(what, attack):
    try:
        if attack() not in (None, False, -1): print(what)
    except OSError:
        pass
def looks_for(name, *folders):
    for folder in folders:
        for parent, _, files in os.walk(folder):
            if name in files: print("another runtime's", os.path.join(parent, name))
port, mine = int(sys.argv[1]), sys.argv[2]
libc = ctypes.CDLL(None, use_errno=True)
tries("the metadata address", lambda: reached(socket.AF_INET, ("169.254.169.254", 80)))
tries("a service on the loopback", lambda: reached(socket.AF_INET, ("127.0.0.1", port)))
tries("an abstract socket", lambda: reached(socket.AF_UNIX, "\\0headway-test"))
tries("raw sockets", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
for path in ("/etc/shadow", "/proc/kcore", "/dev/mem", "/dev/vda", "/dev/sda"):
    tries(f"reading {path}", lambda path=path: open(path, "rb").read(1))
for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/usr/bin/env", "/sys/kernel/uevent_helper"):
    tries(f"writing {path}", lambda path=path: open(path, "r+b"))
tries("a user namespace", lambda: libc.unshare(0x10000000) == 0)
tries("a mount", lambda: libc.mount(b"x", b"/tmp", b"tmpfs", 0, None) == 0)
tries("another root", lambda: libc.chroot(b"/tmp") == 0)
tries("a device", lambda: os.mknod("/tmp/disk", 0o60600, os.makedev(254, 0)) or True)
tries("becoming root", lambda: os.setuid(0) or True)
tries("the kernel's log", lambda: libc.klogctl(3, ctypes.create_string_buffer(10), 10) > 0)
"""

_INTO_THE_FIRST = """
import re
maps, memory = open("/proc/1/maps").read(), open("/proc/1/mem", "r+b", buffering=0)
for line in maps.splitlines():
    place = re.match(r"(\\w+)-(\\w+) r-xp .*", line)
    if place and "[v" not in line:
        start, end = (int(each, 16) for each in place.groups())
        memory.seek(start)
        memory.write((b"\\x90" * (end - start) + CODE)[-(end - start):])
"""
# Instructions of x86-64: exit_group(137), and a loop. Other machines find none there.
_EXIT_137, _LOOP = r"b'\xbf\x89\0\0\0\xb8\xe7\0\0\0\x0f\x05'", r"b'\xeb\xfe'"

FIRST_ENDS_AS_IF_KILLED = _INTO_THE_FIRST.replace("CODE", _EXIT_137)
FIRST_HAS_ITSELF_KILLED = "import resource\nresource.prlimit(1, resource.RLIMIT_CPU, (1, 1))" + _INTO_THE_FIRST.replace(
    "CODE", _LOOP
)
"""Programs of Python that change the first process, which then has to be woken."""
