"""Cost of a generator's start on a CPU: with its engine forked from a process that has vLLM imported, and spawned.

    .venv/bin/python -m benchmarks.generator_start [--rounds 3] [--model models/addition]

A start is from the command to the first answer of `/v1/state`. Both ways alternate; CPU seconds are those of the
generator's processes, which other load disturbs less than the time. Memory counts a page that several share once (Pss).
Results go to benchmarks/results/generator_start.md.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.machine import described_machine
from benchmarks.result_files import print_and_write
from services.local_processes import family_of, usage_of
from services.process import parent_death_signal
from tests.e2e.run_files import free_ports

RESULTS = Path(__file__).with_name("results")
WAYS = {"forked": "", "spawned": "vars(command)['open_fork_server'] = lambda: None; "}
_LONGEST_S = 600.0


@dataclass(frozen=True)
class Start:
    """Seconds of the clock and of a core until a generator answered, and MiB that its processes held then."""

    wall_s: float
    cpu_s: float
    memory_mib: float


def main() -> None:
    """Measures, prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, default=Path("models/addition"))
    arguments = parser.parse_args()
    found: dict[str, list[Start]] = {way: [] for way in WAYS}
    for _ in range(arguments.rounds):
        for way, starts in found.items():
            starts.append(_started(way, arguments.model))
            print(f"{way}: {starts[-1]}", flush=True)
    print_and_write(_report(found), RESULTS / "generator_start.md")


def _started(way: str, model: Path) -> Start:
    (port,) = free_ports(1)
    program = f"from generator import command; {WAYS[way]}command.main()"
    words = ["--model", str(model), "--http.port", str(port), "--openai", "false"]
    with tempfile.TemporaryFile() as output:
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-c", program, *words], stdout=output, stderr=output, preexec_fn=parent_death_signal
        )
        try:
            while not _answers(port):
                if process.poll() is not None or time.monotonic() - began > _LONGEST_S:
                    output.seek(0)
                    raise SystemExit(f"the generator did not start:\n{output.read().decode(errors='replace')}")
                time.sleep(0.1)
            wall_s = time.monotonic() - began
            return Start(wall_s, usage_of(process.pid)[0], sum(map(_pss_mib, family_of(process.pid))))
        finally:
            process.terminate()
            process.wait()


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/v1/state", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def _pss_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def _report(found: dict[str, list[Start]]) -> str:
    lines = [
        "# What a generator's start costs on a CPU",
        "",
        f"`python -m benchmarks.generator_start`: medians of {len(found['forked'])} starts each way, alternated, and "
        f"each of them. {described_machine()}.",
        "",
        "| engine | CPU s | s | MiB |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {way} | {_told([each.cpu_s for each in starts])} | {_told([each.wall_s for each in starts])} | "
        f"{_told([each.memory_mib for each in starts])} |"
        for way, starts in found.items()
    ]
    return "\n".join(lines) + "\n"


def _told(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({', '.join(f'{value:.1f}' for value in values)})"


if __name__ == "__main__":
    main()
