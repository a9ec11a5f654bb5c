"""The attacks of hostile programs: what each tries, and what must become of it.

A program writes a line that begins with BREACH for whatever it gets through with. It finds what it looks for in the
environment: TCP, UDP (ports), ABSTRACT (a socket's name), SECRET_FILE, SERVICE_FILE, VICTIM (a process id), and CALLS
(numbers of system calls, in JSON).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from reward_service.verifier.program import RunEnd, RunLimits

SECRET = "s3cr3t-of-the-service"

_START = """
import ctypes, json, mmap, os, resource, signal, socket, struct, subprocess, sys, threading, time
E = os.environ
def breach(*words): print("BREACH", *words, flush=True)
def attempt(words, attack):
    try: got = attack()
    except Exception: return
    breach(words, got)
def read(path):
    with open(path, "rb") as file: return file.read(1000)
libc = ctypes.CDLL(None, use_errno=True)
CALLS = json.loads(E["CALLS"])
def call(name, *arguments):
    if libc.syscall(CALLS[name], *[a if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments]) == -1:
        raise OSError(ctypes.get_errno())
"""


USUAL = RunLimits(wall_s=90.0, cpu_s=60.0, memory_mib=256, processes=16, disk_mib=8)
BRIEF = replace(USUAL, wall_s=2.0)


@dataclass(frozen=True, kw_only=True)
class Attack:
    """A program, its limits, and whether its end is one that it may have."""

    source: str
    limits: RunLimits = USUAL
    fails: Callable[[RunEnd], bool]

    @property
    def program(self) -> bytes:
        """The source with what all attacks use."""
        return (_START + self.source).encode()


def _quietly(ended: RunEnd) -> bool:
    """It has run to its end and got nothing."""
    return ended.exit_code == 0 and b"BREACH" not in ended.stdout and ended.stdout.endswith(b"done\n")


def _killed(ended: RunEnd) -> bool:
    return ended.exit_code is None and not ended.timed_out and b"BREACH" not in ended.stdout


def _timed_out(ended: RunEnd) -> bool:
    return ended.timed_out and b"BREACH" not in ended.stdout


def _stopped(ended: RunEnd) -> bool:
    """It got nothing, whichever limit has ended it."""
    return b"BREACH" not in ended.stdout


def _cut(ended: RunEnd) -> bool:
    return ended.timed_out and ended.stdout_cut and len(ended.stdout) == 1 << 16


def _quiet(source: str) -> Attack:
    return Attack(source=source + "\nprint('done')\n", fails=_quietly)


ATTACKS: Mapping[str, Attack] = {
    "tcp": _quiet("""
for host in ("127.0.0.1", "::1", "localhost", "10.0.0.1", "169.254.169.254", "1.1.1.1"):
    attempt("tcp " + host, lambda: socket.create_connection((host, int(E["TCP"])), timeout=5))
"""),
    "udp": _quiet("""
