"""Samples of a client of the Tinker API: how soon after a save the first token comes, and what a completion costs.

    python -m benchmarks.tenant_load.samples [--model FOLDER] [--rank N] [--rounds N] [--completions N] [--output FILE]

`headway serve` with the real engine, and the unmodified SDK (`make tinker-sdk`) in a process of its own. Some
rounds save snapshots, others an inflight target. Completions of 8 tokens from the base model are asked of the server by
the SDK, and all at once by this process of the generator, by its route for learners and by the one for adapters, in
turns: CPU of generator and learner for each.
"""

import argparse
import asyncio
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import cpu_time
from benchmarks.machine import described_machine
from benchmarks.result_files import print_and_write
from benchmarks.tenant_load.server import end_server
from benchmarks.tenant_load.together import PYTHON, SdkClient
from headway.serve_command import free_port
from headway.served_folder import noted_targets
from protocol.adapters import AdapterSampleRequest
from protocol.generation import GenerateRequest, Sampling
from protocol.model import WireModel
from services.process import parent_death_signal

ROOT = Path(__file__).parents[2]
CLIENT = Path(__file__).with_name("sampling_client.py")
RESULTS = ROOT / "benchmarks" / "results" / "tenant_samples.md"
NAME = "addition"
GOAL_S = 1.0
"""From the call of the save to the first token of the new weights."""
_PROMPT = (3, 4, 5, 6, 7, 8)
_LENGTH = 8
_UP_S = 300.0


@dataclass(frozen=True)
class ServedModel:
    """`headway serve`, ready: what it tells a client to set, its generator's address and token, and its processes."""

    told: dict[str, str]
    generator: str
    token: str
    processes: dict[str, list[int]]

    def cpu_s(self, kind: str) -> float:
        """CPU seconds so far of the processes of a kind: generator, learner."""
        return sum(cpu_time.of_process(pid) for pid in self.processes[kind])


@dataclass(frozen=True)
class RouteCost:
    """Milliseconds of CPU a completion in generator and learner, and completions a second."""

    generator_ms: float
    learner_ms: float
    rate: float


def main() -> None:
    """Measures, prints and writes the table."""
    arguments = _arguments()
    if not PYTHON.exists():
        sys.exit("error: build/tinker-sdk is not there: `make tinker-sdk` makes it")
    costs: dict[str, list[RouteCost]] = {name: [] for name in ("the SDK, of the server", *_ROUTES)}
    with (
        tempfile.TemporaryDirectory(prefix="tenant-samples-") as folder,
        served_model(Path(folder), arguments.model) as served,
        _client(served, arguments.rank) as client,
    ):
        firsts = {kind: _firsts(client, kind, arguments.rounds) for kind in ("snapshot", "inflight")}
        for _ in range(3):
            costs["the SDK, of the server"].append(_by_sdk(served, client, arguments.completions))
            for route in _ROUTES:
                costs[route].append(asyncio.run(_of_generator(served, arguments.completions, route)))
    print_and_write(_report(firsts, costs, arguments), arguments.output)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "addition")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--completions", type=int, default=256)
    parser.add_argument("--output", type=Path, help=f"file for the table, such as {RESULTS.relative_to(ROOT)}")
    return parser.parse_args()


@contextmanager
def served_model(folder: Path, model: Path) -> Iterator[ServedModel]:
    """The server on a model, its state in the folder."""
    command = [
        str(Path(sys.executable).with_name("headway")), "serve", str(model), "--name", NAME, "--port", str(free_port()),
        "--run.directory", str(folder / "runs"),
    ]  # fmt: skip
    log = folder / "server.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, preexec_fn=parent_death_signal)
    try:
        _wait_until(process, log, f"base model: {NAME}\n")
        told = dict(re.findall(r"^export (TINKER_\w+)=(\S+)$", log.read_text(encoding="utf-8"), re.MULTILINE))
        generator = next(each for each in noted_targets(folder / "runs" / "serve") if each.kind == "generator")
        assert generator.token is not None, "of a server that headway serve has started"
        yield ServedModel(told, generator.url, generator.token.get_secret_value(), _processes_of(process.pid))
    finally:
        end_server(process)


def _wait_until(process: subprocess.Popen[bytes], log: Path, said: str) -> None:
    end = time.monotonic() + _UP_S
    while said not in log.read_text(encoding="utf-8"):
        if time.monotonic() > end or process.poll() is not None:
            sys.exit(f"error: the server did not get ready\n{log.read_text(encoding='utf-8')[-3000:]}")
        time.sleep(0.2)


