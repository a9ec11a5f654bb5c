"""Attacks from inside a runtime: nothing gets out, and nobody else notices."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from env_service.runtimes.interface import Runtime, RuntimeFile, RuntimeRefused
from env_service.runtimes.pool import RuntimePool
from tests.env_service.runtimes.attacks import FORKING_SHELLS, FORKS, KILL_ALL, PROBE
from tests.env_service.runtimes.conftest import said, sh

BOMBS = {
    "forks": FORKS,
    "shell": FORKING_SHELLS,
    "disk": "dd if=/dev/zero of=/tmp/full bs=1M; cat /dev/zero > /work/full; cat /dev/zero > /dev/shm/full",
    "files": "i=0; while : > /tmp/$i; do i=$((i+1)); done",
    "memory": "python3 -c 'import os\nos.fork(); os.fork()\nx = b\"x\" * (90 << 20)\nimport time; time.sleep(2)'",
    "daemons": "for i in 1 2 3 4 5 6; do (setsid sleep 1000 &); done",
}
MORE = """
secret, pid, there, home = sys.argv[3:7]
tries("netlink", lambda: socket.socket(16, socket.SOCK_RAW, 0))
for path in (there, "/proc/1/root" + there, f"/proc/{pid}/environ", "/sys/kernel", home):
    tries(f"the file {path}", lambda path=path: os.stat(path))
tries("the file /etc/shadow", lambda: os.stat("/etc/shadow"))
tries("writing to the first process", lambda: open("/proc/1/oom_score_adj_", "r+b"))
tries("tracing", lambda: libc.ptrace(16, 1, 0, 0) == 0)
for name in glob.glob("/proc/[0-9]*/environ"):
    try:
        if secret.encode() in open(name, "rb").read(): print("the secret of", name)
    except OSError: pass
looks_for(mine, "/tmp", "/work", "/home", "/var/tmp", "/opt")
"""
# Looks for a process that is not yet what it is to be, until it is told to say what it saw.
SPY = """
import glob, os, sys, time
end, seen = time.time() + 15, set()
open("spying", "w")
while time.time() < end and not os.path.exists("seen"):
    for process in glob.glob("/proc/[0-9]*"):
        for what in ("exe", "cwd", "root", "fd/3", "fd/64", "fd/70"):
            try: seen.add(os.readlink(f"{process}/{what}"))
            except OSError: pass
        for what in ("maps", "environ"):
            try: seen.update(line.split()[-1] for line in open(f"{process}/{what}", errors="replace") if "/" in line)
            except OSError: pass
print("\\n".join(sorted(each for each in seen if "keeper" in each or sys.argv[1] in each)))
"""


@pytest.mark.parametrize("bomb", BOMBS)
async def test_a_bomb_ends_with_its_command_and_hurts_nobody_else(pool: RuntimePool, bomb: str) -> None:
    attacked, other = await pool.start("host"), await pool.start("host")
    bombing = asyncio.ensure_future(sh(attacked, BOMBS[bomb], wall_s=2))
    assert await said(other, "sleep 0.5; echo works; df /tmp | tail -1 | tr -s ' ' | cut -d' ' -f3") == "works\n0"
    end = await bombing
    if bomb == "memory":
        assert end.starved or end.exit_code != 0, end
    await sh(attacked, f"{KILL_ALL}; rm -rf /tmp/* /work/*")
    await asyncio.sleep(0.5)
    assert await said(attacked, "echo works") == "works"


async def test_nothing_of_the_machine_or_of_others_is_reached(
    pool: RuntimePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_TEST_SECRET", "a-secret-of-the-service")
    os.chmod(tmp_path, 0o755)
    (tmp_path / "host-file").write_text("of the host")
    mine, other = await pool.start("host"), await pool.start("host")
    await other.copy_in({"work/marker-of-another": b"x", "tmp/marker-of-another": b"x"})
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0headway-test")
        abstract.listen()
        await mine.copy_in({"work/probe.py": (PROBE + MORE).encode()})
        port, pid = server.getsockname()[1], os.getpid()
        words = f"{port} marker-of-another a-secret-of-the-service {pid} {tmp_path}/host-file {Path.home()}"
        end = await sh(mine, f"python3 probe.py {words}")
    assert (end.exit_code, end.stdout) == (0, b""), end


async def test_a_command_on_its_way_in_cannot_be_looked_into(runtime: Runtime) -> None:
    await runtime.copy_in({"work/spy.py": SPY.encode()})
    spy = asyncio.ensure_future(sh(runtime, f"python3 spy.py {Path(__file__).parents[3]}"))
    await sh(runtime, "until [ -e spying ]; do sleep 0.02; done")
    for _ in range(30):
        await sh(runtime, "true")
    await sh(runtime, "touch seen")
    end = await spy
    assert (end.exit_code, end.stdout.strip()) == (0, b""), end


async def test_folders_too_deep_and_names_that_cannot_be_are_refused_and_the_runtime_goes_on(runtime: Runtime) -> None:
    deep = "import os\nfor _ in range(1500):\n  os.mkdir('d'); os.chdir('d')"
    assert (await sh(runtime, f'python3 -c "{deep}"')).exit_code == 0
    with pytest.raises(RuntimeRefused, match="/work cannot be read"):
        await runtime.copy_out("/work")
    with pytest.raises(RuntimeRefused, match="no snapshot can be taken"):
        await runtime.snapshot()
    with pytest.raises(RuntimeRefused, match="cannot be read"):
        await runtime.copy_out("/work/\ud800")
    with pytest.raises(RuntimeRefused, match="no null characters and no half characters"):
        await said(runtime, "echo \ud800")
    assert await said(runtime, "echo works") == "works"


async def test_links_lead_nowhere_but_inside(runtime: Runtime, tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    (tmp_path / "victim").write_text("as it was")
    outside = tmp_path / "victim"
    await sh(runtime, f"ln -s {outside} out; ln -s ../../../..{outside} up; ln -s /proc/1/root/etc root; mkfifo pipe")
    with pytest.raises(RuntimeRefused, match="No such file"):
        await runtime.copy_in({"work/up": b"changed", "work/out": b"changed"})
    with pytest.raises(RuntimeRefused, match="No such file"):
        await runtime.copy_out("work/out")
    with pytest.raises(RuntimeRefused, match="Too many levels"):
        await runtime.copy_out("work/root")
    with pytest.raises(RuntimeRefused, match="neither a file nor a folder"):
        await runtime.copy_out("work/pipe")
    with pytest.raises(RuntimeRefused, match=r"without '\.\.'"):
        await runtime.copy_in({"work/../../x": b""})
    assert "pipe" not in await runtime.copy_out("work")
    assert outside.read_text() == "as it was"
    await runtime.copy_in({"work/two": RuntimeFile(link="/etc/passwd")})
    assert (await said(runtime, "cat two")).startswith("agent:")