for host in ("10.0.0.1", "169.254.169.254", "1.1.1.1"):
    attempt("udp " + host, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", (host, 53)))
for _ in range(20):  # the loopback is the sandbox's own: the host hears nothing of this
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", int(E["UDP"])))
"""),
    "other socket families": _quiet("""
for family in (16, 17, 38, 40, 15, 31, 44):  # netlink, packet, alg, vsock, key, bluetooth, xdp
    for kind in (1, 2, 3, 5):
        attempt(f"socket family {family}", lambda: socket.socket(family, kind))
attempt("raw socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
"""),
    "abstract unix sockets": _quiet("""
attempt("abstract socket", lambda: socket.socket(socket.AF_UNIX).connect("\\0" + E["ABSTRACT"]))
"""),
    "files of the host": _quiet("""
for path in ("/etc/shadow", "/etc/passwd", E["SECRET_FILE"], E["SERVICE_FILE"], "/root", "/home", "/var", "/sys",
             "/dev/mem", "/dev/kmsg", "/dev/vda", "/dev/sda", "/proc/kcore", "/proc/kmsg"):
    attempt(path, lambda: os.listdir(path) if os.path.isdir(path) else read(path))
if os.listdir("/tmp") not in (["work", "shm"], ["shm", "work"]): breach("/tmp of the host", os.listdir("/tmp"))
if os.path.exists("/usr/local/bin") or os.path.exists("/usr/local/lib/node_modules"): breach("/usr/local")
"""),
    "inherited descriptors": _quiet("""
for name in os.listdir("/proc/self/fd"):
    try: target = os.readlink("/proc/self/fd/" + name)
    except OSError: continue
    if int(name) > 2 and not target.startswith("/proc/") : breach("descriptor", name, target)
for pid in filter(str.isdigit, os.listdir("/proc")):
    try: names = os.listdir(f"/proc/{pid}/fd")
    except OSError: continue
    for name in names:
        try: target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError: continue
        if not target.startswith(("pipe:", "/proc/", "anon_inode:[eventfd]", "/dev/null", "/tmp/work")):
            breach("descriptor of", pid, name, target)
"""),
    "environment": _quiet("""
known = {"HOME", "PATH", "LANG", "LD_LIBRARY_PATH", "LC_CTYPE",
         "TCP", "UDP", "ABSTRACT", "SECRET_FILE", "SERVICE_FILE", "VICTIM", "CALLS"}
if set(E) - known: breach("variables", set(E) - known)
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "cmdline"):
        try: content = read(f"/proc/{pid}/{name}")
        except OSError: continue
        if b"s3cr3t" in content or (pid == "1" and name == "environ" and content): breach(pid, name, content)
"""),
    "symlinks": _quiet("""
def through(target, path):
    os.symlink(target, path)
    return read(path)
attempt("link to a file", lambda: through("/etc/shadow", "a"))
attempt("link to the secret", lambda: through(E["SECRET_FILE"], "b"))
attempt("link through the first process", lambda: through("/proc/1/root" + E["SECRET_FILE"], "c"))
attempt("link through its folder", lambda: through("/proc/1/cwd/../../../../.." + E["SECRET_FILE"], "d"))
attempt("link that climbs", lambda: through("../" * 40 + E["SECRET_FILE"].lstrip("/"), "e"))
os.symlink("/", "f")
attempt("link to the root", lambda: read("f" + E["SECRET_FILE"]))
os.symlink("/proc/self/root", "g")
attempt("link to its own root", lambda: read("g/.." + E["SECRET_FILE"]))
attempt("hard link out of it", lambda: os.link("/usr/bin/env", "h"))
attempt("file by handle", lambda: call("open_by_handle_at", 0, 0, 0))
"""),
    "what is not its own": _quiet("""
for path in ("/x", "/usr/x", "/usr/local/x", "/opt/python/x", "/dev/x", "/proc/x", "/proc/sys/kernel/core_pattern",
             "/proc/sys/kernel/hostname", "/proc/sys/vm/drop_caches", "/proc/sysrq-trigger"):
    flags = os.O_WRONLY | (0 if path.startswith("/proc/") else os.O_CREAT)
    attempt("write " + path, lambda: os.close(os.open(path, flags)))
def rewrite(path):
    with open(path, "r+b", buffering=0) as file: file.write(file.read(1000))
for folder, _, files in os.walk("/proc/sys"):
    for name in files: attempt("write " + folder + "/" + name, lambda: rewrite(os.path.join(folder, name)))
attempt("be root", lambda: os.setuid(0))
attempt("device", lambda: os.mknod("n", 0o20666, os.makedev(1, 3)) or read("n"))
if os.getuid() != 65534 or os.getgid() != 65534: breach("user", os.getuid(), os.getgid())
for line in open("/proc/self/status"):
    if line.startswith("Cap") and int(line.split()[1], 16): breach(line)
    if line.startswith("NoNewPrivs") and line.split()[1] != "1": breach(line)
"""),
    "limits raised again": _quiet("""
for what in (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE,
             resource.RLIMIT_NOFILE, resource.RLIMIT_CORE):
    attempt(f"limit {what}", lambda: resource.setrlimit(what, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)))
attempt("priority", lambda: os.setpriority(os.PRIO_PROCESS, 0, -10))
attempt("real-time", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
"""),
    "signals to processes of the host": _quiet("""
victim = int(E["VICTIM"])
for pid in (victim, os.getppid() if os.getppid() > 1 else victim):
    attempt("signal", lambda: os.kill(pid, signal.SIGKILL))
    attempt("trace", lambda: call("ptrace", 16, pid, 0, 0))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
try: os.kill(-1, signal.SIGTERM)
except OSError: pass
if os.path.exists(f"/proc/{victim}") : breach("sees the victim")
"""),
    "refused calls": _quiet("""
for name in sorted(CALLS):
    if name not in ("clone", "clone3", "socket"):
        result = libc.syscall(CALLS[name], 0, 0, 0, 0, 0, 0)
        if result != -1 or ctypes.get_errno() != 1: breach(name, result, ctypes.get_errno())
for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
    child = libc.syscall(CALLS["clone"], ctypes.c_long(flag | 17), 0, 0, 0, 0)
    if child == 0: os._exit(0)
    if child > 0: breach("clone", hex(flag))
if libc.syscall(CALLS["clone3"], 0, 0) != -1 or ctypes.get_errno() != 38: breach("clone3")
"""),
    "calls of another architecture": Attack(
        source="""
if os.uname().machine == "x86_64":
    memory = mmap.mmap(-1, 4096, prot=7)
    memory.write(bytes.fromhex("b814000000cd80c3"))  # getpid of the 32-bit table
    ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))()
    breach("a 32-bit call")
