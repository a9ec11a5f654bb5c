"""The Tinker API of Headway beside that of another server, with the same clients.

    python -m benchmarks.tenant_load.beside --url URL --pids PID ... --name NAME [--tenants N] [--rows N] [--steps N]

The other server listens at the URL, its processes are those named, and it serves a model of the shape that
`benchmarks.tenants.written_model` writes, under the name `tiny`; how SkyRL's is started on CPUs stands in
results/tenant_beside.md. Clients are those of `benchmarks.tenant_load.together`, with adapters of one rank, and do not
think between steps. One alone and all together take turns on both servers; the median of the rounds is given.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks import cpu_time
from benchmarks.machine import described_machine
from benchmarks.result_files import print_and_write
from benchmarks.tenant_load.server import serving
from benchmarks.tenant_load.together import SdkClient, sdk_clients, trained

_RANK = "8"


@dataclass(frozen=True)
class ServedSteps:
    """Steps a second of all clients, and milliseconds of the server's CPU for one."""

    rate: float
    cpu_ms: float


def main() -> None:
    """Measures both servers, prints and writes the table."""
    arguments = _arguments()
    os.environ["TENANT_RANK"] = _RANK
    names = [f"tenant-{number}" for number in range(arguments.tenants)]
    found: dict[tuple[str, int], list[ServedSteps]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tenant-beside-")))
        ours = stack.enter_context(serving(folder, names))
        sides: list[tuple[str, str, Callable[[], float]]] = [
            ("Headway", ours.url, lambda: ours.cpu_s),
            (arguments.name, arguments.url, lambda: sum(map(cpu_time.of_process, arguments.pids))),
        ]
        clients = {name: stack.enter_context(sdk_clients(url, names, arguments.rows)) for name, url, _ in sides}
        for each in clients.values():
            for client in each:
                client.tell("new")
                client.answer()
        for _ in range(arguments.rounds + 1):  # the first warms up
            for name, _, cpu_s in sides:
                for count in (1, arguments.tenants):
                    steps = _steps(clients[name][:count], arguments.steps, cpu_s)
                    found.setdefault((name, count), []).append(steps)
    print_and_write(_report(found, arguments), arguments.output)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--pids", type=int, nargs="+", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--tenants", type=int, default=2)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def _steps(clients: Sequence[SdkClient], steps: int, cpu_s: Callable[[], float]) -> ServedSteps:
    used = cpu_s()
    took, _ = trained(clients, steps, 0.0, together=True)
    total = steps * len(clients)
    return ServedSteps(rate=total / took, cpu_ms=1e3 * (cpu_s() - used) / total)


def _report(found: dict[tuple[str, int], list[ServedSteps]], arguments: argparse.Namespace) -> str:
    lines = [
        f"# The Tinker API of Headway and of {arguments.name}",
        "",
        f"`python -m benchmarks.tenant_load.beside`: steps of {arguments.rows} rows of 32 tokens, adapters of rank "
        f"{_RANK}, {arguments.steps} steps a client, medians of {arguments.rounds} rounds. {described_machine()}.",
        "",
        f"| clients | Headway, steps/s | {arguments.name}, steps/s | times as fast | CPU of the server a step, ms: "
        f"Headway, {arguments.name} | times less |",
        "|---|---|---|---|---|---|",
    ]
    for count in (1, arguments.tenants):
        ours, theirs = (found[name, count][1:] for name in ("Headway", arguments.name))
        rates = [statistics.median(each.rate for each in side) for side in (ours, theirs)]
        costs = [statistics.median(each.cpu_ms for each in side) for side in (ours, theirs)]
        lines.append(
            f"| {count} | {rates[0]:.1f} | {rates[1]:.1f} | {rates[0] / rates[1]:.1f} | {costs[0]:.1f}, {costs[1]:.1f} "
            f"| {costs[1] / costs[0]:.1f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