def _processes_of(pid: int) -> dict[str, list[int]]:
    """All processes below this one, by the program of the child that they belong to."""
    found: dict[str, list[int]] = {}
    for child in _children(pid):
        words = Path(f"/proc/{child}/cmdline").read_bytes().decode().replace("\0", " ")
        kind = "generator" if "/generator " in words else "learner"
        found.setdefault(kind, []).extend(_family(child))
    return found


def _family(pid: int) -> list[int]:
    return [pid, *(each for child in _children(pid) for each in _family(child))]


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    return [int(each) for task in tasks.iterdir() for each in (task / "children").read_text().split()]


@contextmanager
def _client(served: ServedModel, rank: int) -> Iterator[SdkClient]:
    process = subprocess.Popen(
        [str(PYTHON), "-W", "ignore", str(CLIENT), NAME, str(rank)],
        env={**os.environ, **served.told}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        client = SdkClient(process)
        client.answer()
        yield client
    finally:
        process.kill()
        process.wait()


def _firsts(client: SdkClient, kind: str, rounds: int) -> list[dict[str, float]]:
    found = []
    for _ in range(rounds + 1):
        client.tell(f"first {kind}")
        found.append(client.answer())
    return found[1:]


def _by_sdk(served: ServedModel, client: SdkClient, count: int) -> RouteCost:
    before = [served.cpu_s(kind) for kind in ("generator", "learner")]
    client.tell(f"samples {count} {_LENGTH}")
    took = client.answer()["took"]
    return _cost(served, before, count, took)


async def _of_generator(served: ServedModel, count: int, route: str) -> RouteCost:
    before = [served.cpu_s(kind) for kind in ("generator", "learner")]
    began = time.monotonic()
    headers = {"authorization": f"Bearer {served.token}"}
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as session:
        bodies = (_ROUTES[route](f"own-{number}").model_dump(mode="json") for number in range(count))
        await asyncio.gather(*(_answered(session, f"{served.generator}{route}", body) for body in bodies))
    return _cost(served, before, count, time.monotonic() - began)


async def _answered(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
    async with session.post(url, json=body) as answer:
        text = await answer.text()
        if answer.status != 200:
            sys.exit(f"error: the generator answers {answer.status}: {text[:500]}")


def _for_learners(name: str) -> WireModel:
    sampling = Sampling(temperature=1.0, max_tokens=_LENGTH, min_tokens=_LENGTH)
    return GenerateRequest(request_id=name, prompt_token_ids=_PROMPT, sampling=sampling, purpose="evaluate")


def _for_adapters(name: str) -> WireModel:
    return AdapterSampleRequest(
        request_id=name,
        namespace="own",
        prompt_token_ids=_PROMPT,
        max_tokens=_LENGTH,
        temperature=1.0,
        ignore_ends=True,
    )


_ROUTES: dict[str, Callable[[str], WireModel]] = {
    "/v1/generate": _for_learners,
    "/v1/adapters/sample": _for_adapters,
}


def _cost(served: ServedModel, before: Sequence[float], count: int, took: float) -> RouteCost:
    used = [served.cpu_s(kind) - was for kind, was in zip(("generator", "learner"), before, strict=True)]
    return RouteCost(1000 * used[0] / count, 1000 * used[1] / count, count / took)


def _report(
    firsts: dict[str, list[dict[str, float]]], costs: dict[str, list[RouteCost]], arguments: argparse.Namespace
) -> str:
    lines = [
        "# Samples of a client of the Tinker API", "",
        f"`python -m benchmarks.tenant_load.samples`: `headway serve` on {arguments.model.name}, an adapter of rank "
        f"{arguments.rank} on all layers. {described_machine()}.", "",
        f"## From a save to the first token ({GOAL_S:g} s wanted)", "",
        f"Seconds from the call of the save, {arguments.rounds} of each kind: median, most.", "",
        "| sampler | saved | first token | a second sample takes |",
        "|---|---|---|---|",
    ]  # fmt: skip
    for kind, found in firsts.items():
        cells = [[each[name] for each in found] for name in ("saved", "first", "second")]
        lines.append(f"| {kind} | " + " | ".join(f"{statistics.median(of):.3f}, {max(of):.3f}" for of in cells) + " |")
    lines += [
        "", "## CPU of a completion", "",
        f"{arguments.completions} completions of {_LENGTH} tokens; medians of three rounds in turns.", "",
        "| asked by | generator, ms | learner, ms | completions/s |",
        "|---|---|---|---|",
    ]  # fmt: skip
    for name, asked in costs.items():
        cells = [[getattr(each, field) for each in asked] for field in ("generator_ms", "learner_ms", "rate")]
        generator, learner, rate = map(statistics.median, cells)
        lines.append(f"| {name} | {generator:.2f} | {learner:.2f} | {rate:.0f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
