"""Cost of a learner by its fleet: generators, env_services and groups in flight, from ten to a hundred thousand.

    python -m benchmarks.fleets [--against OTHER] [--sizes 10x10x1000,...]

Two processes on this machine. One is a learner's whole event loop (`fleets_learner`): ledger, intake, journal on
disk, fleet, publisher, HTTP; its trainer trains nothing, and its collective sends nothing. In the other are all
generators and env_services, by script (`fleets_peers`), each with sockets of its own, over loopback. OTHER is a folder
with another commit, whose learner is measured in turn. A size is generators x env_services x groups in flight.

First all env_services say hello, then all generators announce themselves; then there are only announcements and
heartbeats (standing); then groups come in at a fixed rate (working), and meanwhile weights are published, twice. At
last one generator joins. Late is the event loop behind its clock; busy is the CPU that its thread used in between,
which other processes on the machine do not change. Both are looked at every 10 ms.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import described_machine

HERE = Path(__file__).parents[1]
RESULT = HERE / "benchmarks/results/fleets.md"
SIZES = (
    "10x10x1000,100x10x1000,1000x10x1000,10x100x1000,10x1000x1000,10x100x10000,10x100x100000,1000x1000x10000,"
    "1000x1000x100000"
)
RATE = 100
STANDING_S, WORKING_S = 6.0, 12.0
HEAD = (
    "code", "generators", "env_services", "groups in flight", "all generators serve, s (CPU s)",
    "busy meanwhile: p99, max, ms", "told meanwhile: messages, kB an env_service", "standing: % of a core",
    "CPU ms a group", "busy while working: p50, p99, max, ms", "late: p50, p99, ms", "two publishes, s (CPU s)",
    "one joins: told after ms, messages, kB an env_service", "memory alone, + env_services, + the rest, MB",
)  # fmt: skip


class FleetSide:
    """The learner's process or the peers'; a context manager that ends it."""

    def __init__(self, module: str, *options: str, checkout: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{checkout}", "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / f"benchmarks/{module}.py"), *options],
            cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.first = self._read()

    def __enter__(self) -> "FleetSide":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a side ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def say(self, line: str) -> None:
        """Asks, and does not wait for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def ask(self, line: str) -> dict[str, Any]:
        """Asks, and waits."""
        self.say(line)
        return self._read()


def measured(size: str, *, checkout: Path) -> dict[str, Any]:
    """All phases at one size."""
    generators, envs, in_flight = map(int, size.split("x"))
    found: dict[str, Any] = {"size": size}
    learning = FleetSide("fleets_learner", "--in-flight", str(in_flight), checkout=checkout)
    with learning as learner:
        where = learner.first
        with FleetSide("fleets_peers", "--zmq", where["zmq"], "--http", where["http"], "--model", where["model"],
                  checkout=HERE) as peers:  # fmt: skip

            def phase(name: str, **more: Any) -> None:
                found[name] = {**learner.ask("window"), **peers.ask("counts"), **more}

            learner.ask("publish")
            found["memory_alone"] = learner.ask("memory")["bytes"]
            learner.ask("window")
            phase("hello", **peers.ask(f"envs {envs} {max(1, in_flight // envs)}"))
            found["memory_envs"] = learner.ask("memory")["bytes"]
            learner.ask("window")
            phase("start", **peers.ask(f"generators {generators}"))
            phase("filling", **peers.ask(f"filled {in_flight}"))
            found["memory_all"] = learner.ask("memory")["bytes"]
            learner.ask("window")
            time.sleep(STANDING_S)
            phase("standing")
            peers.ask(f"rate {RATE}")
            time.sleep(WORKING_S)
            phase("working")
            publishes = [learner.ask("publish")]
            phase("publishing")
            publishes.append(learner.ask("publish"))
            peers.ask("rate 0")
            found["publish_s"] = [one["seconds"] for one in publishes]
            found["publish_cpu_s"] = [one["cpu_s"] for one in publishes]
            phase("drained", **peers.ask("drained"))
            time.sleep(1.5)
            phase("between")
            phase("one_join", **peers.ask("generators 1"))
    return found


def row(found: dict[str, Any], *, code: str) -> str:
    """A line of the table, from the numbers of one measurement."""
    generators, envs, in_flight = found["size"].split("x")
    start, standing, working, join = (found[name] for name in ("start", "standing", "working", "one_join"))
    told, bytes_told = start["received"].get("fleet", (0, 0))
    again, bytes_again = join["received"].get("fleet", (0, 0))
    groups = max(1, working["accepted"] - standing["accepted"])
    idle = standing["cpu_s"] / standing["wall_s"]
    late, busy, started = working["late_ms"], working["busy_ms"], start["busy_ms"]
    cells = (
        code, generators, envs, in_flight,
        f"{start['serving_s']:.1f} ({start['cpu_s']:.2f})", f"{started['p99']:.0f}, {started['max']:.0f}",
        f"{told / int(envs):.1f}, {bytes_told / int(envs) / 1000:.1f}", f"{100 * idle:.1f}",
        f"{1000 * (working['cpu_s'] - idle * working['wall_s']) / groups:.2f}",
        f"{busy['p50']:.1f}, {busy['p99']:.0f}, {busy['max']:.0f}", f"{late['p50']:.0f}, {late['p99']:.0f}",
        ", ".join(f"{s:.2f} ({cpu:.2f})" for s, cpu in zip(found["publish_s"], found["publish_cpu_s"], strict=True)),
        f"{1000 * join['told_after_s']:.0f}, {again / int(envs):.0f}, {bytes_again / int(envs) / 1000:.1f}",
        f"{found['memory_alone'] / 1e6:.0f}, {(found['memory_envs'] - found['memory_alone']) / 1e6:.1f}, "
        f"{(found['memory_all'] - found['memory_envs']) / 1e6:.1f}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def report(lines: list[str], *, command: str) -> str:
    """The table as Markdown."""
    return "\n".join(
        [
            "# Fleets of a thousand", "",
            f"`{command}`, which says what each side is, and what late and busy are. {described_machine()}.", "",
            f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD), *lines, "",
        ]
    )  # fmt: skip


def main() -> None:
    """Measures all sizes, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleets", description=__doc__)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--raw", type=Path, help="a file to which all that was measured is added, as JSON")
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    lines = []
    for size in given.sizes.split(","):
        for checkout in filter(None, (given.against, HERE)):
            found = measured(size, checkout=checkout.resolve())
            if given.raw is not None:
                with given.raw.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"code": str(checkout), **found}) + "\n")
            lines.append(row(found, code="this" if checkout == HERE else "other"))
            print(lines[-1], flush=True)
            given.output.write_text(
                report(lines, command=f"python -m {' '.join(['benchmarks.fleets', *sys.argv[1:]])}")
            )


if __name__ == "__main__":
    main()
