"""Cost of the sandbox, and a check that hostile programs leave nothing behind.

    .venv/bin/python -m benchmarks.sandbox [--rounds N] [--python /usr/bin/python3] [--cgroup auto|off|FOLDER]
    .venv/bin/python -m benchmarks.sandbox --hostile 1000 [--cgroup ..]

Both sides run `print(1)` on the same Python, in alternation: a plain subprocess of asyncio, and a program in the
sandbox. Latency is of one at a time, with a pause before each, in which the pool has a sandbox ready again; throughput
is of four workers that wait for nothing. Each round gives one difference of medians and one ratio; told are their
medians and the middle four fifths. A case of pytest is one test in one file, in a sandbox that has run nothing before.
Results go to benchmarks/results/.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import uvloop

from headway.supervisor import children
from reward_service.sandbox.pool import SandboxPool, open_sandboxes
from reward_service.verifier.program import ExecutionConfig, Program, RunLimits

RESULTS = Path(__file__).with_name("results")
PAUSE_S = 0.1
WORKERS = 4
PRINT = Program(argv=("python", "-c", "print(1)"))
PYTEST = Program(
    argv=("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_case.py"),
    files={"test_case.py": b"def test_sum():\n    assert 1 + 1 == 2\n"},
    limits=RunLimits(wall_s=60.0),
)

# Programs and their limits.
HOSTILE: Sequence[tuple[str, RunLimits]] = tuple(
    (source, RunLimits(wall_s=1.0, cpu_s=1.0, memory_mib=128, processes=16, disk_mib=4))
    for source in (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "x = []\nwhile True: x.append(bytearray(1 << 20))",
        "import os\nfor _ in range(8): os.fork()\nx = [bytearray(os.urandom(1 << 20)) for _ in range(100)]",
        "import time; time.sleep(100)",
        "import os\nwhile True: os.write(1, b'x' * 65536)",
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(100)",
        "import signal\nfor n in {*range(1, 32)} - {9, 19}: signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        "for n in range(10**6): open(f'/tmp/{n}', 'wb').write(b'x' * 100000)",
        "import os; os.kill(-1, 9)",
        "import os; os._exit(0)",
    )
)  # fmt: skip


def main() -> None:
    """Measures, prints, and writes the results."""
    arguments = _arguments()
    report = uvloop.run(_hostile(arguments) if arguments.hostile else _costs(arguments))
    name = "sandbox_hostile" if arguments.hostile else "sandbox"
    text = _table(report)
    print(text)
    (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="rounds of both sides")
    parser.add_argument("--runs", type=int, default=30, help="runs of each side in a round, for latency")
    parser.add_argument("--batch", type=int, default=200, help="runs of each side in a round, for throughput")
    parser.add_argument("--python", type=Path, default=Path("/usr/bin/python3"))
    parser.add_argument("--cgroup", default="auto")
    parser.add_argument("--hostile", type=int, default=0, help="hostile runs, in place of the measurement")
    return parser.parse_args()


async def _costs(arguments: argparse.Namespace) -> dict[str, object]:
    config = ExecutionConfig(concurrency=WORKERS, python=arguments.python, cgroup=arguments.cgroup, max_sessions=0)
    async with open_sandboxes(kind="required", config=config) as sandboxes:
        assert sandboxes is not None
        sandbox = sandboxes.programs

        async def plain() -> None:
            await _plain(arguments.python)

        async def boxed() -> None:
            ended = await sandbox.run(PRINT)
            assert ended.stdout == b"1\n", ended

        rounds = [
            await _round(plain, boxed, first=number % 2 == 0, arguments=arguments) for number in range(arguments.rounds)
        ]
        pytest_ms = [await _pytest_case(sandbox) for _ in range(arguments.runs)]
    return {
        "machine": _machine(),
        "python": str(arguments.python.resolve()),
        "cgroup": arguments.cgroup,
        "plain, ms": _spread([one["plain_ms"] for one in rounds]),
        "sandboxed, ms": _spread([one["boxed_ms"] for one in rounds]),
        "overhead, ms": _spread([one["boxed_ms"] - one["plain_ms"] for one in rounds]),
        f"plain, per second with {WORKERS} workers": _spread([one["plain_per_s"] for one in rounds]),
        f"sandboxed, per second with {WORKERS} workers": _spread([one["boxed_per_s"] for one in rounds]),
        "throughput, sandboxed over plain": _spread([one["boxed_per_s"] / one["plain_per_s"] for one in rounds]),
        "cold pytest case, ms": _spread(pytest_ms),
    }


Run = Callable[[], Awaitable[None]]


async def _round(plain: Run, boxed: Run, *, first: bool, arguments: argparse.Namespace) -> dict[str, float]:
    found: dict[str, float] = {}
    sides = (("plain", plain), ("boxed", boxed)) if first else (("boxed", boxed), ("plain", plain))
    taken: dict[str, list[float]] = {"plain": [], "boxed": []}
    for _ in range(arguments.runs):
        for name, run in sides:
            await asyncio.sleep(PAUSE_S)
            started = time.perf_counter()
            await run()
            taken[name].append(time.perf_counter() - started)
    for name, run in sides:
        found[f"{name}_ms"] = statistics.median(taken[name]) * 1000
        found[f"{name}_per_s"] = await _throughput(run, runs=arguments.batch)
    return found


async def _plain(python: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        python, "-c", "print(1)", env={"PATH": os.defpath, "LANG": "C.UTF-8"}, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    stdout, _ = await process.communicate()
    assert stdout == b"1\n", stdout


async def _throughput(run: Run, *, runs: int) -> float:
    left = iter(range(runs))

    async def work() -> None:
        for _ in left:
            await run()

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(WORKERS):
            group.create_task(work())
    return runs / (time.perf_counter() - started)


async def _pytest_case(sandbox: SandboxPool) -> float:
    await asyncio.sleep(PAUSE_S)
    started = time.perf_counter()
    ended = await sandbox.run(PYTEST)
    assert ended.exit_code == 0, ended
    return (time.perf_counter() - started) * 1000


async def _hostile(arguments: argparse.Namespace) -> dict[str, object]:
    """Hostile programs in turn, eight at once; what is left of them, and the memory of service and keepers."""
    with tempfile.TemporaryDirectory(prefix="headway-hostile-") as folder:
        os.chmod(folder, 0o755)
        tempfile.tempdir = folder
        before, mounts = _own_processes(), _mounts()
        config = ExecutionConfig(concurrency=8, cgroup=arguments.cgroup, packages=(), max_sessions=0)
        async with open_sandboxes(kind="required", config=config) as sandboxes:
            assert sandboxes is not None
            await _attack(sandboxes.programs, runs=len(HOSTILE) * 2)
            started = _memory_kib()
            memory = []
            for _ in range(10):
                await _attack(sandboxes.programs, runs=arguments.hostile // 10)
                memory.append(_memory_kib())
        left = {
            "processes": len(_own_processes() - before),
            "mounts": len(_mounts() - mounts),
            "files": len(os.listdir(folder)),
        }
    return {
        "machine": _machine(),
        "cgroup": arguments.cgroup,
        "hostile runs": arguments.hostile,
        **{f"{what} left": number for what, number in left.items()},
        "memory of service and keepers at the start, MiB": round(started / 1024, 1),
        "memory after each tenth, MiB": [round(kib / 1024, 1) for kib in memory],
    }


async def _attack(sandbox: SandboxPool, *, runs: int) -> None:
    async def run(number: int) -> None:
        source, limits = HOSTILE[number % len(HOSTILE)]
        await sandbox.run(Program(argv=("python", "main.py"), files={"main.py": source.encode()}, limits=limits))

    left = iter(range(runs))

    async def work() -> None:
        for number in left:
            await run(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(work())


def _own_processes() -> set[int]:
    return {child.pid for child in children()}


def _mounts() -> set[str]:
    return set(Path("/proc/self/mountinfo").read_text().splitlines())


def _memory_kib() -> int:
    total = 0
    for pid in (os.getpid(), *_own_processes()):
        status = Path(f"/proc/{pid}/status").read_text()
        total += next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")), 0)
    return total


def _spread(values: Sequence[float]) -> dict[str, float]:
    """The median, and between what the middle four fifths lie."""
    if len(values) < 2:
        return {"median": round(values[0], 3), "from": round(values[0], 3), "to": round(values[0], 3)}
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return {"median": round(statistics.median(values), 3), "from": round(tenths[0], 3), "to": round(tenths[-1], 3)}


def _machine() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}, load {os.getloadavg()[0]:.1f}"


def _table(report: dict[str, object]) -> str:
    lines = ["# Sandbox", "", "| what | value |", "|---|---|"]
    for name, value in report.items():
        if isinstance(value, dict):
            value = f"{value['median']:g} ({value['from']:g} to {value['to']:g})"
        lines.append(f"| {name} | {value} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
