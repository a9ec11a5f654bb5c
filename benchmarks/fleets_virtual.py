"""Fleets that no machine here could hold, under the simulator's virtual clock: does the run still keep all promises?

    python -m benchmarks.fleets_virtual [--sizes 10x10x100,300x10x1000,...] [--steps 4]

The learner's real event loop, ledger, journal, recovery, fleet and publisher, the env_services' real link, rollouts and
clients and the generators' real gate and joins run in one process, over a network and disks in memory; engines,
trainer and verifiers are scripted (docs/simulation.md). A size is generators x env_services x groups in flight. The
learner is killed in the middle, and resumes. Virtual times say how the protocol grows, with a network that delays
each message by a millisecond or so and CPUs that take no time; callbacks of the event loops say how the work grows, by
process. The generators' grow with their square: in the simulated collective each member that comes wakes all others.
CPU and memory are those of the whole simulated system, with what simulates it.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from benchmarks.machine import described_machine, peak_rss

RESULT = Path(__file__).with_name("results") / "fleets_virtual.md"
SIZES = "10x10x100,100x10x100,10x100x100,10x10x1000,100x10x1000,10x100x1000,300x10x1000,10x1000x1000"
STEP_S = 30.0


def measured(size: str, *, steps: int) -> dict[str, object]:
    """Simulates one size in this process. The simulation takes the place of much of the standard library."""
    from simulation.install import install

    install()
    from simulation.actors.cluster import LEARNER, ClusterSettings
    from simulation.checking.invariants import simulate
    from simulation.checking.scenario import Scenario, ScheduledFault
    from simulation.world.process import Process

    callbacks: Counter[str] = Counter()
    run_one = Process.run_one

    def counted(self: Process) -> bool:
        callbacks[self.name.partition("-")[0]] += 1
        return run_one(self)

    Process.run_one = counted  # type: ignore[method-assign]
    generators, env_services, in_flight = map(int, size.split("x"))
    settings = ClusterSettings(
        generators=generators,
        env_services=env_services,
        groups_per_step=max(8, in_flight // 4),
        capacity=max(1, in_flight // env_services),
        steps=steps,
        max_lag=4,
        pacing="full",
        announce_every_s=30.0,
        silence_s=120.0,
    )
    killed = ScheduledFault(at=2.5 * STEP_S, kind="kill", target=LEARNER)
    began = time.process_time()
    result = simulate(Scenario(seed=1, profile="fleet", settings=settings, step_s=STEP_S, faults=(killed,)))
    return {
        "size": size,
        "virtual_s": result.virtual_s,
        "learner": callbacks["learner"],
        "env": callbacks["env"],
        "gen": callbacks["gen"],
        "steps": result.steps,
        "groups": settings.groups_per_step * steps,
        "cpu_s": time.process_time() - began,
        "peak_mb": peak_rss() / 1e6,
        "violation": None if result.violation is None else str(result.violation),
    }


def row(found: dict[str, object]) -> str:
    """A line of the table."""
    generators, env_services, in_flight = str(found["size"]).split("x")
    numbers = {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
    return (
        f"| {generators} | {env_services} | {in_flight} | {found['steps']} | {found['violation'] or 'all kept'} | "
        f"{numbers['virtual_s']:.0f} | {numbers['learner']:,.0f} | {numbers['learner'] / numbers['groups']:.1f} | "
        f"{numbers['env']:,.0f} | {numbers['gen']:,.0f} | {numbers['cpu_s']:.1f} | {numbers['peak_mb']:.0f} |"
    )


def table(rows: list[str], *, command: str) -> str:
    """The results as Markdown."""
    return "\n".join(
        [
            "# Fleets under a virtual clock",
            "",
            f"`{command}`,",
            f"which says what is real in it. The learner is killed once and resumes. {described_machine()}.",
            "",
            "| generators | env_services | groups in flight | steps | promises | virtual s "
            "| callbacks: learner | a group | env_services | generators | CPU s | peak MB |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> None:
    """Each size in a process of its own; the table is written after each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleets_virtual", description=__doc__)
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        sys.stdout.write(json.dumps(measured(given.sizes, steps=given.steps)) + "\n")
        return
    command = f"python -m benchmarks.fleets_virtual --sizes {given.sizes} --steps {given.steps}"
    rows: list[str] = []
    for size in given.sizes.split(","):
        words = [
            sys.executable,
            "-m",
            "benchmarks.fleets_virtual",
            "--one",
            "--sizes",
            size,
            "--steps",
            str(given.steps),
        ]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(row(json.loads(done.stdout.splitlines()[-1])))
        print(rows[-1], flush=True)
        given.output.write_text(table(rows, command=command), encoding="utf-8")


if __name__ == "__main__":
    main()
