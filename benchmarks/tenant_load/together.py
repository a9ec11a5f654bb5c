"""Eight clients of the Tinker API, which think between their steps: together, and one after another.

    python -m benchmarks.tenant_load.together [--tenants N] [--steps N] [--think S ...] [--rounds N] [--output FILE]

Each is a process with the unmodified SDK (`make tinker-sdk`), its own key, adapter (of rank 4, 8 or 12, on all layers)
and data; the server is a learner on a random Qwen3 of 2 layers x 64. A step is a forward_backward by cross-entropy of 1
or 8 sequences of 32 tokens, and an optim_step. In every round the same training models are made anew for either way, so
that losses must be equal; rounds alternate, and times are their medians.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import described_machine
from benchmarks.result_files import print_and_write
from benchmarks.tenant_load.server import MODEL, TenantServer, key_of, serving

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build" / "tinker-sdk" / "bin" / "python"
CLIENT = Path(__file__).with_name("sdk_client.py")
RESULTS = ROOT / "benchmarks" / "results" / "tenant_load.md"
GOALS = {8: 4.0, 1: 6.0}
"""Times as fast together, by rows of a step, with 50 ms between steps."""


@dataclass(frozen=True)
class WayCost:
    """A way of a round: steps a second of all, milliseconds of CPU a step in the server and in the clients, shared
    passes for an operation, and the last loss of each tenant.
    """

    rate: float
    server_ms: float
    client_ms: float
    passes: float
    losses: tuple[float, ...]


@dataclass(frozen=True)
class LoadComparison:
    """Both ways of some rounds."""

    rows: int
    think: float
    apart: Sequence[WayCost]
    together: Sequence[WayCost]

    @property
    def times(self) -> float:
        """Speed-up of being together, the median over the rounds."""
        return statistics.median(b.rate / a.rate for a, b in zip(self.apart, self.together, strict=True))

    @property
    def gap(self) -> float:
        """The largest difference of a loss between the ways."""
        pairs = [zip(a.losses, b.losses, strict=True) for a, b in zip(self.apart, self.together, strict=True)]
        return max(abs(one - other) for pair in pairs for one, other in pair)


class SdkClient:
    """A tenant's process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def tell(self, line: str) -> None:
        """Have it do something; `answer` waits for the end."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The answer to a line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("error: a client has ended; what it said is above")
        found: dict[str, Any] = json.loads(line)
        return found


def main() -> None:
    """Measures all combinations, prints and writes the table."""
    arguments = _arguments()
    if not PYTHON.exists():
        sys.exit("error: build/tinker-sdk is not there: `make tinker-sdk` makes it")
    found = [each for rows in (8, 1) for each in _measured(arguments, rows)]
    print_and_write(_report(found, arguments), arguments.output)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--think", type=float, nargs="+", default=[0.05, 0.0], help="seconds between steps")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help=f"file for the table, such as {RESULTS.relative_to(ROOT)}")
    return parser.parse_args()


def _measured(arguments: argparse.Namespace, rows: int) -> Iterator[LoadComparison]:
    names = [f"tenant-{number}" for number in range(arguments.tenants)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tenant-load-")))
        server = stack.enter_context(serving(folder, names))
        clients = stack.enter_context(sdk_clients(server.url, names, rows))
        for think in arguments.think:
            apart, together = [], []
            for _ in range(arguments.rounds):
                apart.append(_one_way(server, clients, arguments.steps, think, together=False))
                together.append(_one_way(server, clients, arguments.steps, think, together=True))
            yield LoadComparison(rows, think, apart, together)


@contextmanager
def sdk_clients(url: str, names: Sequence[str], rows: int) -> Iterator[list[SdkClient]]:
    """Clients that are ready, with keys of these names."""
    with ExitStack() as stack:
        clients = []
        for number, name in enumerate(names):
            command = [str(PYTHON), str(CLIENT), url, key_of(name), MODEL, str(number), str(rows)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            clients.append(SdkClient(process))
        for client in clients:
            client.answer()
        yield clients


def _one_way(
    server: TenantServer, clients: Sequence[SdkClient], steps: int, think: float, *, together: bool
) -> WayCost:
    for client in clients:
        client.tell("new")
        client.answer()
    before, used = server.counts(), server.cpu_s
    took, answers = trained(clients, steps, think, together=together)
    used, after = server.cpu_s - used, server.counts()
    total = steps * len(clients)
    operations = after["tenant_passes"] - before["tenant_passes"]
    return WayCost(
        rate=total / took,
        server_ms=1e3 * used / total,
        client_ms=1e3 * sum(each["cpu"] for each in answers) / total,
        passes=(after["tenant_rounds"] - before["tenant_rounds"]) / operations,
        losses=tuple(each["loss"] for each in answers),
    )


def trained(
    clients: Sequence[SdkClient], steps: int, think: float, *, together: bool
) -> tuple[float, list[dict[str, Any]]]:
    """Seconds that so many steps of each client take, and what each says of them."""
    took, answers = 0.0, []
    for group in [clients] if together else [[client] for client in clients]:
        for client in group:
            client.tell(f"go {steps} {think}")
        found = [client.answer() for client in group]
        took += max(each["took"] for each in found)
        answers += found
    return took, answers


def _report(found: Sequence[LoadComparison], arguments: argparse.Namespace) -> str:
    lines = [
        "# Clients of the Tinker API together and one after another",
        "",
        f"`python -m benchmarks.tenant_load.together`: {arguments.tenants} clients with the SDK, "
        f"{arguments.steps} steps each, medians of {arguments.rounds} rounds. {described_machine()}.",
        "",
        "| rows of a step, ms between steps | one after another, steps/s | together, steps/s | times as fast | goal | "
        "CPU of the server a step, ms: one after another, together | CPU of the client a step, ms | "
        "passes an operation: one after another, together | largest gap of a loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for each in found:
        goal = f"{GOALS[each.rows]:g}" if each.think == 0.05 else ""
        cells = [
            f"{each.rows}, {1e3 * each.think:g}",
            f"{_median(each.apart, 'rate'):.1f}",
            f"{_median(each.together, 'rate'):.1f}",
            f"{each.times:.2f}",
            goal,
            f"{_median(each.apart, 'server_ms'):.1f}, {_median(each.together, 'server_ms'):.1f}",
            f"{_median(each.together, 'client_ms'):.1f}",
            f"{_median(each.apart, 'passes'):.2f}, {_median(each.together, 'passes'):.2f}",
            f"{each.gap:.1e}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _median(costs: Sequence[WayCost], name: str) -> float:
    return statistics.median(float(getattr(cost, name)) for cost in costs)


if __name__ == "__main__":
    main()