else:
    os.kill(os.getpid(), signal.SIGKILL)
""",
        fails=_killed,
    ),
    "fork bomb": Attack(
        source="""
deadline = time.time() + 4
while time.time() < deadline:
    try:
        if os.fork() == 0: deadline = time.time() + 4
    except OSError: pass
""",
        fails=_stopped,
    ),
    "processes over the limit": _quiet("""
made = 0
try:
    while made < 200:
        if os.fork() == 0: time.sleep(600)
        made += 1
    breach("processes", made)
except OSError: pass
if made < 10: breach("only", made)
"""),
    "thread bomb": _quiet("""
threads = []
try:
    while len(threads) < 200:
        thread = threading.Thread(target=time.sleep, args=(5,), daemon=True)
        thread.start()
        threads.append(thread)
    breach("threads", len(threads))
except RuntimeError: pass
"""),
    "memory bomb": _quiet("""
attempt("a gigabyte", lambda: len(bytearray(1 << 30)))
parts = []
try:
    while len(parts) < 1000: parts.append(bytearray(1 << 20))
    breach("a thousand parts")
except MemoryError: pass
parts.clear()
attempt("mapped", lambda: mmap.mmap(-1, 1 << 30))
attempt("memory of a file", lambda: os.memfd_create("x"))
"""),
    "memory bomb in eight processes": Attack(
        source="""
def fill():
    parts = []
    for _ in range(120):
        parts.append(bytearray(os.urandom(1 << 16) * 16))
    time.sleep(10)
    print("kept", flush=True)
for _ in range(8):
    if os.fork() == 0:
        try: fill()
        finally: os._exit(0)
for _ in range(8): os.wait()
""",
        fails=lambda ended: ended.stdout.count(b"kept") * 120 <= 256 and not ended.timed_out,
    ),
    "loop that ignores SIGXCPU": Attack(
        source="""
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
while True: pass
""",
        limits=replace(USUAL, cpu_s=1.0),
        fails=_killed,
    ),
    "long sleep": Attack(source="time.sleep(600)", limits=BRIEF, fails=_timed_out),
    "signals ignored": Attack(
        source="""
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: time.sleep(1)
""",
        limits=BRIEF,
        fails=_timed_out,
    ),
    "endless output": Attack(
        source="while True: os.write(1, b'x' * 65536); os.write(2, b'y' * 65536)", limits=BRIEF, fails=_cut
    ),
    "daemon that outlives the exit": Attack(
        source="""
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True: time.sleep(0.01)
    os._exit(0)
print("done")
""",
        fails=_quietly,
    ),
    "daemon that outlives the deadline": Attack(
        source="""
for _ in range(4):
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        if os.fork() == 0:
            while True: time.sleep(0.01)
        os._exit(0)
time.sleep(600)
""",
        limits=BRIEF,
        fails=_timed_out,
    ),
    "full disk": _quiet("""
written = 0
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
def fill(folder):
    global written
    try:
        for number in range(50):
            with open(f"{folder}/fill{number}", "wb", buffering=0) as file:
                for _ in range(64): written += file.write(b"x" * (1 << 20))
    except OSError: pass
for folder in ("/tmp", "/dev/shm", "/tmp/work", "/var/tmp", "/dev", "/"): fill(folder)
if written > 9 << 20: breach("bytes written", written)
"""),
    "many files": Attack(
        source="""
for number in range(1000000): os.close(os.open(f"f{number}", os.O_CREAT | os.O_WRONLY))
breach("a million files")
""",
        fails=_killed,
    ),
    "namespaces by command": _quiet("""
for command in (["unshare", "-U", "true"], ["unshare", "-Ur", "true"], ["mount", "-t", "tmpfs", "x", "/tmp"],
                ["chroot", "/usr", "true"], ["su", "-c", "true"], ["dmesg"]):
    try:
        if subprocess.run(command, capture_output=True, timeout=30).returncode == 0: breach(command)
    except OSError: pass
"""),
    "exit before anything": Attack(source="os._exit(0)", fails=_stopped),
}
