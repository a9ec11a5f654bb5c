"""Cost of runtimes: a hundred at once with agents that sleep, how fast they start, what each holds, what a kill leaves.

    .venv/bin/python -m benchmarks.runtimes [--count 100] [--rounds 5] [--image host] [--images FOLDER] [--write]

A service of its own opens the pool, starts all of them as fast as it can, and has each run `sleep 3600` by its shell.
Memory is that of keepers, bubblewrap and first processes, what they have by themselves and their part of what they
share (PSS), with what the service has grown by; the kernel's own is not in it. Then the service gets SIGKILL, and its
processes are counted after a second and after ten; mounts that are left, at the end. Single starts and commands come
before, one at a time. Each round is a new service.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import described_machine, rss
from env_service.runtimes.config import RuntimeLimits, RuntimesConfig
from env_service.runtimes.interface import Runtime, RuntimeCommand
from env_service.runtimes.pool import RuntimePool

RESULTS = Path(__file__).with_name("results")
SINGLE = 20
AGENT = RuntimeCommand(argv=("sh", "-c", "sleep 3600 & echo $!"))


def main() -> None:
    """Measures, prints, and writes the results if asked to."""
    given = _arguments()
    if given.service:
        asyncio.run(_serve(given))
        return
    rounds = [_round(given) for _ in range(given.rounds)]
    text = _table(given, rounds)
    print(text)
    if given.write:
        (RESULTS / "runtimes.md").write_text(text, encoding="utf-8")
        (RESULTS / "runtimes.json").write_text(json.dumps(rounds, indent=1) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--image", default="host")
    parser.add_argument("--images", type=Path, default=Path("runtimes"))
    parser.add_argument("--cgroup", default="auto")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--service", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


async def _serve(given: argparse.Namespace) -> None:
    """The service: it tells its numbers in a line of JSON, and sleeps."""
    limits = RuntimeLimits(memory_mib=64, disk_mib=32)
    memory_mib = given.count * (limits.memory_mib + limits.disk_mib)
    pool = RuntimePool(
        RuntimesConfig(folder=given.images, spare=0, cgroup=given.cgroup, memory_mib=memory_mib, limits=limits)
    )
    await pool.open()
    starts, commands = [], []
    for _ in range(SINGLE):
        begun = time.perf_counter()
        runtime = await pool.start(given.image)
        starts.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        await runtime.exec(RuntimeCommand(argv=("true",)))
        commands.append(time.perf_counter() - begun)
        await runtime.stop()
    before, spent_before = rss(), _cpu_s([os.getpid(), *_below(os.getpid())])
    begun = time.perf_counter()
    runtimes = await asyncio.gather(*(pool.start(given.image) for _ in range(given.count)))
    stood = time.perf_counter() - begun
    spent = _cpu_s([os.getpid(), *_below(os.getpid())]) - spent_before
    await asyncio.gather(*map(_put_to_sleep, runtimes))
    told = {
        "cpu_ms": spent / given.count * 1000,
        "start_ms": statistics.median(starts) * 1000,
        "command_ms": statistics.median(commands) * 1000,
        "per_s": given.count / stood,
        "grown": rss() - before,
    }
    print(json.dumps(told), flush=True)
    await asyncio.sleep(3600)


async def _put_to_sleep(runtime: Runtime) -> None:
    end = await runtime.exec(AGENT)
    assert end.exit_code == 0, end


def _round(given: argparse.Namespace) -> dict[str, float]:
    words = ["--count", str(given.count), "--image", given.image, "--images", str(given.images)]
    command = [sys.executable, "-m", "benchmarks.runtimes", *words, "--cgroup", given.cgroup, "--service"]
    mounts = _mounts()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        try:
            assert service.stdout is not None
            found: dict[str, float] = json.loads(service.stdout.readline())
            below = _below(service.pid)
            agents = [pid for pid in below if _is_agent(pid)]
            assert len(agents) == given.count, f"{len(agents)} agents sleep"
            own = sum(_pss(pid) for pid in below if pid not in agents)
        finally:
            service.send_signal(signal.SIGKILL)
    found["processes"] = len(below)
    found["own_mib"] = (own + found.pop("grown")) / given.count / 2**20
    for name, wait_s in (("left_after_1_s", 1.0), ("left_after_10_s", 9.0)):
        time.sleep(wait_s)
        found[name] = sum(_is_there(pid) for pid in below)
    found["mounts_left"] = _mounts() - mounts
    return found


def _below(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    found = [int(child) for told in tasks for child in told.read_text(encoding="ascii").split()]
    return [*found, *(each for child in found for each in _below(child))]


def _is_agent(pid: int) -> bool:
    return b"sleep\0003600" in Path(f"/proc/{pid}/cmdline").read_bytes()


def _is_there(pid: int) -> bool:
    try:
        return b") Z" not in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False


def _pss(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def _cpu_s(pids: Sequence[int]) -> float:
    """CPU time of processes."""
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[0]) for pid in pids) / 1e9


def _mounts() -> int:
    return len(Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines())


def _table(given: argparse.Namespace, rounds: Sequence[dict[str, float]]) -> str:
    rows = (
        ("started per second, all at once", "per_s", "{:.1f}", "20 or more"),
        ("CPU of a start, in processes that stay, ms", "cpu_ms", "{:.0f}", "100, for 20 a second on two cores"),
        ("one start by itself, ms", "start_ms", "{:.0f}", ""),
        ("a command that does nothing, ms", "command_ms", "{:.1f}", ""),
        ("memory of each beyond its agent, MiB (PSS)", "own_mib", "{:.1f}", "30 or less"),
        ("processes, agents among them", "processes", "{:.0f}", ""),
        ("processes left 1 s after SIGKILL", "left_after_1_s", "{:.0f}", ""),
        ("processes left 10 s after SIGKILL", "left_after_10_s", "{:.0f}", "0"),
        ("mounts left", "mounts_left", "{:.0f}", "0"),
    )
    lines = [
        "# Runtimes",
        "",
        f"{given.count} runtimes of the image `{given.image}` at once, each with an agent that sleeps; cgroup "
        f"`{given.cgroup}`, {len(rounds)} rounds, as user {os.getuid()}, nice {os.nice(0)}. {described_machine()}.",
        "",
        "| what | median | least to most | wanted |",
        "|---|---|---|---|",
    ]
    for what, key, form, wanted in rows:
        values = [one[key] for one in rounds]
        spread = " to ".join(map(form.format, (min(values), max(values))))
        lines.append(f"| {what} | {form.format(statistics.median(values))} | {spread} | {wanted} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
