"""`POST /v1/score` of the real service process: throughput, latency at half the load, overload, memory.

    .venv/bin/python -m benchmarks.reward_service [--seconds N] [--minutes N] [--write]

Batches of 64 `exact_match` items. First clients that wait for their answers: what the service can do. Then requests
that start when they are due, with latency from that moment: at half of the demanded 5,000 items/s, and at twice what
the service can do. With --minutes also its memory under the half load. Results go to benchmarks/results/.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.open_loop import LoadResult, RepeatedRequest, closed_loop, open_loop, percentile

RESULTS = Path(__file__).with_name("results")
BATCH = 64
DEMANDED_ITEMS_PER_S = 5000
DEMANDED_P99_MS = 50
_COMMAND = (sys.executable, "-c", "from reward_service.command import main; main()")


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Results of a phase. Latencies are of answers with status 200, and of those with 429; `late`: of the sender
    itself.
    """

    offered_items_per_s: float | None
    scored_items_per_s: float
    statuses: dict[int, int]
    wrong_answers: int
    p50_ms: float
    p99_ms: float
    refused_p99_ms: float
    late_p99_ms: float


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Resident memory of the service, sampled evenly under the half load."""

    minutes: float
    mib: tuple[float, ...]

    @property
    def growth_mib(self) -> float:
        """Mean of the last quarter less that of the second: the first holds the start."""
        quarter = max(1, len(self.mib) // 4)
        second, last = self.mib[quarter : 2 * quarter], self.mib[-quarter:]
        return sum(last) / len(last) - sum(second) / len(second)


def main() -> None:
    """Runs all phases; prints what came out and, with --write, commits it to files."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder, _service(Path(folder)) as (process_id, port):
        phases, memory = asyncio.run(_measure(arguments, process_id=process_id, target=_target(port)))
    report = _report(phases, memory)
    print(report)
    if arguments.write:
        RESULTS.joinpath("reward_service.md").write_text(report, encoding="utf-8")
        values = {
            "batch": BATCH,
            "phases": {name: asdict(phase) for name, phase in phases.items()},
            "memory": None if memory is None else {**asdict(memory), "growth_mib": memory.growth_mib},
        }
        RESULTS.joinpath("reward_service.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--minutes", type=float, default=0.0, help="of the phase in which memory is watched; 0: none")
    parser.add_argument("--write", action="store_true", help="write the results to benchmarks/results/")
    return parser.parse_args()


async def _measure(
    arguments: argparse.Namespace, *, process_id: int, target: RepeatedRequest
) -> tuple[dict[str, Phase], Memory | None]:
    await closed_loop(target, clients=8, seconds=min(3.0, arguments.seconds))  # to warm up
    most = _phase(await closed_loop(target, clients=8, seconds=arguments.seconds), offered=None)
    half = await _offered(target, items_per_s=DEMANDED_ITEMS_PER_S / 2, seconds=arguments.seconds)
    double = await _offered(target, items_per_s=2 * most.scored_items_per_s, seconds=arguments.seconds)
    memory = await _memory(target, process_id, minutes=arguments.minutes) if arguments.minutes else None
    return {"most": most, "half": half, "twice": double}, memory


async def _offered(target: RepeatedRequest, *, items_per_s: float, seconds: float) -> Phase:
    return _phase(await open_loop(target, per_s=items_per_s / BATCH, seconds=seconds), offered=items_per_s)


async def _memory(target: RepeatedRequest, process_id: int, *, minutes: float) -> Memory:
    samples: list[float] = []
    slices = max(8, int(minutes * 6))
    for _ in range(slices):
        per_s = DEMANDED_ITEMS_PER_S / 2 / BATCH
        await open_loop(target, per_s=per_s, seconds=minutes * 60 / slices)
        samples.append(_resident_mib(process_id))
    return Memory(minutes=minutes, mib=tuple(samples))


def _phase(load: LoadResult, *, offered: float | None) -> Phase:
    scored, refused = load.latencies.get(200, []), load.latencies.get(429, [])
    return Phase(
        offered_items_per_s=offered,
        scored_items_per_s=len(scored) * BATCH / load.seconds,
        statuses=dict(load.statuses),
        wrong_answers=load.wrong,
        p50_ms=1000 * percentile(scored, 0.5),
        p99_ms=1000 * percentile(scored, 0.99),
        refused_p99_ms=1000 * percentile(refused, 0.99),
        late_p99_ms=1000 * percentile(load.late, 0.99),
    )


def _resident_mib(process_id: int) -> float:
    pages = int(Path(f"/proc/{process_id}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def _target(port: int) -> RepeatedRequest:
    items = [
        {
            "id": str(number),
            "verifier": "exact_match",
            "completion": f" the answer to question {number} is {number * number} ",
            "arguments": {"answer": f"the answer to question {number} is {number * number}"},
        }
        for number in range(BATCH)
    ]
    body = json.dumps({"items": items}).encode()
    head = f"POST /v1/score HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    return RepeatedRequest(host="127.0.0.1", port=port, request=head + body, expected=b'"reward":1.0', times=BATCH)


@contextmanager
def _service(folder: Path) -> Iterator[tuple[int, int]]:
    """The service's process id and port."""
    config = folder / "run.toml"
    config.write_text('[reward-service]\nsandbox = "off"\nhttp = { port = 0 }\n', encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [*_COMMAND, "--config", config], env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            lines = iter(process.stderr.readline, "")
            yield process.pid, next(int(at.group(1)) for line in lines if (at := re.search(r"http://\S+:(\d+)", line)))
        finally:
            process.terminate()


def _report(phases: dict[str, Phase], memory: Memory | None) -> str:
    rows = [
        f"| {name} | {_offer(phase)} | {phase.scored_items_per_s:.0f} | {phase.p50_ms:.1f} | {phase.p99_ms:.1f} "
        f"| {phase.refused_p99_ms:.1f} | {phase.late_p99_ms:.1f} | {_told(phase.statuses)} | {phase.wrong_answers} |"
        for name, phase in phases.items()
    ]
    lines = [
        f"# `/v1/score` of the reward service, `exact_match` in batches of {BATCH}",
        "",
        f"Demanded: {DEMANDED_ITEMS_PER_S} items/s, p99 under {DEMANDED_P99_MS} ms at half of that, 429s at twice what",
        "it can do. Latencies in ms, from the moment at which a request was due; `refused` are those of 429s;",
        "`sent late` is by how much the sender, which has one of the two cores, was itself behind.",
        "",
        "| load | offered items/s | scored items/s | p50 | p99 | p99 refused | p99 sent late | statuses | wrong |",
        "|---|---|---|---|---|---|---|---|---|",
        *rows,
        "",
        _memory_line(memory),
        "",
    ]
    return "\n".join(lines)


def _told(statuses: dict[int, int]) -> str:
    return ", ".join(f"{count} of {status}" for status, count in sorted(statuses.items()))


def _offer(phase: Phase) -> str:
    return "as fast as answered" if phase.offered_items_per_s is None else f"{phase.offered_items_per_s:.0f}"


def _memory_line(memory: Memory | None) -> str:
    if memory is None:
        return "Memory was not watched."
    return (
        f"Memory over {memory.minutes:g} minutes of the half load: {memory.mib[0]:.1f} MiB at first, "
        f"{memory.mib[-1]:.1f} MiB at the end; the last quarter less the second: {memory.growth_mib:+.1f} MiB."
    )


if __name__ == "__main__":
    main()
